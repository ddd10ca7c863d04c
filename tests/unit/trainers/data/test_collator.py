"""Batches by a collator of one's own, columns that are no numbers, and the dimension that is cut and filled up."""

from __future__ import annotations

import numpy as np
import pytest

from gangway.errors import DataError, UsageError
from tests.unit.training import assert_equal, of, trainer
from trainers.base import BaseTrainer
from trainers.config import DataConfig
from trainers.data.collate import CollateInfo, collate, stack
from trainers.data.sources.iterable import Numbered
from trainers.trainer.build import build

LENGTH = 9


def to_length(examples):
    """Cuts and fills up, and counts the examples."""
    rows = [example["tokens"][:LENGTH] for example in examples]
    return {"tokens": np.stack([np.pad(row, (0, LENGTH - len(row))) for row in rows])}


def too_few(examples):
    return {"tokens": np.zeros((len(examples) + 1, LENGTH), np.int32)}


def to_the_longest(examples):
    longest = max(len(example["tokens"]) for example in examples)
    return {"tokens": np.stack([np.pad(example["tokens"], (0, longest - len(example["tokens"]))) for example in examples])}


class Ragged:
    """Example i has i % 5 + 9 tokens, and a text."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"tokens": np.full(LENGTH + index % 5, index % 16, np.int32), "title": f"number {index}"}


def ragged(arguments):
    return Ragged(), Ragged()


def made(tmp_path, cls=BaseTrainer, **data):
    examples = ragged(None)
    settings = {"sequence_length": LENGTH - 1, "ignore_columns": ["title"], **data}
    given = trainer(tmp_path, data={**settings, "dataset": f"{__name__}:ragged"}, max_num_steps=3).arguments
    return cls(given, *examples)


def test_a_collator_makes_the_batches(tmp_path):
    by_path = made(tmp_path / "path", collator=f"{__name__}:to_length")
    by_path.train()

    class Own(BaseTrainer):
        def build_collator(self):
            seen = []
            return lambda examples: (seen.append(1), to_length(examples))[1]  # a closure

    by_hook = made(tmp_path / "hook", cls=Own)
    by_hook.train()
    assert_equal(by_path.output.state, by_hook.output.state)
    build(by_path)
    batch = by_path.dataloaders.dataloader_train.batch(0)
    assert batch["tokens"].shape[-1] == LENGTH
    assert np.unique(batch["sample_id"]).size == 16
    assert np.all(np.asarray(batch["weight"]) == 1)
    assert "eval_loss" in by_path.output.metrics  # the held-out data too


@pytest.mark.parametrize(
    ("collator", "message"),
    [
        ("too_few", r"the collator returned tokens \[2, 9\] for 1 examples: expected leaves \[1, \.\.\.\]"),
        ("to_the_longest", "the collator returned leaves of other shapes or types than before: tokens .*; pad to a fixed length"),
    ],
)
def test_a_collator_that_makes_no_batch_is_reported(tmp_path, collator, message):
    with pytest.raises(DataError, match=message):
        made(tmp_path, collator=f"{__name__}:{collator}").train()


def test_columns_that_are_no_numbers_are_named_and_may_be_left_out(tmp_path):
    row = {"sample_id": np.int32(0), "x": np.ones(2), "title": "a", "about": {"k": 1}}
    with pytest.raises(DataError, match=r"no numbers: title \(<U1\), about \(object\); .*data\.ignore_columns=\[title, about\]"):
        stack([row, row], [True, True])
    kept = made(tmp_path, collator=f"{__name__}:to_length", ignore_columns=["title"])
    assert "title" not in kept.batching.reader(Ragged())(0)
    assert "title" in made(tmp_path, collator=f"{__name__}:to_length", ignore_columns=[]).batching.reader(Ragged())(0)


@pytest.mark.parametrize("column", ["sample_id", "weight"])
def test_columns_that_every_batch_needs_cannot_be_left_out(column):
    with pytest.raises(ValueError, match=f"{column} cannot be left out"):
        DataConfig(ignore_columns=(column,))


def test_another_dimension_may_be_cut_and_filled_up():
    example = {"image": np.arange(6.0).reshape(2, 3), "wide": np.arange(6.0).reshape(2, 3)}
    info = {"image": CollateInfo(length=2, dim=1), "wide": CollateInfo(length=4, pad_value=-1, mask="seen", dim=-1)}
    row = collate(example, info, "keep_start")
    assert row["image"].tolist() == [[0, 1], [3, 4]]
    assert row["wide"].tolist() == [[0, 1, 2, -1], [3, 4, 5, -1]]
    assert row["seen"].tolist() == [1, 1, 1, 0]
    with pytest.raises(DataError, match=r"a leaf of shape \[2, 3\] has no dimension 2"):
        collate(example, {"image": CollateInfo(length=2, dim=2)}, "keep_start")


def test_a_dict_or_a_tuple_will_do():
    expected = CollateInfo(4, -1, "seen", 1)
    for given in (expected, (4, -1, "seen", 1), {"length": 4, "pad_value": -1, "mask": "seen", "dim": 1}):
        assert CollateInfo.of("tokens", given) == expected

    class Mine(BaseTrainer):
        def build_data_collate_info(self):
            return {"tokens": (LENGTH,)}

    arguments_only = Mine(trainer_arguments())
    assert arguments_only.batching.collated(Numbered(Ragged()))[11]["tokens"].shape == (LENGTH,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((4, 0, None, 0, 1), "tokens is .*: expected a CollateInfo, or a dict or tuple of length, pad_value, mask, dim"),
        ({"size": 4}, "tokens is .*: expected a CollateInfo"),
        ((0,), "has length 0 and dim 0: expected integers, and a length of at least 1"),
        ((None, True), "has length None"),
        (7, "tokens is 7: expected a CollateInfo"),
        ((1, False, 0, 1), r"tokens is \(1, False, 0, 1\), which is \(pack_dim, sp_slice, .* of VeOmni: give CollateInfo"),
        ((-1, True, -100, 1), "of VeOmni"),
        ({"pack_dim": 0, "sp_slice": False}, "of VeOmni"),
        ((4, 0, 0), "expected the name of a new leaf as mask, or None, found 0"),
        ((4, 0, "tokens"), "expected the name of a new leaf as mask, or None, found 'tokens'"),
        ((4, "0"), "expected a number as pad_value, found '0'"),
        (CollateInfo(length=4, pad_value=True), "expected a number as pad_value, found True"),
        (CollateInfo(length=True), "has length True"),
        ((4, 0, None, False), "has length 4 and dim False"),
    ],
)
def test_what_is_no_info_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        CollateInfo.of("tokens", given)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"a": CollateInfo(length=4, pad_value=0.5)}, "a is int32, which cannot hold the pad_value 0.5"),
        ({"b": CollateInfo(length=4, pad_value=-100)}, "b is uint8, which cannot hold the pad_value -100"),
        ({"a": CollateInfo(length=4, mask="b")}, "the mask b of a is another leaf already"),
        ({"a": CollateInfo(length=4, mask="m"), "b": CollateInfo(length=4, mask="m")}, "the mask m of b is another leaf already"),
    ],
)
def test_what_a_leaf_cannot_hold_is_refused(info, message):
    with pytest.raises(DataError, match=message):
        collate({"a": np.zeros(3, np.int32), "b": np.zeros(2, np.uint8)}, info, "keep_start")


def test_leaves_of_one_length_share_a_mask_and_a_fraction_fills_up_fractions():
    info = {"a": CollateInfo(length=2, mask="m"), "b": CollateInfo(length=2, pad_value=0.5, mask="m")}
    row = collate({"a": np.zeros(1, np.int8), "b": np.ones(1, np.float32)}, info, "keep_start")
    assert (row["b"].tolist(), row["m"].tolist()) == ([1, 0.5], [1, 0])


def trainer_arguments():
    from trainers.config.arguments import TrainingArguments

    return TrainingArguments(name="x", max_num_steps=1)


def test_a_run_tells_no_note_about_its_data(tmp_path, events):
    made(tmp_path, collator=f"{__name__}:to_length").train()
    assert of(events, "note") == []
