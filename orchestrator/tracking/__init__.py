"""Metrics to MLflow and Prometheus, from a process of their own that stalls nobody."""
