"""What the devices along each axis of the mesh share in equal parts: refused before a machine is taken, or told."""

from __future__ import annotations

import re

import pytest

from tests.unit.training import arguments
from trainers.config import ModelConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.models.decoder import Decoder
from trainers.planning import estimate
from trainers.tasks.causal_lm import CausalLMTask

CAUSAL, DEVICES = "trainers.tasks.causal_lm:CausalLMTask", 24
MODEL = {"vocab_size": 64, "width": 32, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "mlp_width": 48}
EXPERTS = {**MODEL, "family": "mixtral", "num_experts": 8, "experts_per_token": 2}
ENCODER = {"num_heads": 6, "width": 24, "mlp_width": 48, "image_size": 32, "num_labels": 10}


class OwnDecoderTask(CausalLMTask):
    """A task that builds a decoder of other sizes than the configuration's."""

    def build_model(self, rngs):
        return Decoder(ModelConfig(**{**MODEL, "width": 24, "num_heads": 3, "num_kv_heads": 3}), rngs=rngs)


def made(tmp_path, **changed) -> TrainingArguments:
    return arguments(tmp_path, **{"task": CAUSAL, "model": MODEL, "global_batch_size": DEVICES, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"mesh": {"tensor": 3}},
            "mesh.tensor = 3: model.num_heads = 8 is not divisible by it: expected 2 or 4",
        ),
        (
            {"mesh": {"tensor": 4}, "model": {**MODEL, "mlp_width": 54}},
            "mesh.tensor = 4: model.mlp_width = 54 is not divisible by it: expected 2",
        ),
        ({"mesh": {"pipeline": 3}}, "mesh.pipeline = 3: model.num_layers = 4 is not divisible by it: expected 2 or 4"),
        (
            {"mesh": {"expert": 3}, "model": EXPERTS},
            "mesh.expert = 3: model.num_experts = 8 is not divisible by it: expected 2 or 4",
        ),
        (
            {"mesh": {"context": 3}, "data": {"sequence_length": 64}},
            "mesh.context = 3: data.sequence_length = 64 is not divisible by 2 x 3 (so many equal parts for each device): "
            "expected 2 or 4, or data.sequence_length = 60 or 66",
        ),
        (
            {"mesh": {"context": 2}, "data": {"sequence_length": 3}},
            "mesh.context = 2: data.sequence_length = 3 is not divisible by 2 x 2 (so many equal parts for each device): "
            "expected 1, or data.sequence_length = 4",
        ),
        (
            {
                "mesh": {"tensor": 4},
                "vision": ENCODER,
                "task": "trainers.tasks.image_classification:ImageClassificationTask",
                "model": {**MODEL, "num_heads": 2, "num_kv_heads": 2},
            },
            "mesh.tensor = 4: vision.num_heads = 6 is not divisible by it: expected 3 or 6",
        ),
        # Of all axes at once.
        (
            {"mesh": {"pipeline": 3, "tensor": 8}, "model": {**MODEL, "num_heads": 4}},
            "mesh.pipeline = 3: model.num_layers = 4 is not divisible by it: expected 2 or 4\n"
            "mesh.tensor = 8: model.num_heads = 4 is not divisible by it: expected 4",
        ),
    ],
)
def test_each_axis_must_divide_what_its_devices_share(tmp_path, changed, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        made(tmp_path, **changed).check_devices(DEVICES)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"tensor": 5},
            "what would fit: mesh.tensor = 4 or 6; set one axis to -1",
        ),
        ({"data": 2, "tensor": 4}, "what would fit: mesh.data = 6, mesh.tensor = 12"),
        ({"data": -1, "fsdp": 6, "tensor": 8}, "what would fit: mesh.fsdp = 3, mesh.tensor = 4"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_told_what_would(tmp_path, mesh, message):
    with pytest.raises(ValueError, match="does not fit 24 devices: the sizes must multiply to 24") as raised:
        made(tmp_path, mesh=mesh).check_devices(DEVICES)
    assert message in str(raised.value)


def test_a_mesh_that_divides_all_passes(tmp_path):
    sizes = {"pipeline": 2, "tensor": 4}
    assert made(tmp_path, mesh=sizes).check_devices(DEVICES)["tensor"] == 4
    assert made(tmp_path, mesh={"context": 4}, data={"sequence_length": 64}).check_devices(DEVICES)["context"] == 4
    assert made(tmp_path, data={"sequence_length": 63}).check_devices(DEVICES)["tensor"] == 1


def planned(**changed):
    data = {"dataset": "tests.unit.orchestrator.planning.test_plan:ten_examples", "sequence_length": 16}
    base = {"name": "t", "max_num_steps": 5, "global_batch_size": 8, "model": MODEL, "data": data, "mesh": {"tensor": 2}}
    return estimate.plan(from_dict(TrainingArguments, {**base, **changed}), num_devices=4)


def test_the_experts_of_a_frozen_base_are_divided_too():
    lora = {"rank": 2, "base": "nowhere"}
    of_experts, _ = planned(model=EXPERTS, mesh={"expert": 2}, lora=lora)
    assert not [problem for problem in of_experts if "mesh.expert" in problem]
    dense, _ = planned(mesh={"expert": 2}, lora=lora)
    assert "mesh.expert = 2: the model has no experts; use mesh.data or mesh.fsdp for these devices" in dense


def test_a_decoder_of_a_users_own_is_asked_for_its_sizes():
    problems, _ = planned(task=f"{__name__}:OwnDecoderTask")
    assert problems == [
        "mesh.tensor = 2: model.num_heads = 3 is not divisible by it: expected 1 or 3 (the model of the task)",
    ]
    problems, _ = planned(task=f"{__name__}:OwnDecoderTask", mesh={})
    assert problems == []


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({}, []),
        (
            {"model": {**MODEL, "vocab_size": 63}},
            ["mesh.tensor = 2 does not divide vocab = 63: each device along it has all of embed (8,064 bytes)"],
        ),
        (
            {"model": {**MODEL, "vocab_size": 63, "tie_embeddings": False}},
            ["mesh.tensor = 2 does not divide vocab = 63: each device along it has all of embed and 1 more (16,128 bytes)"],
        ),
        (
            {"mesh": {"data": 1, "fsdp": 4}, "model": {**MODEL, "width": 18, "num_heads": 3, "num_kv_heads": 3}},
            [
                "mesh.fsdp = 4 does not divide embed = 18: each device along it has all of layers.down and 7 more "
                f"({4 * 18 * (64 + 4 * (4 * 18 + 3 * 48)):,} bytes)"
            ],
        ),
        (
            {"model": {**MODEL, "num_kv_heads": 1}},
            ["mesh.tensor = 2 does not divide model.num_kv_heads = 1: devices along it have keys and values in common"],
        ),
        (
            {"task": "tests.programs.tiny:TableTask"},
            [
                "mesh.tensor = 2 divides no parameter of the model (its logical_axes have none of vocab, mlp, heads, kv_heads): "
                "unless the model divides its work by hand, 2 devices compute the same; mesh.data or mesh.fsdp would use them"
            ],
        ),
    ],
)
def test_what_stays_whole_is_told(changed, lines):
    problems, facts = planned(**changed)
    assert problems == []
    assert facts["left_whole"] == lines
