"""What users write, each with one mistake in it. The line of the mistake has the comment `# the mistake`."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from tests.programs.tiny import Numbers, Table, TableTask
from trainers.base import BaseTrainer
from trainers.callbacks import Callback


class WrongShapes(Table):
    def __call__(self, tokens):
        return self.embed[...][tokens] @ jnp.zeros((7, 256))  # the mistake


class WrongShapesTask(TableTask):
    def build_model(self, rngs: nnx.Rngs):
        return WrongShapes(16, rngs)


class NoSuchColumn(Numbers):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        column = "tokens" if int(row["sample_id"]) != 70 else "text"
        return {"tokens": row[column], "sample_id": row["sample_id"]}  # the mistake


def without_a_column(arguments):
    return NoSuchColumn(96, arguments.data.sequence_length), None


class Raises(Callback):
    def on_step_end(self, state, **kwargs):
        if state.global_step == 2:
            raise ValueError("this callback fails")  # the mistake


class WithTheCallback(BaseTrainer):
    def __init__(self, arguments, *datasets):
        super().__init__(arguments, *datasets, callbacks=(Raises(),))


def mistake(number: int) -> str:
    """Returns what a message says of the line of the mistake, the first of which has number 0."""
    lines = Path(__file__).read_text().splitlines()
    at = [index + 1 for index, line in enumerate(lines) if line.endswith("  # the mistake")][number]
    function = ("__call__", "__getitem__", "on_step_end")[number]
    return f"{__file__}, line {at}, in {function}: {lines[at - 1].strip()}"
