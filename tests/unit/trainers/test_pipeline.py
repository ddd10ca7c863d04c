"""Training in stages (`mesh.pipeline`): the numbers of one device, restarts, and what is refused."""

from __future__ import annotations

import re
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests.unit.trainers.test_context import (
    EXPERTS,
    LORA,
    SIZES,
    WINDOWS,
    assert_as_on_one_device,
    assert_goes_on,
    texts,
    trained,
)
from tests.unit.training import OneDevice, arguments, assert_equal, of, trainer
from trainers.config import MeshConfig, ModelConfig
from trainers.config.mesh import PipelineConfig
from trainers.models import remat
from trainers.models.decoder import Decoder
from trainers.parallel import mesh as meshes
from trainers.parallel import pipeline

__all__ = ["texts"]
FOUR = {**SIZES, "num_layers": 4}
TASK = "trainers.tasks.causal_lm:CausalLMTask"


def test_ten_steps_have_the_numbers_of_one_device(tmp_path, events, texts):
    assert_as_on_one_device(tmp_path, events, {"data": 1, "pipeline": 2, "fsdp": 2, "tensor": 2})


EIGHT = {**SIZES, "num_layers": 8}
MIXTURE = {**EXPERTS, "num_layers": 4}
SMALL_STEPS = {"name": "sgd", "learning_rate": 0.01, "schedule": {"name": "constant"}}
INTERLEAVED = {"schedule": "interleaved", "repeats": 2}


@pytest.mark.slow("the other schedule is tested in `make test`")
def test_ten_interleaved_steps_have_the_numbers_of_one_device(tmp_path, events, texts):
    mesh = {"data": 1, "pipeline": 2, "fsdp": 2, "tensor": 2}
    assert_as_on_one_device(tmp_path, events, mesh, model=FOUR, pipeline=INTERLEAVED)


@pytest.mark.slow("trains on one device and on a mesh, in many forms")
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 1, "pipeline": 2, "expert": 2, "tensor": 2}, {"model": EXPERTS, "loss": {"load_balancing_weight": 0.02}}),
        ({"data": 1, "pipeline": 2, "context": 4}, {"model": FOUR, "pipeline": {"microbatches": 2}}),
        ({"data": 1, "pipeline": 2, "fsdp": 2, "context": 2}, {"model": {**FOUR, "context_attention": "ring"}}),
        ({"data": 1, "pipeline": 2, "context": 2, "tensor": 2}, {"model": {**WINDOWS, "num_layers": 4, "remat": "full"}}),
    ],
    ids=["experts and tensor", "context", "context in a ring", "context, windows and tensor"],
)
def test_with_each_other_axis(tmp_path, events, texts, mesh, changes):
    assert_as_on_one_device(tmp_path, events, mesh, **{"accumulation_steps": 1, **changes})


@pytest.mark.slow("trains on one device and on a mesh, in many forms")
@pytest.mark.parametrize(
    ("mesh", "repeats", "changes"),
    [
        # With large steps the numbers of so deep a model part on any two meshes, also without stages.
        ({"data": 1, "pipeline": 8}, 2, {"model": {**SIZES, "num_layers": 16}, "optimizer": SMALL_STEPS}),
        ({"data": 4, "pipeline": 2}, 3, {"model": {**SIZES, "num_layers": 6}}),
        ({"data": 1, "pipeline": 2, "fsdp": 4}, 2, {"model": FOUR, "accumulation_steps": 2, "global_batch_size": 16}),
        ({"data": 1, "pipeline": 2, "expert": 2, "tensor": 2}, 2, {"model": MIXTURE, "loss": {"load_balancing_weight": 0.02}}),
        ({"slice": 2, "data": 1, "pipeline": 2, "fsdp": 2}, 2, {"model": FOUR}),
        ({"data": 2, "pipeline": 2, "context": 2}, 2, {"model": {**WINDOWS, "num_layers": 4}}),
        ({"data": 2, "pipeline": 4}, 2, {"model": {**EIGHT, "remat": "full"}, "loss": {"z_loss_weight": 0.01}}),
    ],
    ids=["alone", "three", "accumulation and fsdp", "experts and tensor", "slice", "context and windows", "data and remat"],
)
def test_interleaved_with_each_other_axis(tmp_path, events, texts, mesh, repeats, changes):
    about = {"accumulation_steps": 1, "pipeline": {**INTERLEAVED, "repeats": repeats}, **changes}
    assert_as_on_one_device(tmp_path, events, mesh, **about)


@pytest.mark.slow("trains on one device and on a mesh")
def test_adapters_have_the_numbers_of_one_device(tmp_path, events, texts):
    trained(tmp_path, events, model=FOUR, max_num_steps=1, checkpoint={"save_steps": 1}, cls=OneDevice)
    shutil.move(tmp_path / "run", tmp_path / "base")
    about = {"lora": {**LORA, "dropout": 0.0}, "model": FOUR, "pipeline": INTERLEAVED}
    assert_as_on_one_device(tmp_path, events, {"data": 4, "pipeline": 2}, **about, accumulation_steps=1)


@pytest.mark.slow("trains several times")
def test_an_interleaved_run_that_was_cut_goes_on_bit_for_bit_and_on_other_meshes(tmp_path, events, texts):
    about = {"model": EIGHT, "checkpoint": {"save_steps": 4}, "accumulation_steps": 1}
    assert_goes_on(
        tmp_path, events, {**about, "mesh": {"data": 2, "pipeline": 4}, "pipeline": INTERLEAVED}, {"data": 4, "pipeline": 2}
    )


@pytest.mark.slow("trains on several meshes")
@pytest.mark.parametrize("there", [True, False], ids=["to other meshes", "from one of them"])
def test_a_checkpoint_is_that_of_any_other_mesh_bit_for_bit(tmp_path, events, texts, there):
    about = {"model": FOUR, "accumulation_steps": 1, "max_num_steps": 1, "checkpoint": {"save_steps": 1}}
    stages = {"mesh": {"data": 4, "pipeline": 2}, "pipeline": INTERLEAVED}
    others = [{"mesh": {"data": 4, "pipeline": 2}}, {"mesh": {"data": 1, "fsdp": 4, "tensor": 2}}]
    saved, restored = (stages, others) if there else (others[1], [stages])
    state, _, _ = trained(tmp_path / "saved", events, **about, **saved)
    for number, other in enumerate(restored):
        shutil.copytree(tmp_path / "saved", tmp_path / str(number))
        again, found, _ = trained(tmp_path / str(number), events, **about, **other)
        assert of(events, "restored")
        assert not found
        assert_equal(again, state)


@pytest.mark.slow("trains several times")
def test_a_run_that_was_cut_goes_on_bit_for_bit_and_on_other_meshes(tmp_path, events, texts):
    about = {
        "mesh": {"data": 2, "pipeline": 2, "context": 2},
        "model": FOUR,
        "checkpoint": {"save_steps": 4},
        "accumulation_steps": 1,
    }
    assert_goes_on(tmp_path, events, about, {"data": 4, "pipeline": 2})


def test_each_stage_has_its_layers_alone(tmp_path):
    made = trainer(tmp_path, task=TASK, mesh={"data": 4, "pipeline": 2}, model=FOUR)
    made.configure_model()
    query = made.state_shardings.params["layers"]["query"]
    assert query.spec[0] == "pipeline"
    assert query.shard_shape((4, 16, 16)) == (2, 16, 16)


@pytest.mark.slow("trains on a mesh")
@pytest.mark.parametrize(("asked", "expected"), [(None, 4), (2, 2), (1, 1)])
def test_so_many_micro_batches_follow_each_other_as_the_settings_say(tmp_path, events, texts, monkeypatch, asked, expected):
    counts = []
    count = pipeline.microbatches
    monkeypatch.setattr(pipeline, "microbatches", lambda *about: counts.append(count(*about)) or counts[-1])
    trained(
        *(tmp_path, events),
        **{"mesh": {"data": 2, "pipeline": 4}, "model": FOUR, "pipeline": {"microbatches": asked}},
        **{"accumulation_steps": 1, "max_num_steps": 1},
    )
    assert counts[0] == expected


@pytest.mark.slow("compiles a step for several devices")
def test_what_stages_hold_is_divided_over_tokens_too(tmp_path, events, texts, monkeypatch):
    held, divided = [], pipeline._divided

    def noted(mesh, x, *axes):
        held.extend([axes] if x.ndim == 4 and axes[0] == "pipeline" and x.shape[2] == 32 else [])
        return divided(mesh, x, *axes)

    monkeypatch.setattr(pipeline, "_divided", noted)
    mesh = {"data": 2, "pipeline": 2, "context": 2}
    trained(tmp_path, events, mesh=mesh, model=FOUR, accumulation_steps=1, max_num_steps=1)
    assert {axes[2:] for axes in held} == {("context",)}


@pytest.mark.slow("trains on a mesh")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 4 + 3), ({"schedule": "interleaved"}, 2 * 4 + 3), ({"schedule": "interleaved", "repeats": 4}, 4 * 4 + 3)],
    ids=["gpipe", "interleaved", "four repeats"],
)
def test_they_take_as_many_turns_as_the_settings_say(tmp_path, events, texts, monkeypatch, settings, expected):
    counts = []
    count = pipeline.num_turns
    monkeypatch.setattr(pipeline, "num_turns", lambda *about: counts.append(count(*about)) or counts[-1])
    mesh, model = {"data": 2, "pipeline": 4}, {**SIZES, "num_layers": 16}
    trained(tmp_path, events, mesh=mesh, model=model, pipeline=settings, accumulation_steps=1, max_num_steps=1)
    assert counts[0] == expected


@pytest.mark.parametrize(("stages", "repeats"), [(2, 2), (4, 2), (2, 3), (4, 3), (4, 6), (4, 4), (8, 3), (8, 12)])
def test_each_stage_gets_its_groups_from_the_others_and_nothing_is_gathered(stages, repeats):
    mesh = meshes.make_mesh(MeshConfig(data=1, pipeline=stages, fsdp=8 // stages))
    layers = stages * repeats * 2
    placed = meshes.parameter_sharding(mesh, ("layers", "embed"), (layers, 8))
    x = jax.device_put(np.arange(layers * 8, dtype=np.float32).reshape(layers, 8), placed)
    program = jax.jit(partial(pipeline.of_stages, mesh, repeats)).lower(x).compile()
    found = program(x)
    np.testing.assert_array_equal(found, np.asarray(x).reshape(repeats, stages, 2, 8).swapaxes(0, 1))
    assert found.sharding.shard_shape(found.shape)[0] == 1
    sent = re.findall(r"f32\[[\d,]*\]\S* (all-gather|all-to-all|all-reduce|collective-permute)\(", program.as_text())
    assert set(sent) == {"collective-permute"}
    assert len(sent) <= repeats


def gradient_of(remat):
    """Returns the program of the gradient of a model of 8 layers in two groups on each of two stages, in 2 x 4 + 1 turns."""
    sizes = {"vocab_size": 50, "width": 16, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 24}
    graph, params = nnx.split(Decoder(ModelConfig(**sizes, remat=remat), rngs=nnx.Rngs(0)))
    mesh = meshes.make_mesh(MeshConfig(data=4, pipeline=2))

    def loss(params):
        return jnp.mean(nnx.merge(graph, params)(jnp.zeros((16, 5), jnp.int32)) ** 2)

    asked = PipelineConfig(schedule="interleaved", microbatches=4)
    return str(jax.make_jaxpr(meshes.tracing_for(mesh, jax.grad(loss), pipeline=asked))(params))


@pytest.mark.parametrize(("remat", "kept"), [("none", True), ("full", False)])
def test_of_each_turn_the_inputs_of_the_layers_are_kept_and_what_remat_says_and_no_weights(remat, kept):
    program = gradient_of(remat)
    # 9 turns of 2 stages with 2 layers; 16 x 24: the weights, 4 x 5: the tokens of a replica in a micro-batch.
    assert not re.search(r"f32\[9,[\d,]*16,24\]", program)
    assert "f32[9,2,2,20,16]" in program
    assert ("f32[9,2,2,20,24]" in program) == kept


def test_the_layers_are_computed_again_once(monkeypatch):
    """Without the names of the layers' inputs each would be computed a third time, for those of the next ones."""
    dots = gradient_of("full").count("dot_general")
    monkeypatch.setattr(remat, "named", lambda x: x)
    assert dots < gradient_of("full").count("dot_general")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipeline": {"schedule": "interleaved"}},
            r"pipeline\.repeats = 2: 4 layers are not 8 equal groups, 2 for each stage; the nearest numbers that fit are "
            r"8 \(model\.num_layers\), 2 \(mesh\.pipeline\), and none \(pipeline\.repeats\)",
        ),
        (
            {"pipeline": {"schedule": "interleaved", "repeats": 4}, "model": {**SIZES, "num_layers": 24}},
            r"pipeline\.repeats = 4: 24 layers are not 16 equal groups, 4 for each stage; the nearest numbers that fit are "
            r"16, 32 \(model\.num_layers\), 2, 3 \(mesh\.pipeline\), and 2, 3 \(pipeline\.repeats\)",
        ),
        (
            {"pipeline": {"schedule": "interleaved", "microbatches": 2}, "model": {**SIZES, "num_layers": 8}},
            r"pipeline\.microbatches = 2: expected at least 4, the stages, with pipeline\.schedule = interleaved: the first "
            r"stage goes on with what the last one has sent; of 8 sequences of one pipeline the nearest numbers that "
            r"fit are 4, 8",
        ),
        (
            {"mesh": {}, "pipeline": {"schedule": "interleaved"}},
            r"pipeline\.schedule = interleaved: expected gpipe with mesh\.pipeline = 1, which has no stages",
        ),
        ({"mesh": {"data": -1, "pipeline": 3}}, r"mesh pipeline 3 x data -1 x .* does not fit 8 devices"),
        ({"model": SIZES}, r"mesh\.pipeline = 4: model\.num_layers = 2 is not divisible by it: expected 2"),
        ({"mesh": {}, "pipeline": {"microbatches": 2}}, r"pipeline\.microbatches = 2: expected null with mesh\.pipeline = 1"),
        (
            {"pipeline": {"microbatches": 3}},
            r"pipeline\.microbatches = 3: expected a divisor of 8 \(1, 2, 4, 8\), the sequences of one pipeline: "
            r"global_batch_size 16 / accumulation_steps 1, divided over 2 pipelines",
        ),
        (
            {"lora": {"rank": 2, "base": "base", "dropout": 0.1}},
            r"lora\.dropout = 0\.1: expected 0 with mesh\.pipeline = 4, where each micro-batch would drop the same values",
        ),
        ({"global_batch_size": 4}, r"4 sequences for 8 replicas \(data 2 x fsdp 1 x expert 1 x pipeline 4\)"),
    ],
)
def test_what_stages_cannot_do_is_refused_before_a_machine_is_taken(tmp_path, changes, message):
    about = {"task": TASK, "mesh": {"data": 2, "pipeline": 4}, "model": FOUR, "accumulation_steps": 1, **changes}
    made = arguments(tmp_path, **about)
    with pytest.raises(ValueError, match=message):
        made.check_devices(8)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"repeats": 2}, r"repeats = 2: expected null with schedule = gpipe, .*; set schedule to interleaved"),
        ({"schedule": "interleaved", "repeats": 1}, r"repeats = 1: expected at least 2; set schedule to gpipe for 1"),
        ({"schedule": "circular"}, r"schedule = 'circular': expected one of .*gpipe.*interleaved|pipeline.schedule"),
    ],
)
def test_repeats_without_a_schedule_that_has_them_are_refused(tmp_path, section, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, pipeline=section)


def test_a_model_of_the_users_own_is_refused(tmp_path):
    made = trainer(tmp_path, mesh={"data": 4, "pipeline": 2})
    with pytest.raises(UsageError, match=r"mesh\.pipeline = 2: only a trainers\.models\.decoder\.Decoder with its own `hidden`"):
        made.train()
