"""Compiled programs: kept for the next generation, loaded without tracing, compiled again when they must be."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.programs.processes import PATIENCE_S
from tests.programs.tiny import Numbers
from tests.unit.training import arguments, losses, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.checkpoint.fingerprints import MeasuredState
from trainers.runtime import executables as compile_module
from trainers.runtime.executables import Program, ProgramStore
from trainers.runtime.load_attempts import MAX_CRASHES


@pytest.fixture
def made(tmp_path):
    """`made()` is a process's program: its answers, how often it was traced, what was noted."""

    def make(origin="launch 1", code=None):
        traces, notes = [], []

        def double(x):
            traces.append(x.shape)
            return 2 * x

        store = ProgramStore(tmp_path, origin, notes.append)
        return Program("double", jax.jit(double), store, notes.append, code=code), traces, notes

    return make


def test_the_next_process_loads_it_without_tracing(made):
    program, traces, _ = made()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traces) == 1
    again, traces, notes = made()
    assert again(jnp.ones(3)).tolist() == [2, 2, 2]
    assert (traces, notes) == ([], [])


def test_another_launch_traces_again_since_the_code_may_have_changed(made, tmp_path):
    made()[0](jnp.ones(3))
    program, traces, _ = made("launch 2")
    program(jnp.ones(3))
    assert len(traces) == 1
    assert len(list(tmp_path.glob("*.xla"))) == 1  # the same program, compiled once


def test_another_launch_loads_what_has_only_code_that_is_known_without_tracing(made):
    made(code="def double")[0](jnp.ones(3))
    other = [(made("launch 2", code="def double"), 0), (made("launch 2", code="def double, otherwise"), 1), (made("launch 2"), 1)]
    for (program, traces, _), traced in other:
        assert program(jnp.ones(3)).tolist() == [2, 2, 2]
        assert len(traces) == traced


def test_the_fingerprints_of_another_launch_are_not_traced_again(tmp_path, monkeypatch):
    mesh = Mesh(np.asarray(jax.devices()[:2]), "d")

    def measure(origin, state):
        return MeasuredState(mesh, ProgramStore(tmp_path, origin, print), print).fingerprint(state).tolist()

    state = jax.device_put({"a": jnp.arange(3.0), "b": jnp.ones(2, jnp.bfloat16)}, NamedSharding(mesh, PartitionSpec()))
    first = measure("launch 1", state)
    monkeypatch.setattr(jax.stages.Traced, "lower", lambda *args: pytest.fail("lowered again"))
    assert measure("launch 2", state) == first
    with pytest.raises(pytest.fail.Exception, match="lowered again"):
        measure("launch 2", {**state, "c": None})  # another tree of the same arrays


@pytest.mark.parametrize("held_in_memory", [True, False])
def test_what_comes_from_the_compile_cache_is_compiled_afresh_before_it_is_kept(tmp_path, held_in_memory):
    def ranked(x, y):
        return jnp.sort(jnp.tanh(x @ y) + held_in_memory, axis=0).sum(), x * 2

    jitted, x = jax.jit(ranked), jnp.ones((64, 64))
    expected = jitted.lower(x, x).compile()(x, x)[0]  # the compile cache has it now
    ProgramStore(tmp_path / "other", "launch 1", print).get("ranked", jitted, (x, x))
    jax.clear_caches()
    if held_in_memory:
        jitted.lower(x, x).compile()
    ProgramStore(tmp_path / "kept", "launch 1", print).get("ranked", jitted, (x, x))
    loaded, file = ProgramStore(tmp_path / "kept", "launch 1", print).get("ranked", jitted, (x, x))
    assert file is not None
    assert loaded(x, x)[0] == expected


def flip(place):
    def damage(data):
        at = int(place * len(data))
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"nonsense",
        *map(flip, (0, 0.01, 0.3, 0.5, 0.7, 0.999)),
    ],
)
def test_a_damaged_one_is_compiled_again_and_said(made, tmp_path, damage):
    made()[0](jnp.ones(3))
    (path,) = tmp_path.glob("*.xla")
    path.write_bytes(damage(path.read_bytes()))
    program, traces, notes = made()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traces) == 1
    assert len(notes) == 1
    assert "could not be loaded" in notes[0]
    program, traces, notes = made()  # what was compiled again is kept again
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert (traces, notes) == ([], [])


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"{}", flip(0.3)])
def test_a_damaged_pointer_is_not_followed(made, tmp_path, damage):
    made()[0](jnp.ones(3))
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(damage(path.read_bytes()))
    program, traces, notes = made()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traces) == 1
    assert path.name in notes[0]
    program, traces, notes = made()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert (traces, notes) == ([], [])


def test_bound_arguments_follow_those_of_a_call_and_their_shapes_suffice_to_load(tmp_path):
    class Bound:
        shapes, asked = (jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jnp.ones(3).sharding),), 0

        @property
        def arrays(self):
            self.asked += 1
            return (jnp.full(3, 10.0),)

    def process(notes):
        bound, traces = Bound(), []

        def total(x, more):
            traces.append(1)
            return x + more

        return Program("sum", jax.jit(total), ProgramStore(tmp_path, "launch", notes.append), notes.append, bound), bound, traces

    notes: list[str] = []
    for number_of_traces in (1, 0):  # the second process loads what the first has kept
        program, bound, traces = process(notes)
        x = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jnp.ones(3).sharding)
        program.load_ahead(x)
        program.prepare(x)
        # Nothing was read so far: a precompilation never needs it.
        assert (bound.asked, len(traces)) == (0, number_of_traces)
        assert program(jnp.ones(3)).tolist() == [11, 11, 11]
        assert len(traces) == number_of_traces
    assert notes == []


class Moving(NamedTuple):
    leaf: jax.Array


def test_a_class_that_has_moved_is_compiled_again_and_said(tmp_path, monkeypatch):
    def process(notes):
        store = ProgramStore(tmp_path, "launch", notes.append)
        return Program("double", jax.jit(lambda x: jax.tree.map(lambda leaf: 2 * leaf, x)), store, notes.append)

    tree = Moving(jnp.ones(3))
    process([])(tree)
    monkeypatch.setattr(sys.modules[__name__], "Moving", None)
    notes: list[str] = []
    assert process(notes)(tree).leaf.tolist() == [2, 2, 2]
    assert "could not be loaded" in notes[0]
    assert "Moving" in notes[0]


def test_a_tree_that_cannot_be_written_is_not_kept_and_said(tmp_path):
    class Local(NamedTuple):
        leaf: jax.Array

    notes: list[str] = []
    program = Program("double", jax.jit(lambda x: x), ProgramStore(tmp_path, "launch", notes.append), notes.append)
    assert program(Local(jnp.ones(3))).leaf.tolist() == [1, 1, 1]
    assert "is not kept for the next restart" in notes[0]
    assert kept(tmp_path) == set()


@jax.tree_util.register_pytree_node_class
class Applied:
    """A node that remembers a function."""

    def __init__(self, leaf):
        self.leaf = leaf

    def tree_flatten(self):
        return (self.leaf,), os.getcwd

    @classmethod
    def tree_unflatten(cls, function, leaves):
        return cls(*leaves)


def test_what_would_not_be_loaded_is_not_kept_and_said(tmp_path):
    notes: list[str] = []
    program = Program("double", jax.jit(lambda x: x), ProgramStore(tmp_path, "launch", notes.append), notes.append)
    assert program(Applied(jnp.ones(3))).leaf.tolist() == [1, 1, 1]
    assert "is not kept for the next restart: UnpicklingError: posix.getcwd is no class" in notes[0]
    assert kept(tmp_path) == set()


def test_a_folder_that_others_may_write_is_left_alone_and_that_is_said_once(made, tmp_path):
    made()[0](jnp.ones(3))
    before = {path: path.stat().st_mtime for path in kept(tmp_path)}
    tmp_path.chmod(0o777)
    program, traces, notes = made()
    program.load_ahead(jnp.ones(3))
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert program(jnp.ones(4)).tolist() == [2] * 4
    assert len(traces) == 2
    assert [note for note in notes if "chmod 700" in note] == notes[:1]
    assert {path: path.stat().st_mtime for path in kept(tmp_path)} == before


def test_a_file_that_others_may_write_is_compiled_again(made, tmp_path):
    made()[0](jnp.ones(3))
    (path,) = tmp_path.glob("*.xla")
    path.chmod(0o666)
    program, traces, notes = made()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traces) == 1
    assert "may be written by others" in notes[0]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("about", ["_libraries", "_cpu_flags"])
def test_another_version_or_another_cpu_has_executables_of_its_own(made, tmp_path, monkeypatch, about):
    """A folder may be shared by machines of several kinds."""
    made()[0](jnp.ones(3))
    monkeypatch.setattr(compile_module, about, lambda: "another")
    program, traces, _ = made()
    program(jnp.ones(3))
    assert len(traces) == 1
    assert len(list(tmp_path.glob("*.xla"))) == 2


OTHER = {  # than tests/unit has (conftest.py)
    "jax_disable_most_optimizations": False,
    "jax_optimization_level": "O1",
    "jax_exec_time_optimization_effort": 0.5,
    "jax_memory_fitting_level": "O1",
    "jax_memory_fitting_effort": 0.5,
    "jax_compiler_enable_remat_pass": False,
    "jax_xla_profile_version": 1,
}


@pytest.mark.parametrize("option", compile_module.COMPILER_OPTIONS)
def test_what_was_compiled_with_other_options_is_not_taken(option):
    before, value = compile_module._compiled_for(), jax.config.values[option]
    try:
        jax.config.update(option, OTHER[option])
        assert compile_module._compiled_for() != before
    finally:
        jax.config.update(option, value)


@pytest.mark.parametrize("variable", compile_module.COMPILER_VARIABLES)
def test_what_was_compiled_with_other_flags_is_not_taken(monkeypatch, variable):
    before = compile_module._compiled_for()
    monkeypatch.setenv(variable, "--another")
    assert compile_module._compiled_for() != before


def test_the_key_has_the_versions_of_all_that_takes_part(tmp_path, monkeypatch):
    packages = ("libtpu-0.0.41", "jax_cuda12_plugin-0.10.2", "nvidia_cudnn_cu12-9.1", "qwix-0.0.1")
    for name in (*packages, "unrelated-1.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(flax, "__version__", "flax's")
    monkeypatch.setattr(optax, "__version__", "optax's")
    found = compile_module._libraries.__wrapped__()
    for part in (jax.__version__, "flax's", "optax's", *packages):
        assert part in found
    assert sys.version.splitlines()[0] in found
    assert "unrelated" not in found


def test_there_is_room_for_so_much_and_what_is_in_use_stays(tmp_path, monkeypatch):
    def process(max_bytes):
        store = ProgramStore(tmp_path, "launch", print, max_bytes)
        return Program("double", jax.jit(lambda x: 2 * x), store, print)

    used = process(None)
    used(jnp.ones(3))
    mine = kept(tmp_path)
    process(None)(jnp.ones(4))
    for path in kept(tmp_path):
        os.utime(path, (0, time.time() - 24 * 3600))
    monkeypatch.setattr(compile_module, "TOUCH_EVERY_S", -1.0)
    used(jnp.ones(3))
    wait_until(lambda: all(path.stat().st_mtime > time.time() - 3600 for path in mine))
    process(1)(jnp.ones(5))
    left = kept(tmp_path)
    assert mine < left
    assert len(left) == 4


def test_what_was_loaded_is_watched_until_its_first_use_is_over(made, tmp_path):
    made()[0](jnp.ones(3))
    program, traces, _ = made()
    program.prepare(jnp.ones(3))
    assert journals(tmp_path) == []  # loaded: it may be long before it is used
    process = program.store._attempts
    seen, worked = [], process.worked
    over = threading.Event()
    process.worked = lambda file: (seen.extend(journals(tmp_path)), worked(file), over.set())
    for _ in range(3):
        assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert over.wait(PATIENCE_S)
    assert len(seen) == 1
    assert journals(tmp_path) == traces == []


def test_what_is_donated_to_the_next_step_is_no_failure(tmp_path):
    given_away = jnp.ones(3)
    given_away.delete()
    assert compile_module._is_sound(given_away)
    for _ in range(2):
        store = ProgramStore(tmp_path, "launch", print)
        program = Program("next", jax.jit(lambda x: x + 1, donate_argnums=0), store, print)
        x = jnp.zeros(3)
        for _ in range(20):
            x = program(x)
        assert x.tolist() == [20] * 3
    wait_until(lambda: not journals(tmp_path))
    assert not list(tmp_path.rglob("*.ended-*"))


def test_what_has_crashed_twice_is_neither_loaded_nor_kept(made, tmp_path):
    made()[0](jnp.ones(3))
    (path,) = tmp_path.glob("*.xla")
    program, _, _ = made()
    inode = path.stat().st_ino
    for number in range(MAX_CRASHES):
        program.store._attempts._strike(path.name, "crashed", str(number))
    program, traces, notes = made()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traces) == 1
    assert f"{MAX_CRASHES} processes crashed" in notes[0]
    assert path.stat().st_ino == inode
    for record in (tmp_path / "attempts").glob(f"*/{path.name}.*"):  # what the note says may be done
        assert str(record.parent) in notes[0]
        record.unlink()
    program, traces, notes = made()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert (traces, notes) == ([], [])


def test_the_room_is_the_configurations(tmp_path, monkeypatch):
    monkeypatch.setenv("GANGWAY_PROGRAMS", str(tmp_path / "programs"))
    runtime.install(runtime.Runtime(print, program_key="launch"))
    for value, expected in ((None, None), (0.5, 5e8)):
        assert trainer(tmp_path, kept_programs_gb=value).placement.programs.max_bytes == expected


def journals(folder):
    return list(folder.rglob("*.trying"))


def wait_until(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def kept(folder):
    return {path for path in folder.iterdir() if path.is_file()}


def test_what_nobody_has_loaded_for_long_is_deleted_when_something_is_kept(made, tmp_path):
    def age(*paths):
        for path in paths:
            os.utime(path, (0, 0))

    made()[0](jnp.ones(3))
    old = kept(tmp_path)
    made()[0](jnp.ones(4))
    used = kept(tmp_path) - old
    age(*old, *used)
    _, traces, _ = again = made()
    again[0](jnp.ones(4))
    assert traces == []
    again[0](jnp.ones(5))
    left = kept(tmp_path)
    assert used < left
    assert not old & left
    assert len(left) == 4


def test_other_shapes_compile_it_again_and_say_what_changed(made):
    program, traces, notes = made()
    program(jnp.ones(3))
    assert program(jnp.ones(5)).tolist() == [2] * 5
    assert traces == [(3,), (5,)]
    assert "double compiles again, because its arguments changed" in notes[0]
    assert "float32[3]" in notes[0]
    assert "float32[5]" in notes[0]


def test_the_same_program_of_another_tree_is_not_taken_for_it(tmp_path):
    """A state may have got a part without arrays in a later launch's code: the program is the same, its tree is not."""
    for launch, tree in enumerate(({"a": jnp.ones(3)}, {"a": jnp.ones(3), "b": None})):
        store = ProgramStore(tmp_path, launch, lambda note: None)
        program = Program("double", jax.jit(lambda x: jax.tree.map(lambda leaf: 2 * leaf, x)), store, lambda note: None)
        assert program(tree)["a"].tolist() == [2, 2, 2]


def test_a_wrong_number_of_arguments_is_an_error(made):
    program, _, _ = made()
    program(jnp.ones(3))
    with pytest.raises(TypeError):
        program(jnp.ones(3), jnp.ones(3))


class Shorter(Numbers):
    """From some index on, examples are shorter: a mistake that makes every later step compile again."""

    def __getitem__(self, index):
        example = super().__getitem__(index)
        return {**example, "tokens": example["tokens"][: 9 if index < 4 * 16 else 7]}


@pytest.mark.parametrize(("dataset", "notes"), [(Numbers, 0), (Shorter, 1)])
def test_a_step_that_compiles_again_after_the_second_is_noted_with_what_changed(tmp_path, events, dataset, notes):
    made = arguments(tmp_path, max_num_steps=6, checkpoint={"save_at_end": False})
    BaseTrainer(made, dataset(96, 8)).train()
    told = [event["message"] for event in of(events, "note") if "compiles again" in event["message"]]
    assert len(told) == notes
    if notes:
        assert "train_step compiles again, because its arguments changed: " in told[0]
        assert "['tokens']: int32[1, 16, 9]" in told[0]
        assert "-> int32[1, 16, 7]" in told[0]
        assert sorted(losses(events)) == [1, 2, 3, 4, 5, 6]
    # The watchdog must not take it for a step, and it may take as long as any compilation.
    phases = [event["phase"] for event in of(events, "phase")]
    assert phases == ["restore", "compile", "train", *["compile", "train"] * notes, "evaluate", "finish"]


def test_what_was_kept_is_loaded_beside_other_work_once(made, monkeypatch):
    made()[0](jnp.ones(3))
    program, traces, notes = made()
    loads = []
    load = program.store._load
    monkeypatch.setattr(program.store, "_load", lambda path: loads.append(threading.current_thread().name) or load(path))
    program.load_ahead(jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jnp.ones(3).sharding))
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert [name.rpartition("_")[0] for name in loads] == ["programs"]
    assert (traces, notes) == ([], [])


def test_a_damaged_one_that_is_loaded_ahead_is_compiled_again(made, tmp_path):
    made()[0](jnp.ones(3))
    (path,) = tmp_path.glob("*.xla")
    path.write_bytes(b"nonsense")
    program, traces, notes = made()
    program.load_ahead(jnp.ones(3))
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traces) == 1
    assert "could not be loaded" in notes[0]
