"""`trainers.planning.program` and `collectives`: the step compiled for devices that need not be there."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gangway.errors import UsageError
from trainers.config import DataConfig, LossConfig, MeshConfig, ModelConfig, OptimizerConfig
from trainers.config.arguments import TrainingArguments
from trainers.models import context_attention
from trainers.models.partial_attention import Score
from trainers.planning import collectives, program
from trainers.planning.estimate import load_datasets
from trainers.planning.program import StandIn

LAYERS, DEVICES, LONG = 3, 4, 4096
MODEL = ModelConfig(vocab_size=256, width=64, num_layers=LAYERS, num_heads=4, num_kv_heads=2, mlp_width=128, remat="full")


def arguments(**changed) -> TrainingArguments:
    data = DataConfig(paths=("nowhere",), sequence_length=32)
    settings = {"name": "t", "max_num_steps": 10, "global_batch_size": 8, "model": MODEL, "data": data, **changed}
    return TrainingArguments(**settings)


@pytest.mark.slow("compiles a step for several devices")
def test_a_divided_state_is_reported_with_its_memory_and_its_exchanges():
    divided, whole = (
        program.compiled(arguments(mesh=MeshConfig(data=1, fsdp=size), global_batch_size=8), jax.devices()[:size])
        for size in (DEVICES, 1)
    )
    assert divided[0] == whole[0] == []
    memory, alone = divided[1]["memory"], whole[1]["memory"]
    # A quarter of parameters and moments, and scales and counters whole.
    assert memory["arguments"] < 0.4 * alone["arguments"]
    assert divided[1]["mesh"]["fsdp"] == DEVICES
    assert divided[1]["whole"] == {}
    assert whole[1]["exchanged"] == []
    gathered = [exchange for exchange in divided[1]["exchanged"] if exchange.kind == "all-gather" and "mlp" in exchange.scope]
    assert gathered
    assert all(exchange.times % LAYERS == 0 for exchange in gathered)
    # The weights go around, and not the products of all examples.
    largest = MODEL.width * MODEL.mlp_width * 4
    assert all(each.bytes <= each.times * 3 * largest for each in divided[1]["exchanged"] if "layers/mlp" in each.scope)


@pytest.mark.slow("compiles steps of several policies")
def test_the_policy_is_the_first_that_has_room():
    model = dataclasses.replace(MODEL, num_layers=2, remat="auto")
    needs = dict(program.compiled(arguments(model=model), jax.devices()[:1], 1)[1]["remat"])
    assert list(needs) == ["none", "dots_with_no_batch_dims_saveable", "save_dot_except_mlp", "full"]
    # Not by their order: what a model so small needs at its peak is not what it keeps.
    room = min(needs.values())
    problems, facts = program.compiled(arguments(model=model), jax.devices()[:1], room)
    assert problems == []
    chosen = next(policy for policy, need in needs.items() if need <= room)
    assert facts["remat"] == [each for each in needs.items() if [*needs].index(each[0]) <= [*needs].index(chosen)]
    assert facts["memory"]["peak"] == room
    assert program.compiled(arguments(model=model), jax.devices()[:1])[1]["remat"] == [("none", needs["none"])]


@pytest.mark.slow("compiles a step for several devices")
def test_of_gpus_the_memory_of_the_host_is_counted_apart():
    made = arguments(optimizer=OptimizerConfig(offload="host"))
    one, other = (program.compiled(made, jax.devices()[:1], kind=kind)[1]["memory"] for kind in ("cpu", "gpu"))
    # Two moments of what has two dimensions: embeddings and norms of layers, and the matrices of the layers.
    heads = MODEL.width + 2 * MODEL.num_kv_heads * MODEL.channels
    of_layer = MODEL.width * (heads + MODEL.width + 3 * MODEL.mlp_width + 2)
    moments = 2 * 4 * (MODEL.vocab_size * MODEL.width + LAYERS * of_layer)
    assert (one["host"], other["host"]) == (0, moments)
    assert {name: one[name] - other[name] for name in ("peak", "arguments")} == {"peak": moments, "arguments": moments}


@pytest.mark.slow("compiles a step for several devices")
def test_the_examples_are_divided_in_all_layers():
    few, many = (
        program.compiled(arguments(mesh=MeshConfig(data=1, fsdp=DEVICES), data=data), jax.devices()[:DEVICES])[1]
        for data in (DataConfig(paths=("nowhere",), sequence_length=length) for length in (32, 512))
    )

    def of_layers(facts):
        return sum(each.bytes for each in facts["exchanged"] if each.scope in ("layers/mlp", "layers/attention"))

    assert of_layers(many) == of_layers(few) > 0


def shared(parts, exchange="auto", **sizes):
    """Returns the facts of a long sequence that so many devices share; each pair of devices has a replica."""
    made = arguments(
        global_batch_size=2,
        model=dataclasses.replace(MODEL, context_attention=exchange, **sizes),
        mesh=MeshConfig(data=1, fsdp=2, context=parts),
        data=DataConfig(paths=("nowhere",), sequence_length=LONG, packing="concat"),
    )
    return program.compiled(made, jax.devices()[: 2 * parts])[1]


@pytest.mark.slow("compiles a step for several devices")
def test_the_memory_of_activations_falls_with_the_devices_that_share_a_sequence(monkeypatch):
    # Small blocks: the scores of one do not depend on the length.
    monkeypatch.setattr(context_attention, "Score", partial(Score, queries=128, keys=128))
    whole, half, quarter = (shared(parts, width=256, mlp_width=1024)["memory"]["temporary"] for parts in (1, 2, 4))
    assert half < 0.7 * whole
    assert quarter < 0.7 * half


@pytest.mark.slow("compiles a step for several devices")
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_devices_that_share_a_sequence_exchange_what_the_arithmetic_says(exchange):
    parts, facts = 4, shared(4, exchange)
    keys_and_values = 2 * LONG * MODEL.num_kv_heads * MODEL.channels * 4
    if exchange == "gather":
        # Forward and backward; of the gradients, which are added up, a device gets its own.
        expected = LAYERS * (2 + 1 / parts) * keys_and_values
    else:
        # Forward, forward again, and backward: a part at a time, from all devices but the own one. Gradients go all around, and
        # begin with zeros.
        expected = LAYERS * (3 * (parts - 1) + parts + 1) * keys_and_values / parts
    # What the layers return goes to its places, and its gradient back. The rows of the table, of which each device has some
    # channels, become rows that have all of them, in two exchanges, and their gradients go back.
    expected += (2 + 4) * LONG * MODEL.width * 4 / parts
    assert facts["exchanged_over"]["context"] == pytest.approx(expected, rel=0.05)


BATCH, TOKENS, BYTES = 16, 32, 4
TABLE = MODEL.vocab_size * MODEL.width * BYTES
OF_LAYER = MODEL.width * (2 * 64 + 2 * 32 + 3 * MODEL.mlp_width) * BYTES
"""Queries and output, keys and values, and the MLP: the matrices of a layer."""
ACTIVATIONS = BATCH * TOKENS * MODEL.width * BYTES
NORMS = (2 * LAYERS + 1) * MODEL.width * BYTES
GRADIENTS = LAYERS * OF_LAYER + NORMS + 2 * TABLE
"""The table's come of the rows that were looked up, and of the logits."""


@pytest.mark.slow("compiles a step for several devices")
@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        # All gradients, once.
        ({"data": 4}, {"data": GRADIENTS}),
        # Weights once forward and once backward, and gradients once; of the table, the logits gather it once, and rows that are
        # looked up go from those who have some channels of all to those who have all channels of some, and back.
        (
            {"data": 1, "fsdp": 4},
            {"fsdp": 2 * LAYERS * OF_LAYER + (GRADIENTS - TABLE) + TABLE + 2 * ACTIVATIONS / 4},
        ),
        # Sums of activations: in each layer of the output, again for it, and of the gradients by queries, keys and values; of the
        # MLP, and of the gradients by gate and up; of the table and the logits. Each device keeps its part of them (the compiler
        # for CPUs has no reduce-scatter), and they are gathered: before both, again before both, and after both backward; after
        # the last layer, and before the first one backward.
        ({"data": 1, "tensor": 2}, {"tensor": (LAYERS * (5 + 3) + 2 + LAYERS * 6 + 2) * ACTIVATIONS}),
        # The share of a device of the gradients goes to the other slice, once; what no axis divides is summed over all devices.
        (
            {"slice": 2, "data": 1, "fsdp": 2},
            {"slice": (LAYERS * OF_LAYER + TABLE) / 2, "slice x fsdp": NORMS + TABLE},
        ),
    ],
    ids=["data", "fsdp", "tensor", "slice"],
)
def test_devices_exchange_over_each_axis_what_the_arithmetic_says(mesh, expected):
    made = arguments(mesh=MeshConfig(**mesh), global_batch_size=BATCH)
    _, facts = program.compiled(made, jax.devices()[: math.prod(mesh.values())])
    told = facts["exchanged_over"]
    assert {axes: told[axes] for axes in expected} == pytest.approx(expected, rel=0.05)
    # Within a slice: the rest.
    assert {"fsdp"} >= told.keys() - expected.keys()


@pytest.mark.slow("compiles a step for several devices")
def test_stages_exchange_the_activations_of_a_micro_batch_in_each_turn():
    stages, made = LAYERS, arguments(mesh=MeshConfig(data=1, pipeline=LAYERS), global_batch_size=12)
    _, facts = program.compiled(made, jax.devices()[:stages])
    # Twelve micro-batches of one sequence; forward, again for what was not kept, and backward.
    turns, of_micro_batch = 12 + stages - 1, TOKENS * MODEL.width * BYTES
    turned = sum(each.bytes for each in facts["exchanged"] if each.kind == "collective-permute" and "roll" in each.scope)
    assert turned == pytest.approx(3 * turns * of_micro_batch, rel=0.05)
    assert facts["exchanged_over"].keys() == {"pipeline"}


@pytest.mark.slow("compiles a step")
def test_the_data_need_not_be_there():
    facts = program.compiled(arguments(), jax.devices()[:2])[1]
    assert "'nowhere' does not exist" in facts["stand_in"]


def test_an_array_that_each_device_has_whole_is_named(monkeypatch):
    monkeypatch.setattr(program, "LARGE_BYTES", 1024)
    facts = program.compiled(arguments(mesh=MeshConfig(data=2, fsdp=1)), jax.devices()[:2])[1]
    assert facts["whole"]["params.embed"] == 256 * 64 * 4


@pytest.mark.slow("compiles a step for several devices")
def test_the_logits_of_a_batch_in_parts_gather_the_table_once(monkeypatch):
    monkeypatch.setattr("trainers.tasks.cross_entropy.MAX_LOGITS", 1024)
    made = arguments(mesh=MeshConfig(data=1, fsdp=DEVICES), loss=LossConfig(), model=MODEL)
    exchanged = program.compiled(made, jax.devices()[:DEVICES])[1]["exchanged"]
    of_table = [(each.kind, each.times, each.bytes) for each in exchanged if each.scope == "unembed"]
    table = MODEL.width * MODEL.vocab_size * 4
    assert of_table == [("all-gather", 1, table)]
    summed = [each.bytes for each in exchanged if each.kind == "all-reduce" and not each.scope.startswith("layers")]
    assert table < sum(summed) < 2 * table


def test_a_loop_counts_as_often_as_it_is_run():
    mesh = jax.make_mesh((DEVICES,), ("x",), devices=jax.devices()[:DEVICES])
    parts, whole = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())

    def repeated(x):
        def body(carry, row):
            return carry + jax.lax.with_sharding_constraint(row * carry[0], whole), None

        return jax.lax.scan(body, jnp.zeros(64), x)[0]

    text = jax.jit(repeated, in_shardings=parts, out_shardings=whole).lower(jnp.ones((7, 64))).compile().as_text()
    found = [(each.kind, each.times, each.bytes) for each in collectives.of(text) if each.kind == "all-gather"]
    assert found == [("all-gather", 7, 7 * 64 * 4)]


TPU_PROGRAM = """
%all-reduce-scatter.1 (param: bf16[64]) -> bf16[16] {
  %reduced = bf16[64]{0} all-reduce(%param), to_apply=%add
  ROOT %part = bf16[16]{0} dynamic-slice(%reduced)
}

%condition (param: (s32[], bf16[64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

%body (param: (s32[], bf16[64])) -> (s32[], bf16[64]) {
  %scattered = bf16[16]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="SCOPE"}
}

ENTRY %main (param: bf16[64]) -> bf16[64] {
  %loop = (s32[], bf16[64]) while(%start), condition=%condition, body=%body
}
"""


def test_what_the_compiler_for_tpus_has_fused_counts_as_a_reduce_scatter():
    text = TPU_PROGRAM.replace("SCOPE", "jit(train_step)/transpose(jvp(layers))/while/body/mlp/dot_general")
    assert collectives.of(text) == [("reduce-scatter", "layers/mlp", 5, 5 * 64 * 2)]


ASYNCHRONOUS = """
%step.1 (param: bf16[8]) -> bf16[64] {
  ROOT %more = bf16[64]{0} all-gather(%param), channel_id=7, frontend_attributes={chain_id="3"}
}

%body (param: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %beside = bf16[64]{0} fusion(%x), kind=kCustom, calls=%step.1
}

%condition (param: (s32[], bf16[8])) -> pred[] {
  %limit = s32[] constant(5)
}

ENTRY %main (param: bf16[8]) -> bf16[64] {
  %begun = bf16[64]{0} all-gather(%param), channel_id=7, frontend_attributes={chain_id="3"}
  %loop = (s32[], bf16[8]) while(%start), condition=%condition, body=%body
}
"""


def test_what_is_gone_on_with_beside_a_loop_counts_once():
    assert collectives.of(ASYNCHRONOUS) == [("all-gather", "step", 1, 128)]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}, use_global_device_ids=true", "context"),
        ("replica_groups=[4,2]<=[2,2,2]T(1,2,0)", "fsdp"),
        ("replica_groups=[2,4]<=[8]", "context x tensor"),
        ("replica_groups={}", "fsdp x context x tensor"),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", "tensor"),
        ("replica_groups=mesh['a'=8] {'a'}", "fsdp x context x tensor"),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", "fsdp"),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", "context"),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(2,1,0)) {'a','b'}, dimensions={0}", "context x tensor"),
        ("replica_groups=another form", "axes that are not known"),
        ("source_target_pairs={{0,2},{2,0},{5,7},{7,5}}", "context"),
        ("source_target_pairs={{0,6},{6,0}}", "fsdp x context"),
    ],
)
def test_exchanges_are_told_by_the_axes_along_which_devices_differ(groups, axes):
    text = f"ENTRY %main (param: bf16[8]) -> bf16[64] {{\n  %all = bf16[64]{{0}} all-gather(%param), channel_id=7, {groups}\n}}\n"
    assert collectives.by_axes(text, {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}) == {axes: 128}


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("(f32[8,4]{1,0}, bf16[2]{0}) all-reduce(%a, %b)", 8 * 4 * 4 + 4),
        ("(f32[8]{0}, f32[2]{0}) all-reduce-start(%a, %b)", 40),
        ("(f32[2]{0}, f32[8]{0}) all-gather-start(%a)", 32),
        ("((f32[2]{0}, bf16[2]{0}), (f32[8]{0}, bf16[8]{0})) all-gather-start(%a, %b)", 48),
        ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%a)", 32),
    ],
)
def test_exchanges_that_became_one_all_count(line, size):
    (found,) = collectives.of(f"ENTRY %main (param: bf16[8]) -> bf16[64] {{\n  %all = {line}, channel_id=7\n}}\n")
    assert found.bytes == size


def test_a_tpu_needs_its_compiler(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(program, "is_installed", lambda name: False)
    with pytest.raises(UsageError, match="pip install 'libtpu=="):
        program.devices_of("tpu", 16, "v5e:4x4")


def test_a_compiler_that_takes_a_chip_for_other_devices_than_jax_does_is_not_asked(monkeypatch):
    found = types.SimpleNamespace(devices=[None] * 16)
    monkeypatch.setenv("TPU_LIBRARY_PATH", "here")
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", lambda **asked: found)
    assert len(program.devices_of("tpu", 16, "v5e:4x4")) == 16
    with pytest.raises(ValueError, match="the compiler for TPUs has 16 devices for v4:2x2x2, where a run has 8"):
        program.devices_of("tpu", 8, "v4:2x2x2")


def test_the_child_answers_with_the_problems(tmp_path):
    request = {
        "arguments_class": "trainers.config.arguments:TrainingArguments",
        "arguments": {"name": "t", "max_num_steps": 1, "mesh": {"tensor": 3}},
        "devices": {"kind": "cpu", "count": 2},
    }
    ran = subprocess.run(
        [sys.executable, "-m", "trainers.planning.program"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
    )
    answer = json.loads(ran.stdout)
    assert answer["facts"] == {}
    assert "does not fit 2 devices" in answer["problems"][0]


@pytest.mark.parametrize("changed", [{}, {"packing": "concat"}, {"packing": "fit"}])
def test_what_stands_for_the_data_has_their_leaves(tmp_path, changed):
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 20)
    made = arguments(data=DataConfig(paths=(str(tmp_path),), pattern="*.txt", sequence_length=16, eval_fraction=0, **changed))
    read = load_datasets(made)[0][0]
    stands = StandIn(made)[0]
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in stands.items()} == {
        name: (np.shape(leaf), np.asarray(leaf).dtype) for name, leaf in read.items()
    }
