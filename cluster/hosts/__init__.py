"""The machines that a run asks for, and what a cluster has room for. Pure functions."""
