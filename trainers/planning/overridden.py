"""Which parts of a trainer its class has replaced: of those little can be said without running them."""

from trainers.base import BaseTrainer


def overrides(trainer: BaseTrainer, name: str) -> bool:
    return getattr(type(trainer), name) is not getattr(BaseTrainer, name)
