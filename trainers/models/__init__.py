"""Models: Flax NNX modules with logical axis names."""
