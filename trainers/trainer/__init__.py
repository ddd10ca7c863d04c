"""`BaseTrainer`, and how what it overrides becomes a training: `Assembly` makes the parts, `TrainingRun` trains with them."""
