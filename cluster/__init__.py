"""Machines: what exists, how to hold it, how to start and watch one process on it. Never imports JAX or `trainers`."""
