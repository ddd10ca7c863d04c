"""Training in stages (`mesh.pipeline`): the numbers of one device, restarts, and what is refused."""

from __future__ import annotations

import pytest

from tests.unit.trainers.test_context import EXPERTS, SIZES, WINDOWS, assert_as_on_one_device, assert_goes_on, texts, trained
from tests.unit.training import arguments, trainer
from trainers.errors import UsageError
from trainers.parallel import pipeline

__all__ = ["texts"]
FOUR = {**SIZES, "num_layers": 4}
TASK = "trainers.tasks.causal_lm:CausalLMTask"


@pytest.mark.costs("trains on one device and on a mesh")
def test_ten_steps_have_the_numbers_of_one_device(tmp_path, events, texts):
    assert_as_on_one_device(tmp_path, events, {"data": 1, "pipeline": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.slow("trains on one device and on a mesh, in many forms")
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 1, "pipeline": 8}, {"model": {**SIZES, "num_layers": 8}}),
        ({"data": 2, "pipeline": 4}, {"model": FOUR}),
        ({"data": 1, "pipeline": 4, "fsdp": 2}, {"model": FOUR, "pipeline": {"microbatches": 2}}),
        ({"data": 1, "pipeline": 2, "tensor": 4}, {"model": {**FOUR, "num_kv_heads": 4}}),
        ({"data": 1, "pipeline": 2, "expert": 4}, {"model": EXPERTS, "loss": {"load_balancing_weight": 0.02}}),
        ({"data": 1, "pipeline": 2, "tensor": 4}, {"model": {**EXPERTS, "num_kv_heads": 4}}),
        ({"slice": 2, "data": 1, "pipeline": 2, "fsdp": 2}, {"model": FOUR}),
        ({"data": 1, "pipeline": 2, "context": 4}, {"model": FOUR, "pipeline": {"microbatches": 2}}),
        ({"data": 1, "pipeline": 2, "fsdp": 2, "context": 2}, {"model": {**FOUR, "context_attention": "ring"}}),
        ({"data": 1, "pipeline": 2, "context": 2, "tensor": 2}, {"model": {**WINDOWS, "num_layers": 4, "remat": "full"}}),
        ({"data": 2, "pipeline": 4}, {"model": {**WINDOWS, "num_layers": 4}}),
        ({"data": 2, "pipeline": 4}, {"model": {**FOUR, "remat": "full"}, "loss": {"z_loss_weight": 0.01}}),
    ],
    ids=[
        *("alone", "data", "fsdp", "tensor", "expert", "experts and tensor", "slice"),
        *("context", "context in a ring", "context, windows and tensor", "windows", "remat"),
    ],
)
def test_with_each_other_axis(tmp_path, events, texts, mesh, changes):
    assert_as_on_one_device(tmp_path, events, mesh, **{"accumulation_steps": 1, **changes})


@pytest.mark.slow("trains several times")
@pytest.mark.parametrize("mesh", [{"data": 2, "pipeline": 4}, {"data": 2, "pipeline": 2, "context": 2}])
def test_a_run_that_was_cut_goes_on_bit_for_bit_and_on_other_meshes(tmp_path, events, texts, mesh):
    about = {"mesh": mesh, "model": FOUR, "checkpoint": {"save_steps": 4}, "accumulation_steps": 1}
    assert_goes_on(tmp_path, events, about, {"data": 4, "pipeline": 2})


def test_each_stage_has_its_layers_alone(tmp_path):
    made = trainer(tmp_path, task=TASK, mesh={"data": 4, "pipeline": 2}, model=FOUR)
    made.configure_model()
    query = made.state_shardings.params["layers"]["query"]
    assert query.spec[0] == "pipeline"
    assert query.shard_shape((4, 16, 16)) == (2, 16, 16)


@pytest.mark.costs("trains on a mesh")
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


@pytest.mark.costs("trains on a mesh")
def test_what_stages_hold_is_divided_over_tokens_too(tmp_path, events, texts, monkeypatch):
    held, divided = [], pipeline._divided

    def noted(mesh, x, *axes):
        held.extend([axes] if x.ndim == 4 and axes[0] == "pipeline" and x.shape[2] == 32 else [])
        return divided(mesh, x, *axes)

    monkeypatch.setattr(pipeline, "_divided", noted)
    mesh = {"data": 2, "pipeline": 2, "context": 2}
    trained(tmp_path, events, mesh=mesh, model=FOUR, accumulation_steps=1, max_num_steps=1)
    assert {axes[2:] for axes in held} == {("context",)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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


def test_a_model_of_the_users_own_is_refused(tmp_path):
    made = trainer(tmp_path, mesh={"data": 4, "pipeline": 2})
    with pytest.raises(UsageError, match=r"mesh\.pipeline = 2: only a trainers\.models\.decoder\.Decoder with its own `hidden`"):
        made.train()
