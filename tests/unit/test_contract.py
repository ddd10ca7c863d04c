"""What docs/contract.md says of batches, losses and the state."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests import ROOT
from tests.programs import short_pairs
from tests.programs.packed import of_mixture
from trainers.config import MeshConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.data.collate import SKIPPED
from trainers.data.loader import StepAddressedLoader
from trainers.data.sources.iterable import training_examples
from trainers.data.sources.preference import preference_pairs
from trainers.parallel.mesh import make_mesh
from trainers.protocol import METRIC, Loss, PerExample, Task
from trainers.step.loss import as_loss, weighted
from trainers.step.state import TrainState

TEXT = (ROOT / "docs" / "contract.md").read_text()


def table(heading):
    """The rows of the table below a heading: a list of cells each."""
    section = TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    return rows[2:]


def batch_of(data, rows=9):
    examples = training_examples(data, 0, shuffle=False)
    loader = StepAddressedLoader(examples, 2 * rows, make_mesh(MeshConfig()), accumulation_steps=2)
    try:
        return loader.batch(0)
    finally:
        loader.close()


OF_PACKED_ROWS = {"segments", "positions", "token_weight"}


def test_packed_rows_have_the_leaves_of_the_table():
    made = from_dict(TrainingArguments, {"name": "t", "max_num_steps": 1, "data": {"packing": "fit", "sequence_length": 32}})
    row = of_mixture(made)[0][0]
    assert row.keys() == {"tokens", "source", "sample_id", *OF_PACKED_ROWS}
    for name in OF_PACKED_ROWS:
        assert (row[name].shape, row[name].dtype) == ((33,), np.float32 if name == "token_weight" else np.int32)


def test_packed_examples_have_the_leaves_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = short_pairs.write(tmp_path / "pairs.jsonl", short_pairs.pairs(9, 0))
    data = {"packing": "fit", "sequence_length": 64, "paths": [path], "eval_fraction": 0}
    made = from_dict(TrainingArguments, {"name": "t", "max_num_steps": 1, "data": data, "preference": {"loss": "simpo"}})
    row = preference_pairs(made)[0][0]
    assert row.keys() == {"tokens", "sample_id", "example_weight", *OF_PACKED_ROWS}
    assert {row[name].shape for name in OF_PACKED_ROWS} == {(2, 65)}
    assert (row["example_weight"].ndim, row["example_weight"].dtype) == (1, np.float32)


def test_the_leaves_of_a_batch_are_those_of_the_table():
    data = {
        "size": np.arange(80.0).reshape(20, 4),
        "kind": np.arange(20),
        "flag": np.arange(20) > 3,
        "pixel": np.arange(20, dtype=np.uint8),
    }
    batch = batch_of(data)
    shapes = {name: (leaf.shape[1:], leaf.dtype.name) for name, leaf in batch.items()}  # without the micro-batches
    assert shapes == {
        "size": ((16, 4), "float32"),
        "kind": ((16,), "int32"),
        "flag": ((16,), "bool"),
        "pixel": ((16,), "uint8"),
        "sample_id": ((16,), "int32"),
        "weight": ((16,), "float32"),
    }
    for micro in range(2):
        assert batch["weight"][micro].tolist() == [1.0] * 9 + [0.0] * 7
        assert batch["sample_id"][micro].tolist()[:9] == [*range(9 * micro, 9 * micro + 9)]
        filling = batch["size"][micro, 9:]
        assert any(np.array_equal(filling[0], row) for row in data["size"])  # an ordinary example
    described = {name for row in table("The batch") for name in re.findall(r"`([\w/]+)`", row[0])}
    assert described == {"sample_id", "weight", SKIPPED, f"{METRIC}NAME", "source", "example_weight", *OF_PACKED_ROWS}


def test_a_weight_and_an_id_of_ones_own_take_the_place_of_the_trainers():
    data = [{"x": np.float32(n), "weight": 0.5, "sample_id": np.int32(100 + n)} for n in range(20)]
    batch = batch_of(data)
    assert batch["weight"][0].tolist() == [0.5] * 9 + [0.0] * 7
    assert batch["sample_id"][0].tolist()[:3] == [100, 101, 102]


# ---------------------------------------------------------------------- the loss

W = np.array([1.0, 1.0, 0.0], np.float32)
GIVEN = {
    "jnp": jnp,
    "PerExample": PerExample,
    "Loss": Loss,
    "losses": np.array([1.0, 5.0, np.nan], np.float32),
    "hits": np.array([True, False, True]),
    "n": np.array([1.0, 3.0, 100.0], np.float32),
    "w": W,
    "model_size": np.array([0.25, 0.25], np.float32),
}
FINITE = {**GIVEN, "losses": np.array([1.0, 5.0, 1000.0], np.float32)}


def on_devices(given):
    return {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}


EXPECTED = [  # the loss, and the metrics
    (3.0, {}),
    (3.0, {"accuracy": 0.5}),
    (6.0 / 4.0, {"accuracy": 1.0 / 4.0}),
    (3.0, {}),
    (3.0, {"accuracy": 0.5}),
    (3.5, {"fit": 3.0, "penalty": 0.5}),
]


@pytest.mark.parametrize(("row", "expected"), [*zip(table("The loss"), EXPECTED, strict=True)])
def test_each_form_of_a_loss_means_what_the_table_says(row, expected):
    code, _, filling = row
    for_you = filling == "left out for you"
    # Only the forms for each example are safe from a NaN in a row that does not count.
    loss = as_loss(weighted(eval(code.strip("`"), on_devices(GIVEN if for_you else FINITE)), W))
    assert float(loss.loss_sum / loss.num_targets) == pytest.approx(expected[0])
    assert {name: float(total / weight) for name, (total, weight) in loss.parts.items()} == pytest.approx(expected[1])


def test_the_forms_that_leave_rows_out_for_you_are_those_of_the_table():
    assert [row[2] for row in table("The loss")] == ["left out for you"] * 3 + ["your task leaves them out"] * 2 + [
        "as in its own form"
    ]


# ---------------------------------------------------------------------- the task and the state


def test_the_table_of_the_task_has_the_members_of_the_protocol():
    named = {re.match(r"`(\w+)", row[0])[1] for row in table("The task")}
    protocol = {name for name in vars(Task) if not name.startswith("_")}
    optional = {"set_step_nr", "predictions", "has_perplexity", "dataset", "own_parameters"}
    assert named == protocol | {"Task"} | optional


def test_the_table_of_the_state_has_each_field():
    named = [name for row in table("The state") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(TrainState))
