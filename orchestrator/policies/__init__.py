"""Decisions after a failure: restart, resize, avoid a machine. Pure functions: numbers in, a decision out."""
