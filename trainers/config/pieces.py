"""The arguments of a training that is put together of a model, a loss and data (`trainers.library`). Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gangway.config.section import PATH, Section, not_paths, require_none
from trainers.config.arguments import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class PiecesConfig(Section):
    """The pieces by name. null: an object of the process that trains, which no other process can import."""

    model: str | None = None
    """`package.module:Name`: a class of Flax NNX modules, or a function that returns one. It may take `rngs`."""
    loss: str | None = None
    """`package.module:function` (model, batch) -> the loss of each example, as a task's loss returns it."""
    data: str | None = None
    """`package.module:function` () -> the training data, or a folder with a file `NAME.npy` for each column."""
    eval_data: str | None = None
    """The same for the held-out data; null: there is none."""
    callbacks: tuple[str, ...] = ()
    """`package.module:Name` each: a class of callbacks, or a function () that returns one."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_paths(self, *(name for name in ("model", "loss") if getattr(self, name) is not None))
        for name in self.callbacks:
            if not PATH.fullmatch(name):
                yield f"callbacks: {name!r}: expected package.module:Name"


@dataclass(frozen=True, kw_only=True)
class PiecesArguments(TrainingArguments):
    pieces: PiecesConfig = field(default_factory=PiecesConfig)
