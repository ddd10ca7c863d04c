"""Examples that cannot be read: tried again, named, or left out and counted."""

from __future__ import annotations

import pytest

from gangway.errors import DataUnavailableError
from tests.programs.tiny import Numbers
from tests.unit.training import FIXED, arguments, of
from trainers.base import BaseTrainer
from trainers.config import DataConfig
from trainers.data.loader import Reader
from trainers.data.sources.conversations import conversations

DATA = {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers", "retry_backoff_s": 0.0}


class Failing(Numbers):
    """Raises `error` for the examples in `bad`, as often as `times` says."""

    def __init__(self, error, bad, times=10**9):
        super().__init__(96, 8)
        self.error, self.left = error, dict.fromkeys(bad, times)

    def __getitem__(self, index):
        if self.left.get(index, 0) > 0:
            self.left[index] -= 1
            raise self.error
        return super().__getitem__(index)


def trained(folder, dataset, **data):
    made = arguments(folder, data={**DATA, **data}, optimizer=FIXED, max_num_steps=4)
    own = BaseTrainer(made, dataset, None)
    own.train()
    return own


def test_an_error_that_passes_is_tried_again_with_longer_and_longer_waits():
    waits, notes = [], []
    reader = Reader(Failing(ConnectionError("gone"), [7], 3), DataConfig(), notes.append, waits.append)
    assert int(reader(7)["sample_id"]) == 7
    assert (waits, notes) == ([0.5, 1.0, 2.0], [])
    with pytest.raises(DataUnavailableError, match=r"example 7 of the data \(Failing\) could not be read, tried 2 times: Conn"):
        Reader(Failing(ConnectionError("gone"), [7]), DataConfig(retries=1, retry_backoff_s=2.0), notes.append, waits.append)(7)
    assert waits[3:] == [2.0]


def test_an_error_that_does_not_pass_is_not_tried_again_and_the_example_is_named():
    waits = []
    with pytest.raises(KeyError) as raised:
        Reader(Failing(KeyError("column"), [7]), DataConfig(), print, waits.append)(7)
    assert waits == []
    assert raised.value.__notes__ == ["while example 7 of the data (Failing) was read"]


def test_by_default_what_cannot_be_read_ends_training(tmp_path, events):
    with pytest.raises(DataUnavailableError, match="could not be read, tried 4 times"):
        trained(tmp_path, Failing(ConnectionError("gone"), [20]))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_example_of_a_shuffled_epoch_is_named_by_its_own_number(tmp_path, events, on_error):
    """And not by the number at which it is drawn."""
    made = arguments(tmp_path, data={**DATA, "on_error": on_error}, optimizer=FIXED, max_num_steps=4)
    data = Failing(ValueError("broken"), [40])
    data.takes_any_index = False
    own = BaseTrainer(made, data, None)
    reader = own.batching.reader(own.dataset_train)
    notes, found = [], []
    reader.note = notes.append
    for index in range(96):
        try:
            reader(index)
        except ValueError as error:
            found += error.__notes__
    expected = "example 40 of the data (Failing)"
    assert found == ([f"while {expected} was read"] if on_error == "raise" else [])
    assert notes == ([f"{expected} is left out: ValueError: broken"] if on_error == "skip" else [])


def test_a_record_is_named_by_its_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "p{number}", "completion": "c"}}\n' for number in range(20)))
    data = {"paths": [str(tmp_path / "a.jsonl")], "dataset": "trainers.data.sources.conversations:conversations"}
    data |= {"sequence_length": 8, "tokenizer": "bytes", "eval_fraction": 0.1, "examples": "completion"}
    made = arguments(tmp_path, data=data, task="trainers.tasks.causal_lm:CausalLMTask")
    own = BaseTrainer(made, *conversations(made))
    lines = {own.dataset_train.where_is(index) for index in range(18)}
    assert len(lines) == 18
    assert lines < {f"{tmp_path / 'a.jsonl'}, line {number}" for number in range(1, 21)}


@pytest.mark.slow("trains more than once")
def test_what_is_skipped_does_not_count_and_is_counted(tmp_path, events):
    whole = trained(tmp_path / "whole", Numbers(96, 8))
    events.clear()
    made = trained(tmp_path, Failing(ValueError("broken"), [3, 4, 40]), on_error="skip")
    assert made.output.metrics["samples"] == whole.output.metrics["samples"] - 3 == 61
    published = [event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"]]
    assert published[-1]["total_skipped_examples"] == 3
    notes = [event["message"] for event in of(events, "note") if "is left out: ValueError: broken" in event["message"]]
    assert len(notes) == 3


@pytest.mark.parametrize("setting", [{"retries": -1}, {"retry_backoff_s": -0.5}])
def test_settings_that_cannot_be(setting):
    with pytest.raises(ValueError, match="expected at least 0"):
        DataConfig(**setting)
