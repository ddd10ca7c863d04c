"""Recorders: further receivers of a run's numbers, beside the console, MLflow and Ray Train. See `recorder.py`."""
