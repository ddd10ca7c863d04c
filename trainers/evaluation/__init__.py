"""Held-out data, scores, and previews of generated text."""
