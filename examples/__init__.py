"""Each example: a module of under 60 lines, and a configuration of the same name that runs it."""
