"""Pages of `docs` that are made from the code: the keys of a configuration, the commands, and what may be imported."""
