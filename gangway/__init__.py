"""The ground of all packages: storage, the machinery of the configuration, what processes tell each other, errors. No JAX."""
