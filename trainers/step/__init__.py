"""The jitted train step and its state. Everything here is pure and traced."""
