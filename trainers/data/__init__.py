"""Data: examples by index, and global batches by step."""
