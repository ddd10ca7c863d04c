"""Weights and configurations in the form of Hugging Face, family by family."""
