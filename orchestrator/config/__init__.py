"""YAML and overrides become a `JobConfig`, or a list of every error in them."""
