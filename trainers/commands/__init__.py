"""The code of the commands `python -m trainers.NAME`, which the modules of these names call."""
