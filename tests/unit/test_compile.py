"""Compiled programs: kept for the next generation, loaded without tracing, compiled again when they must be."""

from __future__ import annotations

import os
import threading

import jax
import jax.numpy as jnp
import pytest

from tests.programs.tiny import Numbers
from tests.unit.training import arguments, losses, of
from trainers.base import BaseTrainer
from trainers.compile import Program, ProgramStore


@pytest.fixture
def made(tmp_path):
    """`made()` is a process's program: its answers, how often it was traced, what was noted."""

    def make(origin="launch 1"):
        traces, notes = [], []

        def double(x):
            traces.append(x.shape)
            return 2 * x

        store = ProgramStore(tmp_path, origin, notes.append)
        return Program("double", jax.jit(double), store, notes.append), traces, notes

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


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"nonsense"])
def test_a_damaged_one_is_compiled_again_and_said(made, tmp_path, damage):
    made()[0](jnp.ones(3))
    (path,) = tmp_path.glob("*.xla")
    path.write_bytes(damage(path.read_bytes()))
    program, traces, notes = made()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traces) == 1
    assert "could not be loaded" in notes[0]


def test_what_nobody_has_loaded_for_long_is_deleted_when_something_is_kept(made, tmp_path):
    def age(*paths):
        for path in paths:
            os.utime(path, (0, 0))

    made()[0](jnp.ones(3))
    old = set(tmp_path.iterdir())
    made()[0](jnp.ones(4))
    used = set(tmp_path.iterdir()) - old
    age(*old, *used)
    _, traces, _ = again = made()
    again[0](jnp.ones(4))
    assert traces == []
    again[0](jnp.ones(5))
    left = set(tmp_path.iterdir())
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
