"""Data with a state of its own: a resumed run sets it and reads nothing again."""

from __future__ import annotations

from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest

from gangway.errors import DataError, UsageError
from tests.programs.tiny import Numbers
from tests.unit.training import FIXED, StopAt, arguments, assert_equal, of, trainer
from trainers.base import BaseTrainer
from trainers.data import streams
from trainers.data.iterated_loader import IteratedLoader
from trainers.data.sources.iterable import IterableSource
from trainers.data.streams import Stream, decoded, encoded
from trainers.loop.saver import DataState

NUMBERS = Numbers(96, 8)


class Examples:
    """A list of examples that counts how many are read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 96

    def __getitem__(self, index):
        self.read += 1
        return {"tokens": NUMBERS[index]["tokens"]}


def of_grain(examples):
    options = grain.ReadOptions(num_threads=0)
    return grain.MapDataset.source(examples).shuffle(seed=3).repeat().to_iter_dataset(options)


class Own:
    """Its own iterator, which begins anew at `iter`; the state is bytes."""

    def __init__(self, examples):
        self.examples, self.next = examples, 0

    def __iter__(self):
        self.next = 0
        return self

    def __next__(self):
        self.next += 1
        return self.examples[(self.next - 1) * 7 % 96]

    def get_state(self):
        return self.next.to_bytes(4, "big")

    def set_state(self, state):
        self.next = int.from_bytes(state, "big")


class Held:
    """The iterable has the state, and its next iterator begins there."""

    def __init__(self, examples):
        self.examples, self.next = examples, 0

    def __iter__(self):
        while True:
            self.next += 1
            yield self.examples[(self.next - 1) * 5 % 96]

    def state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


class OfTorchdata(Held):
    """With the names of its protocol."""

    state_dict, load_state_dict = Held.state, Held.set_state
    state = set_state = None


def made_of(tmp_path, make, *callbacks, **changes):
    examples = Examples()
    given = arguments(tmp_path, optimizer=FIXED, checkpoint={"save_steps": 3}, **changes)
    return examples, BaseTrainer(given, make(examples), Numbers(21, 8), callbacks=callbacks)


def told(events, text):
    return [event["message"] for event in of(events, "note") if text in event["message"]]


@pytest.mark.slow("reads much data")
@pytest.mark.parametrize("make", [of_grain, Own, Held, OfTorchdata])
def test_a_resumed_run_sets_the_state_and_reads_nothing_again(tmp_path, events, make):
    _, whole = made_of(tmp_path / "whole", make)
    expected = whole.train()
    _, first = made_of(tmp_path, make, StopAt(7, "requested"))
    reached = int(first.train().batch_index)
    assert 7 <= reached < 12
    events.clear()
    examples, resumed = made_of(tmp_path, make)
    assert_equal(resumed.train(), expected)
    assert resumed.output.metrics["samples_digest"] == whole.output.metrics["samples_digest"]
    assert of(events, "restored")[0]["step"] == reached
    # One example shows the shapes; the loader reads four batches ahead.
    assert examples.read <= 1 + (12 - reached + 5) * 16
    assert not told(events, "cannot be positioned")


def test_after_a_rollback_the_stream_goes_back_to_the_nearest_state(events):
    examples, notes = Examples(), []
    source = IterableSource(Own(examples), 16, notes.append)  # batches of 2; 8 states
    order = [int(source[index]["tokens"][0]) for index in range(40)]
    examples.read = 0
    assert int(source[23]["tokens"][0]) == order[23]  # no longer kept, and 26 is the oldest state: from the beginning
    assert examples.read == 24
    assert int(source[39]["tokens"][0]) == order[39]  # ahead of it is the state of 38
    assert examples.read == 24 + 2
    state = source.state_at(40)
    again = IterableSource(Own(examples), 16, notes.append)
    again.remember(40, state)
    examples.read = 0
    assert int(again[41]["tokens"][0]) == int(Own(examples).examples[41 * 7 % 96]["tokens"][0])
    assert examples.read == 2 + 1


def test_an_iterator_with_a_state_can_go_back_to_its_beginning():
    loader = IteratedLoader(Batched(Own(Examples())), 16, trainer_mesh())
    first = np.asarray(loader.batch(0)["tokens"])
    loader.batch(20)
    np.testing.assert_array_equal(np.asarray(loader.batch(0)["tokens"]), first)


def test_each_epoch_of_a_loader_begins_anew():
    loader = IteratedLoader([{"tokens": np.full((16, 9), number, np.int32)} for number in range(3)], 16, trainer_mesh())
    for _ in range(2):
        assert [int(batch["tokens"][0, 0, 0]) for batch in loader.epoch()] == [0, 1, 2]


def test_the_end_is_found_without_counting(tmp_path, events):
    class Short(Held):
        def __iter__(self):
            while self.next < 70:
                self.next += 1
                yield self.examples[self.next - 1]

    _, first = made_of(tmp_path, Short)
    state = first.train()
    examples, again = made_of(tmp_path, Short)
    assert_equal(again.train(), state)
    assert (again.output.metrics["samples"], str(again.output.stop_reason)) == (70, "end_of_data")
    assert examples.read <= 1


class OfBatches(Held):
    """As many examples as it is told."""

    number = 0

    def __iter__(self):
        while self.next < self.number:
            self.next += 1
            yield self.examples[(self.next - 1) % 96]


@pytest.mark.parametrize("number", [1, 8, 16, 20, 21, 23, 44, 70, 100])
@pytest.mark.parametrize("ahead", [True, False])
def test_an_end_amid_a_batch_is_where_it_is_also_for_who_asks_beyond_it_first(number, ahead):
    """The loader reads ahead: it may ask for the batch after the last one before it reads the rows of the last."""
    stream = OfBatches(Examples())
    stream.number = number
    source = IterableSource(stream, 64, pytest.fail)  # batches of 8
    last = -(-number // 8) * 8
    stops = [*range(8, last, 8), *([last + 8, last] if ahead else [last, last + 8])]
    assert [source.available(stop) for stop in stops] == [min(stop, number) for stop in stops]
    for index in range(max(0, last - 8), number):
        assert int(source[index]["sample_id"]) == index
    with pytest.raises(IndexError, match=f"the data ends after {number} examples"):
        source[number]
    # A restart at the end finds it, and reads nothing again.
    stream = OfBatches(Examples())
    stream.number = number
    again = IterableSource(stream, 64, pytest.fail)
    again.remember(last, source.state_at(last))
    assert (again.available(last + 8), again.available(last), stream.examples.read) == (number, number, 0)


class Anew:
    """Begins anew at each `iter`, and its iterators have the state: the number of the pass, and of the item."""

    def __init__(self, number=3):
        self.number, self.passes, self.read = number, 0, 0

    def __iter__(self):
        self.passes += 1
        return Counted(self, self.passes)


class Counted:
    def __init__(self, of, number):
        self.of, self.at = of, [number, 0]

    def __iter__(self):
        return self

    def __next__(self):
        if self.at[1] >= self.of.number:
            raise StopIteration
        self.of.read += 1
        self.at[1] += 1
        return tuple(self.at)

    def get_state(self):
        return list(self.at)

    def set_state(self, state):
        self.at = list(state)


class Plain(Anew):
    def __iter__(self):
        self.passes += 1
        return iter([item for item in Counted(self, self.passes)])  # noqa: C416 - an iterator without a state


class Continuing(Anew):
    """Its own iterator, whose `iter` does not go back: only a state does."""

    def __init__(self):
        super().__init__()
        self.one = Counted(self, 1)
        self.get_state, self.set_state = self.one.get_state, self.one.set_state

    def __iter__(self):
        return self.one


def streamed(iterable, passes):
    return Stream(iterable, every=1, num_states=9, no_way_back="no way back", note=pytest.fail, passes=passes)


def all_of(stream):
    items = []
    while not stream.ended:
        try:
            items.append(stream.read())
        except StopIteration:
            break
    return items


def test_a_stream_of_datasets_is_read_again_for_its_state_is_not_exact():
    datasets = pytest.importorskip("datasets")
    shuffled = datasets.Dataset.from_dict({"x": [*range(60)]}).to_iterable_dataset().shuffle(seed=1, buffer_size=10)
    whole = [example["x"] for example in shuffled]
    for _ in zip(range(25), shuffled, strict=False):
        pass
    shuffled.load_state_dict(shuffled.state_dict())
    assert [example["x"] for example in shuffled] != whole[25:]  # if this fails, its states may be used
    stream = streamed(datasets.Dataset.from_dict({"x": [*range(60)]}).to_iterable_dataset(), passes=1)
    assert not stream.has_state
    assert stream.can_go_back


def test_a_state_of_torchdata_that_is_no_json_is_told_and_read_again():
    class WithTensors(Plain):
        def state_dict(self):
            return {"generator": object()}

        def load_state_dict(self, state):
            raise AssertionError

    notes = []
    stream = Stream(WithTensors(), every=1, num_states=9, no_way_back="no way back", note=notes.append)
    assert all_of(stream) == [(1, 1), (1, 2), (1, 3)]
    assert [note.endswith(": a resumed run reads the data again up to its position") for note in notes] == [True]
    assert "which WithTensors returned, cannot be saved" in notes[0]


@pytest.mark.parametrize("make", [Anew, Plain])
def test_each_pass_begins_anew_and_positions_count_on(make):
    stream = streamed(make(), passes=3)
    assert [item[1] for item in all_of(stream)] == [1, 2, 3] * 3
    assert (stream.position, stream.length, stream.ended) == (9, 3, True)


def test_what_goes_on_where_it_ended_is_set_to_its_beginning():
    assert all_of(streamed(Continuing(), passes=2)) == [(1, 1), (1, 2), (1, 3)] * 2


def test_an_iterator_without_a_state_has_one_pass():
    stream = streamed(iter([1, 2]), passes=2)
    assert (all_of(stream), stream.ended) == ([1, 2], True)


def test_nothing_at_all_is_read_once():
    assert all_of(streamed([], passes=3)) == []


def test_passes_of_other_lengths_are_an_error():
    anew = Anew()
    stream = streamed(anew, passes=3)
    for _ in range(4):
        stream.read()
    anew.number = 2
    with pytest.raises(DataError, match="Anew ended after 2 batches, and after 3 in the pass before: expected as many in every"):
        all_of(stream)


@pytest.mark.parametrize("position", range(10))
def test_a_stream_goes_on_in_the_pass_that_its_state_is_of(position):
    """The first process has read ahead, into the next pass, when the state is saved."""
    first = streamed(Anew(), passes=3)
    expected = all_of(first)
    first.go_to(0, 9)
    for _ in range(position):
        first.read()
    text = first.state_at(position)
    anew = Anew()
    again = streamed(anew, passes=3)
    again.remember(position, text)
    again.go_to(position, 0)
    assert [item[1] for item in all_of(again)] == [item[1] for item in expected[position:]]
    assert (again.position, anew.read) == (9, 9 - position)


# ---------------------------------------------------------------------- what a checkpoint has of it


def test_the_state_is_not_used_for_batches_of_another_size(tmp_path, events):
    made_of(tmp_path, Held, max_num_steps=6)[1].train()
    events.clear()
    made_of(tmp_path, Held, max_num_steps=8, global_batch_size=8)[1].train()
    assert told(events, "it is of batches of 16, and global_batch_size is 8 now; the data is read again up to its position")


@pytest.mark.parametrize(
    ("shared", "states", "note"),
    [
        (True, ["s"], None),  # every host reads all of it: one state will do for any number of hosts
        (True, ["s", "t"], "it was saved by 2 hosts, and the run has 1 now"),
        (False, ["s"], "it was saved by 2 hosts, and the run has 1 now"),
    ],
)
def test_on_another_number_of_hosts(shared, states, note):
    taken, notes = [], []
    loader = SimpleNamespace(is_stream=True, is_shared=shared, remember=lambda *state: taken.append(state))
    recorded = {"num_hosts": 2, "global_batch_size": 16, "states": states}
    DataState(loader, 16, notes.append).restore({"batch_index": 5, "data_state": recorded})
    assert taken == ([(5, "s")] if note is None else [])
    assert [note in text for text in notes] == ([] if note is None else [True])


def test_batches_of_hosts_that_share_rows_are_refused(monkeypatch):
    """This host has all rows of the mesh, and would give half of them."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UsageError, match=r"hosts of this mesh share rows: mesh\.tensor or mesh\.context goes over several hosts"):
        IteratedLoader([], 16, trainer_mesh())


@pytest.mark.parametrize(("states", "own"), [(["s", "t"], "t"), (["s"], "s")])
def test_each_host_takes_its_own_state(monkeypatch, states, own):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    taken = []
    loader = SimpleNamespace(is_stream=True, is_shared=False, remember=lambda *state: taken.append(state))
    recorded = {"num_hosts": 2, "global_batch_size": 16, "states": states}
    DataState(loader, 16, pytest.fail).restore({"batch_index": 5, "data_state": recorded})
    assert taken == [(5, own)]


def test_data_without_a_state_has_none_in_its_checkpoints(tmp_path, events):
    class Plain(Held):
        state = None

    _, made = made_of(tmp_path, Plain, max_num_steps=4)
    made.train()
    assert DataState(trainer(tmp_path).configure_dataloaders().dataloader_train, 16, print).meta(4) == {}
    assert made.training.saver.data_state.meta(4) == {}


@pytest.mark.parametrize("state", [b"\x00\xff", {"a": [1, 2.5, None, "x"]}, 3, 2**100])
def test_states_are_kept_as_they_are(state):
    assert decoded(encoded(state, "It")) == state


@pytest.mark.parametrize("state", [(1, 2), {1: 2}, np.int64(3), float("nan"), object()])
def test_states_that_would_change_are_refused(state):
    with pytest.raises(UsageError, match=r"the state of the data, which It returned, cannot be saved: .*; expected bytes, or"):
        encoded(state, "It")


def test_a_state_that_grows_too_large_is_given_up_with_a_note(monkeypatch):
    monkeypatch.setattr(streams, "MAX_STATE_BYTES", 22)
    notes = []
    stream = Stream(Held(Examples()), every=1, num_states=3, no_way_back="", note=notes.append)
    for _ in range(10):
        stream.read()
    assert not notes
    assert stream.state_at(9) is not None
    stream.read()  # the state after ten items has a digit more
    assert "is not saved: a resumed run reads the data again" in notes[0]
    assert stream.state_at(9) is None


class Batched:
    """Batches of a stream of examples, which has the state."""

    def __init__(self, examples):
        self.examples = examples
        self.get_state, self.set_state = examples.get_state, examples.set_state

    def __iter__(self):
        return self

    def __next__(self):
        return {"tokens": np.stack([next(self.examples)["tokens"] for _ in range(16)])}


def trainer_mesh():
    from trainers.config import MeshConfig
    from trainers.parallel.mesh import make_mesh

    return make_mesh(MeshConfig())
