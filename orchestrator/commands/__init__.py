"""The code of the commands, which `gangway` and `python -m` call."""
