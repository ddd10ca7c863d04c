"""float16: the scale of the loss, updates that overflow, and what a run makes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gangway.errors import LossScaleError
from tests.programs.tiny import TableTask
from tests.unit.training import FIXED, assert_equal, of, trainer
from trainers.base import BaseTrainer
from trainers.config import LossScaleConfig
from trainers.protocol import Loss
from trainers.step.host_flags import UpdateStatus
from trainers.step.loss_scale import update_scaler

TOO_LARGE = 2.0**22
"""A scale at which the gradients of the first batches overflow."""


class Half(TableTask):
    """Computes in `dtype`, from parameters in float32."""

    def loss(self, model, batch):
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        embed, out = model.embed[...].astype(self.arguments.dtype), model.out[...].astype(self.arguments.dtype)
        logits = (jnp.tanh(embed[tokens]) @ out).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * batch["weight"][:, None]
        return Loss(jnp.sum(losses), jnp.sum(batch["weight"]) * targets.shape[1])


class Poisoned(BaseTrainer):
    """The loss of batch 2 is NaN."""

    def preforward(self, batch):
        return {**batch, "weight": jnp.where(batch["sample_id"] == 2 * 16, jnp.nan, batch["weight"])}


def half(tmp_path, **changes):
    settings = {"task": f"{__name__}:Half", "dtype": "float16", "optimizer": FIXED, "publish_every_steps": 1}
    return trainer(tmp_path, **{**settings, **changes})


def published(events, name):
    return {event["step"]: event["metrics"][name] for event in of(events, "metrics") if name in event["metrics"]}


def test_the_scale_follows_the_rule():
    """PyTorch's GradScaler, written down once more, on a history of any statuses."""
    config = LossScaleConfig(initial=64.0, growth_factor=4.0, window_steps=3)
    update = jax.jit(lambda scaler, status: update_scaler(scaler, status, config))
    scaler = {"scale": jnp.float32(64.0), "good_steps": jnp.int32(0)}
    scale, good_steps = 64.0, 0
    others = (UpdateStatus.ORDERED, UpdateStatus.NON_FINITE, UpdateStatus.LOSS_SPIKE)
    for status in np.random.default_rng(0).choice([UpdateStatus.APPLIED] * 8 + [UpdateStatus.OVERFLOW, *others], 200):
        if status == UpdateStatus.OVERFLOW:
            scale, good_steps = scale / 4, 0
        elif status == UpdateStatus.APPLIED:
            good_steps += 1
            if good_steps == 3:
                scale, good_steps = scale * 4, 0
        scaler = update(scaler, jnp.int32(status))
        assert (float(scaler["scale"]), int(scaler["good_steps"])) == (scale, good_steps)


def test_the_scale_never_becomes_infinite():
    config = LossScaleConfig(window_steps=1)
    scaler = update_scaler({"scale": jnp.float32(2.0**127), "good_steps": jnp.int32(0)}, jnp.int32(UpdateStatus.APPLIED), config)
    assert float(scaler["scale"]) == 2.0**127


def test_an_overflow_leaves_the_batch_out_and_divides_the_scale(tmp_path, events):
    made = half(tmp_path, loss_scale={"initial": TOO_LARGE})
    state = made.train()
    scales, skipped = published(events, "loss_scale"), published(events, "skipped_batches")
    overflows = int(sum(skipped.values()))
    assert 0 < overflows < 12
    assert [skipped[step] for step in range(1, overflows + 1)] == [1.0] * overflows
    assert [scales[step] for step in range(1, overflows + 2)] == [TOO_LARGE / 2**n for n in range(overflows + 1)]
    assert float(state.scaler["scale"]) == TOO_LARGE / 2**overflows
    assert (int(state.step), int(state.batch_index)) == (12 - overflows, 12)
    assert made.output.metrics["samples"] == (12 - overflows) * 16
    # It is no anomaly: nothing to go back to, nothing to leave out when the run is repeated.
    assert made.output.metrics["skipped_batches"] == []
    assert of(events, "anomaly") == []
    assert sorted(published(events, "loss")) == list(range(overflows + 1, 13))


@pytest.mark.slow("trains twice")
def test_it_resumes_bit_for_bit_amid_overflows(tmp_path, events):
    settings = {"loss_scale": {"initial": TOO_LARGE, "window_steps": 3}, "checkpoint": {"save_steps": 2}}
    whole = half(tmp_path / "whole", **settings).train()
    scales = published(events, "loss_scale")
    assert scales[1] > scales[2]
    assert any(scales[step + 1] == 2 * scales[step] for step in range(2, 12))  # the window was full
    events.clear()
    half(tmp_path, **settings, max_num_steps=2).train()
    resumed = half(tmp_path, **settings).train()
    assert [event["step"] for event in of(events, "restored")] == [2]
    assert_equal(resumed, whole)
    assert published(events, "loss_scale") == scales


def test_below_the_minimum_it_is_an_error_that_says_what_to_do(tmp_path, events):
    made = half(tmp_path, loss_scale={"initial": 2.0**40, "minimum": 2.0**38})
    with pytest.raises(
        LossScaleError, match=r"the gradients of batch 2 .* overflow float16, .*lower the learning rate, train with"
    ):
        made.train()


def test_a_loss_that_is_not_finite_is_an_anomaly_and_no_overflow(tmp_path, events):
    made = half(tmp_path, cls=Poisoned, max_num_steps=4)
    state = made.train()
    assert [event["batch_index"] for event in of(events, "anomaly")] == [2]
    assert made.output.metrics["skipped_batches"] == [2]
    assert float(state.scaler["scale"]) == LossScaleConfig().initial


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_it_learns_what_float32_learns_with_micro_batches_too(tmp_path, events, dtype, rtol):
    masters = half(tmp_path / "half", dtype=dtype, accumulation_steps=2).train()
    assert {leaf.dtype for leaf in jax.tree.leaves(masters.params)} == {jnp.dtype("float32")}
    losses, norms = published(events, "loss"), published(events, "grad_norm")
    events.clear()
    state = half(tmp_path / "full", task="tests.programs.tiny:TableTask", dtype="float32").train()
    np.testing.assert_allclose(list(losses.values()), list(published(events, "loss").values()), rtol=rtol)
    np.testing.assert_allclose(list(norms.values()), list(published(events, "grad_norm").values()), rtol=10 * rtol)
    assert state.scaler == {}
    assert published(events, "loss_scale") == {}


def test_masters_must_be_float32(tmp_path):
    with pytest.raises(ValueError, match=r"param_dtype = 'bfloat16': expected 'float32' with dtype float16"):
        half(tmp_path, param_dtype="bfloat16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minimum": 0.0}, "minimum = 0.0: expected a positive number"),
        ({"initial": 1.0, "minimum": 2.0}, r"initial = 1.0: expected at least minimum \(2.0\)"),
        ({"growth_factor": 1.0}, "growth_factor = 1.0: expected more than 1"),
        ({"window_steps": 0}, "window_steps = 0: expected at least 1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        LossScaleConfig(**settings)
