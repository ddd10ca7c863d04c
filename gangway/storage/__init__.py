"""Documents and files on a disk or in a bucket: written whole, created if absent, flushed, listed, deleted. Free of JAX."""
