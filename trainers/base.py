"""`BaseTrainer`, by the name that configurations and programs use."""

from trainers.trainer.base_trainer import BaseTrainer

__all__ = ["BaseTrainer"]
