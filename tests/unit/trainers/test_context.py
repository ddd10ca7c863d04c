"""Training with sequences that devices share (`mesh.context`): the numbers of one device, restarts, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from gangway.errors import UsageError
from gangway.stop_reason import StopReason
from tests.unit.training import OneDevice, StopAt, arguments, assert_equal, losses, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.planning.estimate import load_datasets

STEPS = 10
SIZES = {"width": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 16}
EXPERTS = {**SIZES, "family": "mixtral", "num_experts": 4, "experts_per_token": 2}
WINDOWS = {**SIZES, "family": "gemma2", "window": 9, "global_every": 2, "attention_softcap": 5.0, "logit_softcap": 9.0}
LORA = {"rank": 2, "alpha": 4, "dropout": 0.25, "base": "base"}


def settings(**changes):
    return {
        "task": "trainers.tasks.causal_lm:CausalLMTask",
        "model": SIZES,
        "data": {"paths": ["texts"], "sequence_length": 32, "packing": "concat", "eval_fraction": 0.2},
        "global_batch_size": 8,
        "accumulation_steps": 2,
        "max_num_steps": STEPS,
        "optimizer": {"name": "sgd", "learning_rate": 0.5, "schedule": {"name": "constant"}},
        "checkpoint": {"save_at_end": False},
        **changes,
    }


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Documents of which several share a row, and some have several."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(24):
        text = " ".join(str(number * step % 97) for step in range(3 + number * 2))
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)


def trained(folder, events, *callbacks, cls=BaseTrainer, **changes):
    """Returns the state, and what was told of each step."""
    events.clear()
    runtime.install(runtime.Runtime(events.append))  # nobody has asked this one to stop
    made = arguments(folder, **settings(**changes))
    state = cls(made, *load_datasets(made), callbacks=callbacks).train()
    norms = [event["metrics"]["grad_norm"] for event in of(events, "metrics") if "grad_norm" in event["metrics"]]
    return state, losses(events), norms


def assert_as_on_one_device(tmp_path, events, mesh, **changes):
    expected, of_one, norms_of_one = trained(tmp_path / "one", events, cls=OneDevice, **changes)
    state, found, norms = trained(tmp_path / "mesh", events, mesh=mesh, **changes)
    assert list(found) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(of_one.values()), rtol=1e-5)
    np.testing.assert_allclose(norms, norms_of_one, rtol=1e-4)
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=1e-4 * np.abs(other).max())


def assert_goes_on(tmp_path, events, about, other):
    """A run that was cut goes on bit for bit, and with the same losses on a mesh without its axis and on the mesh `other` (with
    GPipe's schedule, if that has stages)."""
    whole, expected, _ = trained(tmp_path / "whole", events, **about)
    trained(tmp_path / "cut", events, StopAt(3, StopReason.PREEMPTED), **about)
    for copy in ("one", "other"):
        shutil.copytree(tmp_path / "cut", tmp_path / copy)
    resumed, _, _ = trained(tmp_path / "cut", events, **about)
    assert of(events, "restored")
    assert_equal(whole, resumed)
    for copy, mesh in (("one", {"data": 1, "fsdp": 4, "tensor": 2}), ("other", other)):
        _, found, _ = trained(tmp_path / copy, events, **{**about, "mesh": mesh, "pipeline": {}})
        assert of(events, "restored")
        assert len(found) >= 2
        np.testing.assert_allclose([*found.values()], [expected[step] for step in found], rtol=1e-5)


@pytest.mark.slow("trains on several meshes; the attention alone is tested in `make test`")
def test_ten_steps_have_the_numbers_of_one_device(tmp_path, events, texts):
    assert_as_on_one_device(tmp_path, events, {"data": 1, "fsdp": 2, "context": 2, "tensor": 2})


@pytest.mark.slow("trains on one device and on a mesh, in many forms")
@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 1, "context": 8}, {}),
        ({"data": 1, "fsdp": 4, "context": 2}, {}),
        ({"data": 1, "tensor": 2, "context": 4}, {}),
        ({"data": 1, "expert": 2, "context": 4}, {"model": EXPERTS, "loss": {"load_balancing_weight": 0.02}}),
        ({"data": 2, "context": 4}, {"model": {**WINDOWS, "remat": "full"}, "loss": {"z_loss_weight": 0.01}}),
    ],
    ids=["alone", "fsdp", "tensor", "expert", "windows and remat"],
)
def test_with_each_other_axis(tmp_path, events, texts, mesh, changes, exchange):
    model = {**changes.get("model", SIZES), "context_attention": exchange}
    assert_as_on_one_device(tmp_path, events, mesh, **{**changes, "model": model})


@pytest.fixture
def base(tmp_path, events, texts):
    """Weights for adapters, in the folder `base`."""
    trained(tmp_path, events, max_num_steps=1, checkpoint={"save_steps": 1}, cls=OneDevice)
    shutil.move(tmp_path / "run", tmp_path / "base")


@pytest.mark.slow("trains on one device and on a mesh")
def test_adapters_drop_the_same_numbers_on_any_mesh(tmp_path, events, base):
    assert_as_on_one_device(tmp_path, events, {"data": 2, "context": 4}, lora=LORA)


@pytest.mark.slow("trains several times")
def test_a_run_that_was_cut_goes_on_bit_for_bit_and_on_other_meshes(tmp_path, events, texts):
    about = {"mesh": {"data": 2, "context": 4}, "checkpoint": {"save_steps": 4}}
    assert_goes_on(tmp_path, events, about, {"data": 4, "context": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"sequence_length": 100}},
            r"mesh\.context = 4: data\.sequence_length = 100 is not divisible by 2 x 4 \(so many equal parts for each device\): "
            r"expected 2, or data\.sequence_length = 96 or 104",
        ),
        ({"vision": {}, "data": {"sequence_length": 96}}, r"mesh\.context = 4: tokens of images \(vision\) attend to each other"),
    ],
)
def test_what_the_axis_cannot_divide_is_refused_for_the_devices(tmp_path, changes, message):
    made = arguments(tmp_path, mesh={"context": 4}, **changes)
    with pytest.raises(ValueError, match=message):
        made.check_devices(8)
    dataclasses.replace(made, mesh=dataclasses.replace(made.mesh, context=1)).check_devices(8)


@pytest.mark.parametrize("kernel", ["xla", "cudnn", "splash", "tests.unit.trainers.test_context:settings"])
def test_a_kernel_of_whole_sequences_is_refused(tmp_path, kernel):
    model, data = {"attention": kernel}, {"sequence_length": 1024}
    message = f"model.attention = '{kernel}': it computes whole sequences, and mesh.context = 2 divides them; take auto or block"
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, mesh={"context": 2}, model=model, data=data, dtype="bfloat16")
    left = arguments(tmp_path, mesh={"data": 1, "context": -1}, model=model, data=data, dtype="bfloat16")
    with pytest.raises(ValueError, match=message):
        left.check_devices(2)
    left.check_devices(1)


def test_a_model_of_a_users_own_is_refused(tmp_path):
    made = trainer(tmp_path, mesh={"data": 2, "context": 4})
    with pytest.raises(
        UsageError, match=r"mesh\.context = 4: only a .*Decoder.* and the model of the task is none; use mesh\.data"
    ):
        made.train()
