"""Metrics of every kind, over micro-batches, steps, batches that were left out, and restarts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs.tiny import TableTask
from tests.unit.training import FIXED, OneDevice, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.metrics.accumulator import Kind, Layout
from trainers.protocol import Last, Loss, Max, Min, Sum
from trainers.step.state import add_sums

KINDS = ("mean_id", "sum_id", "max_id", "min_id", "last_id", "total_id", "rare")


class KindsTask(TableTask):
    """Tells the sample ids of each micro-batch in every kind of metric; `rare` only of those that have sample 0 in them."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        ids, weight = batch["sample_id"].astype(jnp.float32), batch["weight"]
        total, count = jnp.sum(ids * weight), jnp.sum(weight)
        parts = {
            "mean_id": (total, count),
            "sum_id": Sum(total),
            "max_id": Max(jnp.max(jnp.where(weight > 0, ids, -1.0)), count),
            "min_id": Min(jnp.min(jnp.where(weight > 0, ids, 1e9)), count),
            "last_id": Last(ids[-1]),
            "total_id": Sum(total),
            "rare": Sum(7.0, jnp.any(ids == 0)),
        }
        return loss._replace(parts=parts)


def kinds_trainer(folder, cls=BaseTrainer, **changes):

    own = {"task": f"{__name__}:KindsTask", "publish_every_steps": 3, "optimizer": FIXED, "evaluation": {"max_batches": 1}}
    return trainer(folder, cls=cls, **{**own, **changes})


def published(events):
    return {e["step"]: {name: e["metrics"].get(name) for name in KINDS} for e in of(events, "metrics") if "loss" in e["metrics"]}


def expected(batches, skipped=(), so_far=()):
    """Of an interval of these batches; `so_far`: all since the run began."""

    def ids(chosen):
        return [np.arange(16 * k, 16 * k + 16) % 96 for k in chosen if k not in skipped]

    of_interval = np.concatenate(ids(batches))
    return {
        "mean_id": pytest.approx(of_interval.mean()),
        "sum_id": of_interval.sum(),
        "max_id": of_interval.max(),
        "min_id": of_interval.min(),
        "last_id": of_interval[-1],
        "total_id": np.concatenate(ids(so_far or batches)).sum(),
        "rare": 7.0 if 0 in of_interval else None,
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_every_kind_over_micro_batches_steps_and_skipped_batches(tmp_path, events, accumulation_steps):
    runtime.install(runtime.Runtime(runtime.current().send, skip_batches=(4,)))
    kinds_trainer(tmp_path, accumulation_steps=accumulation_steps).train()
    intervals = {end: range(end - 3, end) for end in (3, 6, 9, 12)}
    assert published(events) == {end: expected(batches, {4}, range(end)) for end, batches in intervals.items()}
    counted = {e["step"]: e["metrics"]["skipped_batches"] for e in of(events, "metrics") if "loss" in e["metrics"]}
    assert counted == {3: 0, 6: 1, 9: 0, 12: 0}


def test_totals_go_on_over_restarts_and_intervals_begin_anew(tmp_path, events):
    whole = kinds_trainer(tmp_path / "whole").train()
    events.clear()
    kinds_trainer(tmp_path, max_num_steps=7).train()
    resumed = kinds_trainer(tmp_path).train()
    intervals = {3: range(3), 6: range(3, 6), 7: [6], 9: [7, 8], 12: range(9, 12)}
    assert published(events) == {end: expected(batches, (), range(end)) for end, batches in intervals.items()}
    np.testing.assert_array_equal(resumed.sums["total_id"], whole.sums["total_id"])


@pytest.mark.slow("compiles for several meshes")
def test_the_number_of_devices_does_not_matter(tmp_path, events):
    kinds_trainer(tmp_path, cls=OneDevice, max_num_steps=3).train()
    assert published(events) == {3: expected(range(3))}


def test_an_evaluation_is_over_the_whole_set_whatever_the_kind(tmp_path, events):
    made = kinds_trainer(tmp_path, max_num_steps=1, evaluation={})
    found = made.evaluate(made.train())
    ids = np.arange(21)  # in batches of 16: the second has padding
    assert {name: found[name] for name in KINDS if name != "last_id"} == {
        "mean_id": pytest.approx(10.0),
        "sum_id": ids.sum(),
        "max_id": 20,
        "min_id": 0,
        "total_id": ids.sum(),
        "rare": 7.0,
    }


def test_what_has_no_weight_says_nothing():
    layout = Layout.of(Loss(0.0, 0.0, {"s": Sum(1.0), "m": Max(1.0), "n": Min(1.0), "l": Last(1.0), "total_t": Sum(1.0)}))
    kinds = {"s": Sum, "m": Max, "n": Min, "l": Last, "total_t": Sum}
    some = layout.pairs({name: kind(2.0) for name, kind in kinds.items()})
    none = layout.pairs({name: kind(float("inf"), 0.0) for name, kind in kinds.items()})
    for one, other in ((some, none), (none, some)):
        for steps in (True, False):
            assert layout.read(np.asarray(layout.combine(one, other, steps=steps))) == dict.fromkeys(kinds, 2.0)
    assert layout.read(np.asarray(none)) == {}


def test_a_total_is_as_exact_as_its_largest_addend():
    """Half a million addends that float32 cannot add up: plainly summed they are 1 % off."""
    layout = Layout(("total_x",), (Kind.TOTAL,))

    def step(_, sums):
        return add_sums(sums, layout, jnp.array([[0.1, 1.0]]))[1]

    sums = jax.jit(lambda: jax.lax.fori_loop(0, 500_000, step, {"total_x": jnp.zeros(2)}))()
    assert float(sums["total_x"][0]) == pytest.approx(50_000, rel=1e-6)
