"""Data as users have it: lists, arrays, dicts of arrays, datasets of other libraries; repeated, shuffled and numbered."""

from __future__ import annotations

import subprocess
import sys

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import DataError, UsageError
from tests.programs.tiny import numbers
from tests.unit.training import FIXED, arguments, assert_equal, losses, trainer
from trainers.base import BaseTrainer
from trainers.data.sources.iterable import Numbered, held_out_examples, training_examples
from trainers.planning.estimate import plan

ROWS = 24


def token_rows(count=ROWS):
    return (np.arange(count)[:, None] * 7 + np.arange(9)).astype(np.int32) % 256


class TorchLike:
    """As `torch.utils.data.Dataset`: IndexError past the end."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if not 0 <= index < ROWS:
            raise IndexError(index)
        return {"tokens": token_rows()[index]}


KINDS = {
    "list": lambda: [{"tokens": row} for row in token_rows()],
    "dict of arrays": lambda: {"tokens": token_rows()},
    "dict of device arrays": lambda: {"tokens": jnp.asarray(token_rows())},
    "torch": TorchLike,
    "grain": lambda: grain.MapDataset.source([{"tokens": row} for row in token_rows()]),
}


def ids(examples, start, stop):
    return [int(examples[index]["sample_id"]) for index in range(start, stop)]


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_examples_of_every_kind_have_ids_after_those_of_the_training(tmp_path, kind):
    made = BaseTrainer(arguments(tmp_path), KINDS[kind](), KINDS[kind]())
    assert ids(made.dataset_eval, 0, 2) == [ROWS, ROWS + 1]


@pytest.mark.slow("reads much data")
@pytest.mark.parametrize("kind", KINDS)
def test_data_of_every_kind_trains_over_epochs_to_the_same_state(tmp_path, kind):
    constant = {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}}
    made = arguments(tmp_path / "epochs", max_num_steps=None, max_num_data_epochs=3, optimizer=constant)
    state = BaseTrainer(made, KINDS[kind](), KINDS[kind]()).train()
    assert int(state.step) == 5  # 72 examples in batches of 16
    reference = BaseTrainer(arguments(tmp_path / "steps", max_num_steps=5, optimizer=constant), KINDS["list"]())
    assert_equal(reference.train().params, state.params)


def test_each_epoch_has_all_examples_in_an_order_of_its_own():
    examples = training_examples(KINDS["list"](), 5, shuffle=True)
    epochs = [ids(examples, epoch * ROWS, (epoch + 1) * ROWS) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(training_examples(TorchLike(), 5, shuffle=True), 0, ROWS) == epochs[0]  # of the seed alone
    assert ids(training_examples(TorchLike(), 6, shuffle=True), 0, ROWS) != epochs[0]
    first = examples[0]
    assert first["tokens"].tolist() == token_rows()[int(first["sample_id"])].tolist()


def test_data_shuffle_false_keeps_the_order_of_the_data(tmp_path):
    data = {"dataset": "tests.programs.tiny:numbers", "sequence_length": 8, "shuffle": False}
    kept = BaseTrainer(arguments(tmp_path, data=data), KINDS["list"]()).dataset_train
    assert ids(kept, 0, 2 * ROWS) == [*range(ROWS), *range(ROWS)]
    shuffled = BaseTrainer(arguments(tmp_path, data={**data, "shuffle": True}), KINDS["list"]()).dataset_train
    assert ids(shuffled, 0, ROWS) != list(range(ROWS))


@pytest.mark.slow("trains more than once")
def test_a_resumed_run_goes_on_in_the_same_order(tmp_path, events):
    settings = {"optimizer": FIXED, "checkpoint": {"save_steps": 1}}
    whole = BaseTrainer(arguments(tmp_path / "whole", max_num_steps=7, **settings), KINDS["torch"]())
    expected, told = whole.train(), losses(events)
    events.clear()
    for steps in (4, 7):
        state = BaseTrainer(arguments(tmp_path / "two", max_num_steps=steps, **settings), KINDS["torch"]()).train()
    assert_equal(expected, state)
    assert losses(events) == told


def test_a_dataset_that_addresses_any_index_is_asked_for_it(tmp_path):
    train, _ = numbers(arguments(tmp_path))
    assert training_examples(train, 0, shuffle=True) is train
    assert held_out_examples(train, 10) is train


def test_an_id_of_the_data_stays_and_held_out_ids_come_after_those_of_the_training(tmp_path):
    assert Numbered([{"a": 1, "sample_id": np.int32(77)}])[0]["sample_id"] == 77
    made = trainer(tmp_path)
    held_out = BaseTrainer(made.arguments, KINDS["list"](), KINDS["list"]()).dataset_eval
    assert ids(held_out, 0, ROWS) == list(range(ROWS, 2 * ROWS))


def test_pairs_and_plain_arrays_get_names():
    pair = Numbered([(np.ones(2), 3)])[0]
    assert (pair["x"].tolist(), pair["y"]) == ([1, 1], 3)
    assert Numbered(np.arange(6).reshape(3, 2))[2]["x"].tolist() == [4, 5]
    assert Numbered(np.arange(3.0))[1]["x"] == 1


def test_data_that_repeats_itself_is_read_as_it_is():
    endless = grain.MapDataset.source([{"a": number} for number in range(3)]).repeat()
    examples = training_examples(endless, 0, shuffle=True)
    assert [examples[index]["a"] for index in (0, 1, 2, 3, 7)] == [0, 1, 2, 0, 1]
    assert examples[2**40]["sample_id"].dtype == np.int32


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], UsageError, r"the training data \(list\) has no examples"),
        ({"a": np.ones(3), "b": np.ones(4)}, UsageError, r"columns of different lengths \(a 3, b 4\)"),
        ({}, UsageError, "no column"),
        (["a", "b"], DataError, r"an example of the data is a str: expected a dict of arrays by name, or a pair \(x, y\)"),
        ([(1, 2, 3)], DataError, "a tuple of 3"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_in_plain_words(data, error, message):
    with pytest.raises(error, match=message):
        training_examples(data, 0, shuffle=False)[0]


def empty(made):
    return [], None


def test_the_plan_refuses_it_before_a_machine_is_taken(tmp_path):
    made = arguments(tmp_path, data={"dataset": f"{__name__}:empty"})
    assert any("the training data (list) has no examples" in problem for problem in plan(made, 1)[0])


def test_shuffling_ten_million_examples_needs_no_list_of_them():
    """In a process of its own, whose memory nothing else has grown."""
    code = """if True:
        import resource, time
        from trainers.data.sources.iterable import training_examples
        examples = training_examples(range(10**7), 0, shuffle=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert len({int(examples[index]["sample_id"]) for index in range(1000)}) == 1000
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    grown_kib = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert grown_kib < 20_000  # an order of ten million takes 80,000
