"""Sources of examples, addressed by index."""
