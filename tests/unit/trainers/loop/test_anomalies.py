"""Batches that must not be trained on: what the step says of them, and what is decided."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.config import AnomalyConfig
from trainers.loop.anomalies import Anomaly, decide
from trainers.step.host_flags import REDUCED, UpdateStatus, reduce_flags, update_stats

NON_FINITE, SPIKE = UpdateStatus.NON_FINITE, UpdateStatus.LOSS_SPIKE


def anomaly(status=NON_FINITE, batch_index=20, loss=math.nan, expected=2.5):
    return Anomaly(status, batch_index, loss, expected)


@pytest.mark.parametrize(
    ("status", "settings", "skipped", "action", "new", "go_back_to"),
    [
        (NON_FINITE, {}, (), "skip", (20,), None),
        (NON_FINITE, {"non_finite": "raise"}, (), "raise", (), None),
        (NON_FINITE, {"non_finite": "rollback"}, (), "rollback", (20,), 20),
        (NON_FINITE, {"non_finite": "rollback", "skip_before": 3}, (), "rollback", (17, 18, 19, 20), 17),
        (NON_FINITE, {"non_finite": "rollback", "skip_before": 3}, (18,), "rollback", (17, 19, 20), 17),
        (NON_FINITE, {"non_finite": "rollback", "skip_before": 99}, (), "rollback", tuple(range(21)), 0),
        (NON_FINITE, {"non_finite": "skip", "skip_before": 3}, (), "skip", (20,), None),
        (NON_FINITE, {"loss_spike": "rollback"}, (), "skip", (20,), None),
        (SPIKE, {"loss_spike": "rollback"}, (), "rollback", (20,), 20),
        (SPIKE, {"loss_spike": "skip", "non_finite": "raise"}, (), "skip", (20,), None),
        (SPIKE, {"loss_spike": "raise"}, (), "raise", (), None),
        (NON_FINITE, {"max_skipped": 2}, (3,), "skip", (20,), None),
        (NON_FINITE, {"max_skipped": 2}, (3, 4), "raise", (), None),
        (NON_FINITE, {"max_skipped": 3, "non_finite": "rollback", "skip_before": 3}, (), "raise", (), None),
        (NON_FINITE, {"max_skipped": 0}, (), "raise", (), None),
        (NON_FINITE, {"max_skipped": 2, "skipped_window_batches": 17}, (3, 4), "skip", (20,), None),
        (NON_FINITE, {"max_skipped": 2, "skipped_window_batches": 18}, (3, 4), "raise", (), None),
        # What is still to come does not count: a replayed lineage orders it from the beginning.
        (NON_FINITE, {"max_skipped": 2}, (21, 22, 23), "skip", (20,), None),
        # Nor does a rollback's way back over batches beyond the window.
        (
            NON_FINITE,
            {"max_skipped": 5, "skipped_window_batches": 5, "non_finite": "rollback", "skip_before": 9},
            (),
            "rollback",
            tuple(range(11, 21)),
            11,
        ),
    ],
)
def test_what_the_configuration_wants_done(status, settings, skipped, action, new, go_back_to):
    decision = decide(anomaly(status), AnomalyConfig(**settings), set(skipped))
    assert (decision.action, decision.skipped_batches, decision.go_back_to) == (action, new, go_back_to)
    assert bool(decision.error) == (action == "raise")


def test_errors_name_the_batch_what_was_found_and_what_to_do():
    assert decide(anomaly(loss=math.inf), AnomalyConfig(non_finite="raise"), ()).error == (
        "batch 20 has a non-finite loss or gradient (loss inf); its update was not applied: look at its data and lower the "
        "learning rate, or set anomalies.non_finite to skip or rollback"
    )
    assert (
        "the loss of batch 20, 9, is far above the 2.5 expected"
        in decide(anomaly(SPIKE, loss=9.0), AnomalyConfig(loss_spike="raise"), ()).error
    )


def test_too_many_are_all_named():
    error = decide(anomaly(), AnomalyConfig(max_skipped=2), {3, 11}).error
    assert "with it 3 of the last 10,000 batches would be skipped (anomalies.max_skipped = 2): 3, 11, 20;" in error
    error = decide(anomaly(batch_index=39), AnomalyConfig(max_skipped=2), set(range(40))).error
    assert "17, 18, 19 and 20 more;" in error
    assert "to skip" not in error, "it is set so"


def test_a_run_of_any_length_may_come_upon_a_bad_batch_now_and_then():
    """One in a thousand, over a million batches; then every second one."""
    config, skipped = AnomalyConfig(max_skipped=20), set()
    for batch in range(0, 1_000_000, 1000):
        decision = decide(anomaly(batch_index=batch), config, skipped)
        assert decision.action == "skip"
        skipped.update(decision.skipped_batches)
    for batch in range(1_000_000, 1_000_100, 2):
        decision = decide(anomaly(batch_index=batch), config, skipped)
        if decision.action == "raise":
            break
        skipped.update(decision.skipped_batches)
    # Nine of the thousandth ones are left in the window, and the twenty-first is one too many.
    assert (decision.action, batch) == ("raise", 1_000_000 + 2 * 11)


@given(st.sets(st.integers(0, 60), max_size=40), st.integers(0, 60), st.integers(0, 9), st.integers(1, 30))
def test_a_restart_decides_alike(bad, saved_at, most, window):
    """A process that has seen every anomaly, and one that knows of the checkpoint's what the checkpoint says."""
    config = AnomalyConfig(max_skipped=most, skipped_window_batches=window)
    seen: set[int] = set()
    decisions = {}
    for batch in sorted(bad):
        decisions[batch] = decide(anomaly(batch_index=batch), config, seen).action
        seen.update({batch} if decisions[batch] == "skip" else ())
    restarted = {batch for batch in seen if batch < saved_at}
    for batch in sorted(batch for batch in bad if batch >= saved_at):
        assert decide(anomaly(batch_index=batch), config, restarted).action == decisions[batch]
        restarted.update({batch} if decisions[batch] == "skip" else ())


def test_what_is_reported_is_json_without_nan():
    event = decide(anomaly(expected=math.nan), AnomalyConfig(), ()).event()
    assert event == {
        "kind": "non_finite",
        "batch_index": 20,
        "loss": None,
        "expected": None,
        "action": "skip",
        "skipped_batches": [20],
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spike_zscore", 0.0),
        ("spike_warmup_steps", 0),
        ("spike_decay", 1.0),
        ("skip_before", -1),
        ("max_skipped", -1),
        ("skipped_window_batches", 0),
    ],
)
def test_settings_that_make_no_sense(field, value):
    with pytest.raises(ValueError, match=rf"{field} = {value}: expected"):
        AnomalyConfig(**{field: value})


# ---------------------------------------------------------------------- in the graph

NO_STATS = {"count": np.int32(0), "mean": np.float32(0), "variance": np.float32(0)}
STATS = {"count": np.int32(60), "mean": np.float32(2.0), "variance": np.float32(0.01)}


def reduced(flags, loss=2.0, finite=True, stats=STATS, **settings):
    found = reduce_flags(jnp.array(flags, jnp.int32), jnp.float32(loss), jnp.bool_(finite), stats, AnomalyConfig(**settings))
    return dict(zip(REDUCED, np.asarray(found), strict=True))


@pytest.mark.parametrize(
    ("skip", "batches", "loss", "finite", "settings", "status"),
    [
        (0, (7, 7), 2.0, True, {}, UpdateStatus.APPLIED),
        (1, (7, 7), 2.0, True, {}, UpdateStatus.ORDERED),
        (1, (7, 7), np.nan, False, {}, UpdateStatus.ORDERED),
        (0, (7, 7), np.nan, False, {}, NON_FINITE),
        (0, (7, 7), np.nan, False, {"loss_spike": "skip"}, NON_FINITE),
        (0, (7, 7), 2.59, True, {"loss_spike": "skip"}, UpdateStatus.APPLIED),
        (0, (7, 7), 2.61, True, {"loss_spike": "skip"}, SPIKE),
        (0, (7, 7), 2.61, True, {"loss_spike": "off"}, UpdateStatus.APPLIED),
        (0, (7, 7), 2.61, True, {"loss_spike": "skip", "spike_warmup_steps": 61}, UpdateStatus.APPLIED),
        (0, (7, 7), 0.1, True, {"loss_spike": "skip"}, UpdateStatus.APPLIED),
        (0, (7, 8), 2.0, True, {}, UpdateStatus.OUT_OF_STEP),
        (1, (8, 7), np.nan, False, {}, UpdateStatus.OUT_OF_STEP),
    ],
)
def test_the_status_of_an_update(skip, batches, loss, finite, settings, status):
    assert reduced([[0, 0, skip, 0, batches[0]], [0, 0, 0, 0, batches[1]]], loss, finite, **settings)["status"] == status


def test_requests_waits_and_indices_of_all_hosts_come_out():
    found = reduced([[0, 3, 0, 250, 7], [2, 1, 0, 70_000, 9]])
    names = ("stop", "saves", "data_wait_us", "batch_index", "newest_batch_index")
    assert [found[name] for name in names] == [2, 3, 70_000, 7, 9]
    assert [found[name].view(np.float32) for name in ("loss", "expected_loss")] == [2.0, 2.0]
    assert np.isnan(reduced([[0, 0, 0, 0, 0]], stats=NO_STATS)["expected_loss"].view(np.float32))


def test_losses_that_hardly_vary_do_not_make_a_spike_of_chance():
    flat = {**STATS, "variance": np.float32(1e-12)}
    assert reduced([[0, 0, 0, 0, 0]], 2.1, stats=flat, loss_spike="skip")["status"] == UpdateStatus.APPLIED
    assert reduced([[0, 0, 0, 0, 0]], 2.2, stats=flat, loss_spike="skip")["status"] == SPIKE


def test_running_statistics():
    losses = np.random.default_rng(0).normal(3.0, 0.5, 400).astype(np.float32)
    step = jax.jit(lambda stats, loss: update_stats(stats, loss, 0.98))
    stats = NO_STATS
    for count, loss in enumerate(losses, 1):
        stats = step(stats, loss)
        if count <= 50:  # the plain mean and variance, until their weight falls below that of the past
            np.testing.assert_allclose(stats["mean"], losses[:count].mean(), rtol=1e-5)
            np.testing.assert_allclose(stats["variance"], losses[:count].var(), rtol=1e-4, atol=1e-6)
    weights = 0.98 ** np.arange(399, -1, -1.0)
    weights[:50] = weights[49] / 0.02 / 50
    weights /= weights.sum()
    np.testing.assert_allclose(stats["mean"], (weights * losses).sum(), rtol=1e-4)
    np.testing.assert_allclose(stats["variance"], (weights * (losses - stats["mean"]) ** 2).sum(), rtol=1e-3)
    assert int(stats["count"]) == 400
