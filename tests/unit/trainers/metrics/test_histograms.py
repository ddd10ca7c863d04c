"""Distributions: measured in the step when they are due, fetched with the publish, and absent when they are off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.published import Distribution
from tests.unit.training import FIXED, arguments, assert_equal, of, trainer
from trainers.config import DistributionConfig
from trainers.metrics import histograms
from trainers.recorders.dispatch import Recorders


def test_a_row_is_numpys_histogram_mean_and_deviation():
    values = jax.random.normal(jax.random.key(0), (50, 40)) * 3 + 1
    config = DistributionConfig(pattern="w", every_steps=1, bins=16)
    measured = histograms.measure({"w": values, "other": values}, {"w": -values, "other": values}, jnp.int32(0), config)
    found = histograms.read(np.asarray(measured), histograms.chosen({"w": values, "other": values}, config))
    assert set(found) == {"params/w", "gradients/w"}
    flat, shape = np.asarray(values).ravel(), found["params/w"]
    assert shape[:4] == pytest.approx((flat.mean(), flat.std(), flat.min(), flat.max()), rel=1e-5)
    assert sum(shape.counts) == flat.size
    assert np.abs(np.array(shape.counts) - np.histogram(flat, 16)[0]).max() <= 1  # an edge may round to the other side
    assert found["gradients/w"].mean == pytest.approx(-shape.mean, rel=1e-5)


@pytest.mark.parametrize("way", [histograms._scattered, histograms._counted_by_edge])
def test_both_ways_of_counting_are_numpys(way):
    values = jax.random.normal(jax.random.key(1), (30, 40))
    counts = np.asarray(way(values, jnp.min(values), jnp.max(values), bins=16))
    assert counts.sum() == 1200
    assert np.abs(counts - np.histogram(np.asarray(values), 16)[0]).max() <= 1


def test_what_is_all_the_same_or_not_finite_is_no_problem():
    config = DistributionConfig(pattern=".", every_steps=1, bins=4)
    params = {"a": jnp.zeros(5), "b": jnp.array([1.0, jnp.nan])}
    found = histograms.read(np.asarray(histograms.measure(params, params, jnp.int32(0), config)), ["a", "b"])
    assert set(found) == {"params/a", "gradients/a"}
    assert sum(found["params/a"].counts) == 5


def measured_at(events):
    return {e["step"]: e["distributions"] for e in of(events, "metrics") if e.get("distributions")}


@pytest.mark.slow("trains more than once")
def test_they_come_with_the_publish_when_due_and_change_nothing(tmp_path, events):
    config = {"pattern": "out", "every_steps": 4, "bins": 8}
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    state = trainer(tmp_path, distributions=config, publish_every_steps=2, optimizer=FIXED, mesh=mesh).train()
    told = measured_at(events)
    assert list(told) == [4, 8, 12]
    shape = Distribution(*told[4]["gradients/out"])
    assert set(told[4]) == {"params/out", "gradients/out"}
    assert sum(shape.counts) == 16 * 256
    assert shape.std > 0
    events.clear()
    plain = trainer(tmp_path / "plain", publish_every_steps=2, optimizer=FIXED, mesh=mesh).train()
    assert measured_at(events) == {}
    assert_equal(state.params, plain.params)


def test_off_there_is_nothing_of_them_in_the_step(tmp_path):
    assert histograms.measure({"w": jnp.ones(3)}, {"w": jnp.ones(3)}, jnp.int32(0), DistributionConfig()) is None


def test_they_are_due_only_when_something_is_published(tmp_path):
    with pytest.raises(ValueError, match=r"distributions.every_steps = 5: expected a multiple of publish_every_steps \(2\)"):
        arguments(tmp_path, publish_every_steps=2, distributions={"pattern": ".", "every_steps": 5})
    with pytest.raises(ValueError, match="expected a regular expression"):
        arguments(tmp_path, distributions={"pattern": "("})


def test_recorders_get_them(tmp_path, events):
    from trainers.recorders.jsonl import read
    from trainers.recorders.recorder import About

    notes = []
    feeds = Recorders(["jsonl", "tensorboard"], About("run", str(tmp_path), {}), notes.append)
    trainer(tmp_path, distributions={"pattern": ".", "every_steps": 1, "bins": 4}, max_num_steps=1).train()
    for event in of(events, "metrics"):
        feeds.record(event["step"], event["metrics"], event.get("distributions"))
    feeds.close()
    line = next(read(tmp_path / "metrics.jsonl"))
    assert set(line["distributions"]) == {"params/embed", "params/out", "gradients/embed", "gradients/out"}
    assert notes == []
