"""The machinery of the configuration: YAML and overrides become sections, and every error is told at once. Free of JAX."""
