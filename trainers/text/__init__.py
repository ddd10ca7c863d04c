"""Texts as tokens: tokenizers, and the turns of a conversation as a model's template writes them. Free of JAX."""
