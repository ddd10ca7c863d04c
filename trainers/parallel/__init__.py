"""The device mesh, where arrays lie on it, and groups of devices by name."""
