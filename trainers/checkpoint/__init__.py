"""Checkpoints: committed by all hosts or by none, restored from the newest that is whole."""
