"""Where examples come from, addressed by index."""
