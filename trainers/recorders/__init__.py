"""Where the numbers of a run go beside the console, MLflow and Ray Train. `base.py` says what a recorder is."""
