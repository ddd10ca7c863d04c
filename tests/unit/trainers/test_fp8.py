"""Training with linear layers that multiply in 8 bits (`model.fp8`): the program, the losses, meshes, restarts, and what is
refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from gangway.stop_reason import StopReason
from tests import ROOT
from tests.unit.trainers.test_context import EXPERTS, LORA, SIZES, settings, texts, trained
from tests.unit.training import OneDevice, StopAt, arguments, assert_equal, of, trainer
from trainers.base import BaseTrainer
from trainers.commands.built import base_trainer
from trainers.config import ModelConfig
from trainers.metrics import peak_flops
from trainers.models.decoder import Decoder, multiplies_in_fp8
from trainers.models.hf.pretrained import decoder_in
from trainers.parallel.mesh import make_mesh
from trainers.planning import estimate, program
from trainers.tasks.preference import PreferenceTask
from trainers.tasks.scoring import ScoringDecoder
from trainers.trainer.training_run import peaks

__all__ = ["texts"]
FP8 = {**SIZES, "fp8": "current"}
ADAM = {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}}
LINEAR = 7
"""The linear weights of a layer of Llama."""


def lowered(tmp_path, **changes):
    made = arguments(tmp_path, **settings(**changes))
    own = estimate.built([], estimate.load_trainer(made.trainer), made, estimate.load_datasets(made))
    return program.lower(own, make_mesh(made.mesh, jax.devices()[:1])).as_text()


def of_8_bits(text):
    """Returns the types of the operands of each product in a program that has some of 8 bits."""
    found = (re.findall(r"f\d\w+(?=>)", line.rpartition(" : ")[2])[:2] for line in text.splitlines() if "dot_general" in line)
    return sorted(tuple(each) for each in found if "f8" in "".join(each))


FORWARD, BACKWARD = ("f8E4M3FN", "f8E4M3FN"), ("f8E5M2", "f8E4M3FN")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_step_has_products_of_8_bits_for_each_linear_layer(tmp_path, texts, dtype):
    model = {**FP8, "num_layers": 1}
    text = lowered(tmp_path, model=model, accumulation_steps=1, dtype=dtype)
    found = of_8_bits(text)
    assert found.count(FORWARD) == LINEAR
    assert found.count(BACKWARD) == 2 * LINEAR
    assert len(found) == 3 * LINEAR
    # Queries and keys, scores and values, the logits, and their gradients.
    assert len(re.findall("dot_general", text)) > len(found)


@pytest.mark.slow("compiles several programs")
def test_an_evaluation_and_a_preview_multiply_by_the_weights_as_they_are():
    model, plain = (
        nnx.jit(lambda config=config: Decoder(config, rngs=nnx.Rngs(0)))()
        for config in (ModelConfig(**FP8), ModelConfig(**SIZES))
    )
    tokens = jnp.arange(12)[None]
    logits = nnx.jit(lambda model: model(tokens))
    assert multiplies_in_fp8(model)
    assert not multiplies_in_fp8(plain)
    expected = np.asarray(logits(plain))
    np.testing.assert_array_equal(logits(model), expected)
    model.train()
    assert 0.01 < np.linalg.norm(logits(model) - expected) / np.linalg.norm(expected) < 0.25
    model.eval()
    np.testing.assert_array_equal(logits(model), expected)
    plain.deterministic = False  # such as a subclass has for its own dropout
    np.testing.assert_array_equal(logits(plain), expected)


def test_a_model_that_gives_scores_multiplies_in_8_bits_too():
    config = ModelConfig(**{**FP8, "num_layers": 1})
    model = nnx.eval_shape(lambda: ScoringDecoder(config, 2, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.float32))
    assert multiplies_in_fp8(model)
    model.train()
    graph, state = nnx.split(model)
    scores = jax.jit(lambda state, tokens: nnx.merge(graph, state).scores(tokens, jnp.ones(tokens.shape)))
    assert of_8_bits(scores.lower(state, jax.ShapeDtypeStruct((1, 8), jnp.int32)).as_text()) == [FORWARD] * LINEAR


def assert_near(found, expected, apart):
    """The losses differ, by at most the share `apart`."""
    found, expected = (np.array([*losses.values()]) for losses in (found, expected))
    shares = np.abs(found / expected - 1)
    assert 0 < shares.max() < apart


@pytest.mark.slow("trains twice")
def test_twenty_steps_have_nearly_the_losses_of_bfloat16(tmp_path, events, texts, monkeypatch):
    monkeypatch.setattr(peak_flops, "FP8_PEAKS", (("cpu", 1e12),))
    about = {"dtype": "bfloat16", "optimizer": ADAM, "max_num_steps": 20, "accumulation_steps": 1, "cls": OneDevice}
    _, expected, _ = trained(tmp_path / "bfloat16", events, model=SIZES, **about)
    assert not any("mfu_of_fp8_peak" in each["metrics"] for each in of(events, "metrics"))
    _, found, _ = trained(tmp_path / "fp8", events, model=FP8, **about)
    assert len(found) == 20
    assert found[20] < 0.6 * found[1]
    assert_near(found, expected, NEAR)
    (last,) = (each["metrics"] for each in of(events, "metrics") if each["step"] == 20 and "loss" in each["metrics"])
    assert last["mfu_of_fp8_peak"] == pytest.approx(last["tflops_per_s_per_device"])


NEAR = 0.042
"""Twice the largest share that was measured."""


def assert_as_on_one_device(tmp_path, events, mesh, **changes):
    about = {"model": FP8, "max_num_steps": 5, "optimizer": ADAM, **changes}
    _, expected, norms_of_one = trained(tmp_path / "one", events, cls=OneDevice, **about)
    _, found, norms = trained(tmp_path / "mesh", events, mesh=mesh, **about)
    # Forward each token has its own scale. What is then trained depends on the scales of the tokens that are summed at once.
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=5e-3)
    np.testing.assert_allclose(norms, norms_of_one, rtol=0.1)


@pytest.mark.slow("trains on a mesh")
def test_a_mesh_has_nearly_the_numbers_of_one_device(tmp_path, events, texts):
    assert_as_on_one_device(tmp_path, events, {"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.slow("trains on one device and on a mesh, in many forms")
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, {}),
        ({"data": 2, "pipeline": 2, "tensor": 2}, {}),
        ({"data": 4, "pipeline": 2}, {"pipeline": {"schedule": "interleaved", "repeats": 2}, "model": {**FP8, "num_layers": 4}}),
        ({"data": 2, "fsdp": 4}, {"model": {**FP8, "remat": "full"}}),
        ({"data": 2, "fsdp": 4}, {"model": {**FP8, "remat": "dots_saveable", "num_layers": 9}}),
        ({"data": 2, "fsdp": 4}, {"model": {**FP8, "family": "gpt2", "num_kv_heads": 4, "num_positions": 32}}),
        ({"data": 2, "fsdp": 4}, {"dtype": "bfloat16", "optimizer": {**ADAM, "learning_rate": 1e-3}}),
    ],
    ids=["context", "pipeline", "interleaved", "remat", "dots saveable, as a loop", "biases", "bfloat16"],
)
def test_other_meshes_have_nearly_the_numbers_of_one_device(tmp_path, events, texts, mesh, changes):
    assert_as_on_one_device(tmp_path, events, mesh, **{"accumulation_steps": 1, **changes})


def goes_on(tmp_path, events, **about):
    """Returns the state of a run that was cut, and of one that was not."""
    about = {"model": FP8, "max_num_steps": 6, "optimizer": ADAM, "checkpoint": {"save_steps": 3}, **about}
    whole, _, _ = trained(tmp_path / "whole", events, **about)
    trained(tmp_path / "cut", events, StopAt(3, StopReason.PREEMPTED), **about)
    resumed, _, _ = trained(tmp_path / "cut", events, **about)
    assert of(events, "restored")
    return whole, resumed


@pytest.mark.slow("trains several times")
def test_a_run_that_was_cut_goes_on_bit_for_bit(tmp_path, events, texts):
    assert_equal(*goes_on(tmp_path, events, dtype="bfloat16", mesh={"data": 2, "fsdp": 2, "tensor": 2}))


@pytest.mark.slow("trains several times")
def test_adapters_of_a_base_that_multiplies_in_8_bits(tmp_path, events, texts):
    trained(tmp_path, events, max_num_steps=1, checkpoint={"save_steps": 1}, cls=OneDevice)
    shutil.move(tmp_path / "run", tmp_path / "base")
    about = {"lora": LORA, "mesh": {"data": 2, "fsdp": 2, "tensor": 2}}
    assert_equal(*goes_on(tmp_path, events, **about))
    text = lowered(tmp_path, model={**FP8, "num_layers": 1}, lora=LORA, accumulation_steps=1)
    # No gradient of the base's own weights is computed.
    found = of_8_bits(text)
    assert (found.count(FORWARD), found.count(BACKWARD)) == (LINEAR, LINEAR)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"fp8": "curent"}}, r"model\.fp8 = 'curent': expected one of none, current; did you mean current\?"),
        (
            {"model": {**EXPERTS, "fp8": "current"}},
            r"model\.fp8 = 'current': the family mixtral has experts, and their products \(grouped_product\) are not computed in "
            "8 bits; leave it out",
        ),
        (
            {"model": FP8, "dtype": "float16"},
            r"model\.fp8 = 'current': expected 'none' with dtype float16, in which sums of products of 8 bits overflow; use "
            "dtype bfloat16",
        ),
        (
            {"model": FP8, "vision": {}},
            r"model\.fp8 = 'current': expected 'none' with vision, whose encoder is not computed in 8",
        ),
    ],
)
def test_what_is_not_computed_in_8_bits_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **settings(**changes))


def test_a_loss_with_a_reference_is_refused(tmp_path):
    about = {"task": "trainers.tasks.preference:PreferenceTask", "model": FP8, "preference": {"reference": "columns"}}
    with pytest.raises(UsageError, match=r"model\.fp8 = 'current': preference\.loss = 'dpo' compares the model with a reference"):
        PreferenceTask(arguments(tmp_path, **settings(**about)))
    PreferenceTask(arguments(tmp_path, **settings(**about | {"preference": {"loss": "orpo"}})))


def test_a_model_of_ones_own_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"model\.fp8 = 'current': only the layers of a trainers\.models\.decoder\.Decoder"):
        trainer(tmp_path, model={"fp8": "current"}).configure_model()


class OwnModel(BaseTrainer):
    def configure_model(self):
        return super().configure_model()._replace(model=SimpleNamespace())


def test_a_model_that_a_trainer_makes_is_refused(tmp_path, texts):
    made = arguments(tmp_path, **settings(model=FP8))
    with pytest.raises(UsageError, match="and the model of the task has none"):
        OwnModel(made, *estimate.load_datasets(made)).prepare()


def test_without_qwix_a_run_is_refused_before_a_machine_is_taken_and_can_be_evaluated(tmp_path, texts, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix._src.core.dot_general_qt", None)
    made = arguments(tmp_path, **settings(model=FP8))
    assert estimate.plan(made, 1)[0] == [
        "model.fp8 = 'current' needs the package qwix, which is not installed: pip install 'gangway[fp8]' on every host, or set "
        "model.fp8 = none"
    ]
    other = base_trainer(made, "evaluates")
    other.prepare()
    assert other.arguments == dataclasses.replace(made, model=dataclasses.replace(made.model, fp8="none"))


@pytest.mark.parametrize(
    ("changes", "kinds", "expected"),
    [
        ({}, {"TPU7x"}, (1153.5e12, None)),
        ({"model": FP8}, {"TPU7x"}, (1153.5e12, 2307e12)),
        # By the peak of bfloat16, whatever the rest is computed in.
        ({"model": FP8, "dtype": "float32"}, {"NVIDIA H100 80GB HBM3"}, (989.4e12, 1978.9e12)),
        ({"model": FP8, "metrics": {"peak_flops_per_s": 1e12}}, {"NVIDIA H100 PCIe"}, (1e12, 1513e12)),
        ({"model": FP8}, {"NVIDIA A100-SXM4-40GB"}, (312e12, None)),
        ({"model": FP8}, {"TPU v5 lite"}, (197e12, None)),
        ({"model": FP8}, {"TPU v4", "TPU7x"}, (None, None)),
        ({"model": FP8}, {"cpu"}, (None, None)),
    ],
)
def test_the_utilization_is_by_the_peak_of_bfloat16_and_by_that_of_8_bits(tmp_path, changes, kinds, expected):
    assert peaks(arguments(tmp_path, **settings(**{"dtype": "bfloat16", **changes})), kinds) == expected


def test_a_folder_of_a_model_says_nothing_of_it():
    like = ModelConfig(pretrained=str(ROOT / "tests" / "unit" / "data" / "parity" / "llama3"), fp8="current")
    assert decoder_in(like.pretrained, like, "model.pretrained").fp8 == "current"
