"""Snapshots in memory: their format, which slot may be written, and runs of one process that go on from one, bit for bit."""

from __future__ import annotations

import os
import random
import resource
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cluster.agent.snapshot_memory import Slots
from gangway.errors import UsageError
from tests.programs.processes import wait_until
from tests.unit.trainers.checkpoint.test_own_manager import Remembers
from tests.unit.trainers.loop.test_skipped_batches import Poison
from tests.unit.training import FIXED, assert_equal, losses, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.checkpoint.slots import PAGE, SEAL, Refused, Snapshot, Writer, num_bytes_of, table_of, views_of
from trainers.config.checkpoint import KNOWN_AFTER_STEPS
from trainers.loop.inflight import LOOK_AHEAD_STEPS
from trainers.loop.snapshots import Snapshots
from trainers.metrics.host_usage import bytes_available
from trainers.runtime.context import SnapshotFiles

NO_SAVES = {"checkpoint": {"save_at_end": False}, "optimizer": FIXED, "evaluation": {"max_batches": 1}}


@contextmanager
def making_slots():
    made = []

    def make(number=2):
        made.append(Slots(number))
        return tuple(made[-1].files)

    yield make
    for each in made:
        each.close()
        each.theirs.close()


@pytest.fixture
def slots():
    with making_slots() as make:
        yield make


def state(value):
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec("a"))
    values = {
        "w": np.arange(6000, dtype=np.float32).reshape(1000, 6) + value,
        "b": np.full(7, value, jax.numpy.bfloat16),
        "n": np.int32(value),
        "none": np.zeros((0, 3), np.float32),
    }
    everywhere = NamedSharding(mesh, PartitionSpec())
    return {name: jax.device_put(array, rows if name == "w" else everywhere) for name, array in values.items()}


def write(writer, table, number, value, size):
    writer.seal(number % size, number, writer.copy(number % size, views_of(state(value), table)), f'{{"step": {value}}}')


def newest(files, abstract):
    """The newest snapshot that is whole, as (number, state), and what is wrong with others."""
    found, why = {}, []
    for file in files:
        try:
            snapshot = Snapshot(file)
            found[snapshot.number] = (snapshot.told["step"], snapshot.read(abstract)())
        except Refused as error:
            why.append(str(error))
    return max(found.items(), default=(0, None)), why


# ---------------------------------------------------------------------- the format


def test_what_is_written_comes_back_on_the_same_devices(slots):
    files, one = slots(), state(3)
    table = table_of(one)
    writer = Writer(files, table, {"run": "here"})
    write(writer, table, 1, 3, 2)
    found = Snapshot(files[1])
    assert (found.number, found.about, found.told) == (1, {"run": "here"}, {"step": 3})
    made = found.read(one)()
    assert_equal(made, one)
    assert jax.tree.map(lambda leaf: leaf.sharding, made) == jax.tree.map(lambda leaf: leaf.sharding, one)
    assert found.lacks(one) == ""
    other = {**one, "w": jax.ShapeDtypeStruct((1000, 7), np.float32, sharding=one["w"].sharding)}
    assert found.lacks(other) == "it does not have ['w'][[0, 500], [0, 7]] as float32[1000, 7]"
    write(writer, table, 3, 4, 2)  # over it: what was read does not change with the memory
    assert_equal(made, one)


def test_every_flipped_byte_is_refused_by_name_and_the_older_one_is_whole(slots):
    files, rng = slots(), random.Random(1)
    table = table_of(state(0))
    writer, named = Writer(files, table, {}), set()
    write(writer, table, 1, 1, 2)
    write(writer, table, 2, 2, 2)
    size = os.fstat(files[0]).st_size
    parts = [part for part in table if part.num_bytes]
    used = [(0, SEAL.size + 8), (num_bytes_of(table), size), *((part.offset, part.offset + part.num_bytes) for part in parts)]
    for _ in range(150):
        at = rng.randrange(*rng.choice(used))
        right = os.pread(files[0], 1, at)
        os.pwrite(files[0], bytes([right[0] ^ 1 << rng.randrange(8)]), at)
        (number, (step, made)), why = newest(files, state(0))
        assert (number, step, len(why)) == (1, 1, 1)
        assert_equal(made, state(1))
        named |= set(why)
        os.pwrite(files[0], right, at)
    assert named == {"its header is damaged", *(f"{part.name} is damaged" for part in parts)}
    assert newest(files, state(0))[0][0] == 2


class UpTo(list):
    """Ends the copy before this part, as SIGKILL does."""

    def __init__(self, views, end):
        super().__init__(views)
        self.end = end

    def __iter__(self):
        yield from self[: self.end]
        raise KeyboardInterrupt


def test_a_copy_that_ends_at_any_write_leaves_the_one_before(slots):
    files = slots()
    table = table_of(state(0))
    writer = Writer(files, table, {})
    write(writer, table, 1, 1, 2)
    for end in range(len(table)):
        write(writer, table, 2, 2, 2)
        with pytest.raises(KeyboardInterrupt):
            writer.copy(0, UpTo(views_of(state(4), table), end))
        (number, (step, made)), why = newest(files, state(0))
        assert (number, step, why) == (1, 1, [""])
        assert_equal(made, state(1))
    digests = writer.copy(0, views_of(state(4), table))
    assert newest(files, state(0))[1] == [""]  # all is there but the header
    writer.seal(0, 4, digests, '{"step": 4}')
    assert newest(files, state(0))[0][0] == 4
    Writer(files, table, {})  # another training of this process counts from 1 again
    assert newest(files, state(0)) == ((0, None), ["", ""])


def test_the_memory_of_a_container_has_its_limit(tmp_path):
    for name, text in (("memory.max", "100"), ("memory.current", "60"), ("memory.stat", "anon 5\ninactive_file 10\n")):
        (tmp_path / name).write_text(text)
    assert bytes_available(str(tmp_path)) == 50
    (tmp_path / "memory.max").write_text("max\n")
    assert bytes_available(str(tmp_path)) > 1e6


# ---------------------------------------------------------------------- which slot may be written


class Pair:
    """Two hosts in this process, whose steps tell what theirs have. A state is made of its step."""

    def __init__(self, slots, every_steps, num_slots):
        self.files = [slots(num_slots) for _ in range(2)]
        self.hosts = [Snapshots(every_steps, files, state(0), {}, lambda: None) for files in self.files]
        self.step, self.in_flight, self.common, self.taken = 0, [], 0, []
        for host in self.hosts:
            host.start()
            assert wait_until(lambda host=host: host.newest == 0)

    def advance(self, held=()):
        """A step of both; of a host in `held` nothing is told of snapshots: they do not become whole."""
        began = {host.begin(self.step, state(self.step), dict) for host in self.hosts}
        assert len(began) == 1  # both, or none
        if began == {True}:
            self.taken.append(self.step)
        self.in_flight.append(min(host.newest for host in self.hosts))
        self.step += 1
        if len(self.in_flight) > LOOK_AHEAD_STEPS - 1:
            self.common = self.in_flight.pop(0)
            for number, host in enumerate(self.hosts):
                host.observe(self.common)
                while host._pending and host._pending[0].step <= self.step - LOOK_AHEAD_STEPS and number not in held:
                    before = host.newest
                    host.tell({})
                    assert wait_until(lambda host=host, before=before: host.newest > before)

    def whole(self):
        """The states that each host would have if all were killed now."""
        return [dict([newest_of]) if (newest_of := newest(files, state(0))[0])[0] else {} for files in self.files]


@pytest.mark.parametrize(("every_steps", "num_slots"), [(1, 2), (1, 8), (3, 2)])
def test_one_that_all_hosts_have_is_never_overwritten(slots, every_steps, num_slots):
    runtime.install(runtime.Runtime(lambda event: None))
    pair = Pair(slots, every_steps, num_slots)
    for at in range(40):
        pair.advance(held=(1,) if 15 <= at < 20 else ())
        both = [numbers_of(files) for files in pair.files]
        if pair.common:
            assert pair.common in both[0] & both[1] or max(both[0] & both[1]) > pair.common, (at, both)
    skipped = [host.skipped for host in pair.hosts]
    assert skipped[0] == skipped[1] > 0
    due = [step for step in range(40) if step % every_steps == 0]
    assert len(due) - len(pair.taken) - skipped[0] in (1, 2, 3)  # before all hosts were ready


def numbers_of(files):
    found = set()
    for file in files:
        try:
            found.add(Snapshot(file).number)
        except Refused:
            continue
    return found


def test_each_step_may_have_one_where_there_are_enough_slots(slots):
    runtime.install(runtime.Runtime(lambda event: None))
    pair = Pair(slots, 1, 1 + KNOWN_AFTER_STEPS)
    while pair.step < 30:
        pair.advance()
    assert [host.skipped for host in pair.hosts] == [0, 0]
    assert pair.taken == [*range(pair.taken[0], 30)]


def test_what_training_left_behind_is_none_and_its_slots_are_used_again(slots):
    runtime.install(runtime.Runtime(lambda event: None))
    files = slots()
    made = Snapshots(1, files, state(0), {}, lambda: None)
    made.start()
    assert wait_until(lambda: made.newest == 0)
    made.observe(0)
    assert [made.begin(step, state(step), dict) for step in (1, 2, 3)] == [True, True, False]
    made.leave_behind()
    assert not made.awaits(1)
    for step in (4, 5):
        assert made.begin(step, state(step), dict)
        assert made.awaits(step)
        made.tell({})
    assert wait_until(lambda: made.newest == 2)
    (number, (step, _)), _ = newest(files, state(0))
    assert (number, step, numbers_of(files)) == (2, 5, {1, 2})


def test_a_state_that_is_used_up_was_copied_before(slots):
    runtime.install(runtime.Runtime(lambda event: None))
    made = Snapshots(1, slots(), state(0), {}, lambda: None, waits=True)
    made.start()
    assert wait_until(lambda: made.newest == 0)
    for number in range(1, 20):
        made.observe(made.newest)
        given = state(number)
        assert made.begin(number, given, dict)
        for leaf in jax.tree.leaves(given):
            leaf.delete()
        made.tell({})
        assert wait_until(lambda number=number: made.newest == number)


def test_without_room_it_is_said_once_and_no_host_takes_any(slots, events):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        made = Snapshots(1, slots(), state(0), {}, lambda: None)
        made.start()
        assert wait_until(lambda: of(events, "note"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    made.observe(made.newest)
    assert not made.begin(1, state(1), dict)
    assert [event["message"] for event in of(events, "note")] == [
        "no more snapshots are taken, and training goes on without: OSError: [Errno 27] File too large"
    ]


# ---------------------------------------------------------------------- runs


class Dies(Callback):
    """At a step, as soon as so many snapshots are whole. Until all hosts are ready it goes slowly."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step_begin(self, state, **kwargs):
        snapshots = self.trainer.training.loop.snapshots
        if state.global_step == 1:
            assert wait_until(lambda: snapshots.newest == 0)

    def on_step_end(self, state, **kwargs):
        if state.global_step == self.step:
            assert wait_until(lambda: self.number in (None, self.trainer.training.loop.snapshots.newest))
            raise KeyboardInterrupt


def start(
    tmp_path, told, files=(), kept=(), generation=0, callbacks=(), cls=BaseTrainer, since=0, skip=(), every_steps=2, **changes
):
    """A process that trains; an agent has given it `files`, and `kept` of earlier ones."""
    host = runtime.Runtime(told.append, generation=generation, skip_batches=skip)
    # Copies: it closes what it was given.
    host.snapshot_files, host.snapshots_since = SnapshotFiles(tuple(files), tuple(map(os.dup, kept))), since
    runtime.install(host)
    made = trainer(tmp_path, *callbacks, cls=cls, **{**NO_SAVES, "snapshot": {"every_steps": every_steps}, **changes})
    for callback in callbacks:
        callback.trainer = made
    return made


def die(tmp_path, told, files, step, number, *callbacks, **how):
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, told, files, callbacks=(Dies(step, number), *callbacks), **how).train()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of a run without snapshots."""
    made = trainer(tmp_path_factory.mktemp("whole"), **NO_SAVES)
    made.train()
    return made.output


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """The storage of a run whose process has died at step 11, and what it has left: snapshots of steps 4 and 6."""
    folder, told = tmp_path_factory.mktemp("dead"), []
    with making_slots() as make:
        files = make()
        die(folder, told, files, 11, 2)
        assert [event["since"] for event in of(told, "snapshots")] == [0, 0]  # it has begun; its first one is whole
        yield folder, files


def test_a_run_goes_on_from_the_newest_and_ends_as_an_undisturbed_one(dead, slots, whole):
    folder, first = dead
    told = []
    made = start(folder, told, slots(), kept=first, generation=1)
    assert_equal(made.train(), whole.state)
    (restored,) = of(told, "restored")
    assert (restored["step"], restored["source"]) == (6, "memory")
    assert sorted(losses(told)) == [*range(7, 13)]
    assert made.output.metrics["samples_digest"] == whole.metrics["samples_digest"]
    assert made.output.metrics["lineage"] == whole.metrics["lineage"]


def test_a_second_death_before_the_first_snapshot_goes_on_from_the_same(dead, slots, whole):
    folder, first = dead
    second, told = slots(), []
    die(folder, told, second, 9, 0, kept=first, generation=1)
    assert [event["since"] for event in of(told, "snapshots")] == [0]  # those of generation 0 are still needed
    told = []
    assert_equal(start(folder, told, slots(), kept=(*first, *second), generation=2).train(), whole.state)
    assert of(told, "restored")[0]["step"] == 6


@pytest.mark.parametrize(("every_steps", "number"), [(1, 6), (3, 2)])
def test_one_at_each_step_or_at_some(tmp_path, slots, whole, every_steps, number):
    first, told = slots(8), []
    die(tmp_path, [], first, 11, number, every_steps=every_steps)
    assert_equal(start(tmp_path, told, slots(8), kept=first, generation=1, every_steps=every_steps).train(), whole.state)
    assert of(told, "restored")[0]["step"] == 9


def damage(file):
    os.pwrite(file, bytes([os.pread(file, 1, PAGE)[0] ^ 1]), PAGE)


def test_a_damaged_one_is_named_and_the_next_one_used_and_then_storage(tmp_path, slots, whole):
    first, told = slots(), []
    die(tmp_path, [], first, 11, 2)
    damage(first[0])
    assert_equal(start(tmp_path, told, slots(), kept=first, generation=1).train(), whole.state)
    assert of(told, "restored")[0]["step"] == 4
    assert [event["message"] for event in of(told, "note")] == ["the snapshot of step 6 is not used: .step is damaged"]
    damage(first[1])
    told = []
    assert_equal(start(tmp_path, told, slots(), kept=first, generation=1).train(), whole.state)
    assert of(told, "restored") == []
    assert sorted(losses(told)) == [*range(1, 13)]


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ({"since": 1, "generation": 2}, "the snapshot of step 6: it is of generation 0, which does not count any more"),
        ({"skip": (3,)}, "the snapshot of step 6: it belongs to an abandoned trajectory: it was trained on batches that are"),
        ({"name": "other"}, "the snapshot of step 6: it is of generation 0, which does not count any more"),
        ({"optimizer": {"name": "sgd", "learning_rate": 0.1}}, ""),
    ],
)
def test_what_is_of_another_course_does_not_count(dead, slots, order, problem):
    folder, first = dead
    told = []
    start(folder, told, slots(), kept=first, **{"generation": 1, **order, "max_num_steps": 2}).train()
    assert of(told, "restored") == []
    if problem:
        (note,) = [event["message"] for event in of(told, "note") if "in common" in event["message"]]
        assert note.startswith(f"the hosts have no snapshot in common ({problem}")


def test_a_newer_checkpoint_wins(tmp_path, slots):
    first, before, told = slots(), [], []
    die(tmp_path, before, first, 9, 2, checkpoint={"save_steps": 4})
    assert wait_until(lambda: [event["step"] for event in of(before, "saved")] == [4, 8])
    made = start(tmp_path, told, slots(), kept=first, checkpoint={"save_steps": 4})
    made.train()
    (restored,) = of(told, "restored")
    assert (restored["step"], restored["source"]) == (8, "storage")
    assert "the snapshot of step 6 is not used: the checkpoint of step 8 is newer" in [e["message"] for e in of(told, "note")]


def test_batches_left_out_while_it_was_copied_are_in_it(tmp_path, slots):
    """The loss of batch 5 is NaN, which is known two steps later: when the snapshot of step 6 has begun already."""
    without = trainer(tmp_path / "without", Poison(5), **NO_SAVES)
    without.train()
    first, told = slots(), []
    die(tmp_path, [], first, 11, 2, Poison(5))
    made = start(tmp_path, told, slots(), kept=first, generation=1)
    assert_equal(made.train(), without.output.state)
    assert of(told, "restored")[0]["step"] == 6
    assert made.output.metrics["skipped_batches"] == [5]


@pytest.mark.slow("three longer runs")
def test_a_rollback_leaves_what_it_has_begun_and_takes_more(tmp_path, slots):
    anomalies = {"anomalies": {"non_finite": "rollback"}, "checkpoint": {"save_steps": 2, "save_at_end": False}}
    without = trainer(tmp_path / "without", Poison(8), **{**NO_SAVES, **anomalies, "max_num_steps": 20})
    without.train()
    first, told = slots(), []
    settings = {**anomalies, "max_num_steps": 20}
    die(tmp_path, [], first, 17, None, Poison(8), Again(), **settings)
    made = start(tmp_path, told, slots(), kept=first, generation=1, **settings)
    assert_equal(made.train(), without.output.state)
    assert [event["source"] for event in of(told, "restored")] == ["memory"]
    assert of(told, "restored")[0]["step"] >= 12


class Again(Callback):
    """Training is slow enough that each snapshot becomes whole in time."""

    def on_step_end(self, state, **kwargs):
        snapshots = self.trainer.training.loop.snapshots
        told = snapshots._begun - len(snapshots._pending)
        assert wait_until(lambda: snapshots.newest >= told or snapshots.newest < 0)


class UsesUp(BaseTrainer):
    """A hook that donates the state that it gets."""

    def on_step_start(self, state, step):
        return jax.jit(lambda state: state, donate_argnums=0)(state)


def test_a_hook_may_use_the_state_up(tmp_path, slots, whole):
    first, told = slots(), []
    die(tmp_path, [], first, 11, 2, cls=UsesUp)
    assert_equal(start(tmp_path, told, slots(), kept=first, generation=1, cls=UsesUp).train(), whole.state)
    assert of(told, "restored")[0]["step"] == 6


def test_where_there_can_be_none_it_is_refused(tmp_path, events):
    with pytest.raises(UsageError, match=r"snapshot.every_steps = 2: no agent keeps them .*launch the run \(gangway run\)"):
        trainer(tmp_path, snapshot={"every_steps": 2}).train()
    Remembers.kept = {}
    with pytest.raises(UsageError, match=r"snapshot.every_steps = 2: the checkpoint manager is not gangway's"):
        start(tmp_path, [], cls=Remembers).train()


def test_what_all_hosts_know_comes_after_so_many_steps():
    assert KNOWN_AFTER_STEPS == 2 * LOOK_AHEAD_STEPS + 1
