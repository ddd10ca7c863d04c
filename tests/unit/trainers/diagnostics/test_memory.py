"""Out of memory: what is said of it, and what is advised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from gangway.errors import OutOfMemoryError, kind_of
from orchestrator.failures.classify import FailureKind, PostMortem, classify
from orchestrator.failures.history import past_failure
from orchestrator.policies.restart import GiveUp, RestartPolicy, decide
from tests.programs.tiny import TableTask
from tests.unit.training import arguments, trainer
from trainers.config import MeshConfig
from trainers.diagnostics import memory
from trainers.diagnostics.memory import out_of_memory
from trainers.parallel import host_memory
from trainers.parallel import mesh as meshes
from trainers.runtime.executables import Program
from trainers.worker import exception_event

FULL = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3221225472 bytes.\nBufferAssignment"
)
LARGE = {"mesh": {"data": 4, "fsdp": 2}, "data": {"sequence_length": 512}, "global_batch_size": 64}


def the_device_is_full(monkeypatch, after=0, compiling=False):
    """At the edge: the compiled step's call, or its compilation."""
    call, calls = Program.__call__, []

    def full(program, *args):
        if program.name == "train_step":
            calls.append(program)
            if len(calls) > after:
                raise FULL
        return call(program, *args)

    if compiling:
        call = Program.prepare
    monkeypatch.setattr(Program, call.__name__, full)


class Divided(TableTask):
    """Its tables are divided over the fsdp axis."""

    def build_model(self, rngs):
        model = super().build_model(rngs)
        model.embed = nnx.Param(model.embed[...], logical_axes=(None, "embed"))
        model.out = nnx.Param(model.out[...], logical_axes=("embed", None))
        return model


DIVIDED = {"task": "tests.unit.trainers.diagnostics.test_memory:Divided"}


def error_of(tmp_path, **changes):
    with pytest.raises(OutOfMemoryError) as raised:
        trainer(tmp_path, **changes).train()
    assert raised.value.__cause__ is FULL
    return raised.value


@pytest.mark.slow("compiles a step")
def test_a_step_that_does_not_fit_says_what_takes_the_room_and_what_to_change_first(tmp_path, monkeypatch):
    the_device_is_full(monkeypatch)
    error = error_of(tmp_path, **DIVIDED, mesh={"data": 4, "fsdp": 2}, global_batch_size=32)
    first, *lines = str(error).splitlines()
    assert "no room for another 3.00 GiB" in first
    # Two tables of 256 x 16 float32, divided over fsdp 2, and two moments of each.
    assert "A device holds parameters 16.00 KiB, optimizer 32.0" in first
    assert "activations and other temporaries" in first
    assert "unknown" not in first
    changes = first.partition("First change: ")[2] + "\n".join(lines)
    assert "accumulation_steps 1 -> 2 (micro-batches of 16 sequences, not 32): about" in changes
    assert "mesh.fsdp 2 -> 8, mesh.data 4 -> 1 (parameters and moments are shared out): about 36.0" in changes
    assert "dtype float32 -> bfloat16" in changes
    assert "optimizer.moment_dtype -> bfloat16: about 16.0" in changes
    assert any("8.00 KiB of 16.00 KiB: params['embed'] float32[256, 16], divided over" in line for line in lines)
    assert lines[-1] == "  the error was: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3221225472 bytes."


def test_at_the_first_step_it_is_final_and_later_it_may_be_tried_again(tmp_path, monkeypatch):
    the_device_is_full(monkeypatch)
    assert kind_of(error_of(tmp_path)) == {"kind": "out_of_memory", "deterministic": True}
    monkeypatch.undo()
    the_device_is_full(monkeypatch, after=3)
    assert kind_of(error_of(tmp_path)) == {"kind": "out_of_memory", "deterministic": False}


def test_a_program_that_cannot_even_be_compiled(tmp_path, monkeypatch):
    the_device_is_full(monkeypatch, compiling=True)
    error = error_of(tmp_path, **DIVIDED)
    assert "temporaries of unknown size (not compiled)" in str(error)
    assert "First change: mesh.fsdp 1 -> 8" in str(error)  # what can be told goes before what cannot
    assert error.deterministic


def test_the_driver_gives_up_at_once_with_this_text(tmp_path, monkeypatch):
    the_device_is_full(monkeypatch)
    event = exception_event(error_of(tmp_path))
    failure = classify([PostMortem(host=0, exception=event, failed_at_s=1.0)])
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert "a device is out of memory" in failure.summary
    assert "First change:" in failure.summary
    assert isinstance(decide([past_failure(failure, None)], RestartPolicy()), GiveUp)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["accumulation_steps", "mesh.fsdp", "dtype", "optimizer.moment_dtype", "data.sequence_length", "more devices"]),
        ({"global_batch_size": 8}, ["mesh.fsdp", "dtype", "optimizer.moment_dtype", "data.sequence_length", "more devices"]),
        ({"global_batch_size": 8, "mesh": {"data": 1, "fsdp": 8}, "dtype": "bfloat16", "data": {"sequence_length": 64},
          "optimizer": {"moment_dtype": "bfloat16"}}, ["more devices"]),
        ({"global_batch_size": 8, "mesh": {"data": 1, "fsdp": 8}, "dtype": "bfloat16", "data": {"sequence_length": 64},
          "param_dtype": "bfloat16", "optimizer": {"moment_dtype": "bfloat16"}},
         ["optimizer.master_weights", "more devices"]),
        ({"global_batch_size": 8, "mesh": {"data": 1, "fsdp": 8}, "dtype": "bfloat16", "data": {"sequence_length": 64},
          "param_dtype": "bfloat16", "optimizer": {"moment_dtype": "bfloat16", "master_weights": "stochastic"}},
         ["more devices"]),
    ],
)  # fmt: skip
def test_nothing_is_advised_that_is_done_already_or_cannot_be(tmp_path, changes, expected):
    made = arguments(tmp_path, **{**LARGE, **changes})
    used = memory.Usage(parameters=4, optimizer=8, batch=1, temporaries=1000, divided=12)
    assert [change.text.split(" ")[0] for change in memory.changes(used, made, made.mesh.resolve(8))] == [
        name.split(" ")[0] for name in expected
    ]


def test_the_dearest_harmless_change_comes_first(tmp_path):
    made = arguments(tmp_path, **LARGE)
    heavy_state = memory.Usage(parameters=4000, optimizer=8000, batch=1, temporaries=1000, divided=12000)
    assert memory.changes(heavy_state, made, made.mesh.resolve(8))[0].text.startswith("mesh.fsdp 2 -> 8, mesh.data 4 -> 1")


@pytest.mark.parametrize(
    ("platform", "changes", "advised"),
    [
        ("tpu", {}, True),
        ("cpu", {}, False),
        ("tpu", {"optimizer": {"offload": "host"}}, False),
        ("tpu", {"optimizer": {"name": "muon"}}, False),
    ],
)
def test_the_memory_of_hosts_is_advised_where_moments_can_lie_there(tmp_path, monkeypatch, platform, changes, advised):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    made = arguments(tmp_path, **LARGE, **changes)
    used = memory.Usage(parameters=4, optimizer=8, batch=1, temporaries=1000, divided=12)
    told = [str(change) for change in memory.changes(used, made, made.mesh.resolve(8))]
    assert any(line.startswith("optimizer.offload none -> host") and "about 8 B less" in line for line in told) is advised


def test_bytes_on_a_device_are_those_of_its_shard():
    mesh = meshes.make_mesh(MeshConfig(data=2, fsdp=4))
    place = meshes.parameter_sharding(mesh, ("embed", None), (16, 3))
    assert memory.bytes_on_a_device(jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=place)) == 4 * 3 * 4
    on_host = jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=place.with_memory_kind(host_memory.KIND))
    assert memory.bytes_on_a_device(on_host) == 0
    assert [memory.shown(n) for n in (12, 3 << 10, 5 << 20, 7 << 29)] == ["12 B", "3.00 KiB", "5.00 MiB", "3.50 GiB"]


@pytest.mark.parametrize(
    ("error", "full"), [(FULL, True), (RuntimeError(str(FULL)), False), (ValueError("out of memory"), False)]
)
def test_only_the_runtimes_own_error_is_a_full_device(error, full):
    assert out_of_memory(error) is full


@pytest.mark.parametrize(
    ("task", "remat", "advised"),
    [
        ("trainers.tasks.causal_lm:CausalLMTask", "none", True),
        ("trainers.tasks.causal_lm:CausalLMTask", "dots_saveable", False),
        ("tests.programs.tiny:TableTask", "none", False),
    ],
)
def test_activation_checkpointing_is_advised_where_it_is_off_and_would_help(tmp_path, task, remat, advised):
    made = arguments(tmp_path, **LARGE, task=task, model={"remat": remat})
    used = memory.Usage(parameters=4, optimizer=8, batch=1, temporaries=1000, divided=12)
    texts = [change.text for change in memory.changes(used, made, made.mesh.resolve(8))]
    assert any(text.startswith("model.remat none -> auto") for text in texts) is advised
