"""Running means: over the whole run, weighted like the metric, the same whatever the run went through."""

import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import UsageError
from tests.programs.tiny import TableTask
from tests.unit.training import FIXED, StopAt, of, trainer
from trainers import runtime

MEANS = {"metrics": {"running_means": ["accuracy", "loss", "share"]}}


class Weighted(TableTask):
    """With a part whose weight differs from batch to batch, and is 0 in some."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        rare = jnp.where((batch["sample_id"] % 5 == 0) & (batch["sample_id"] < 48), batch["weight"], 0.0)
        part = jnp.sum(rare * batch["sample_id"]), jnp.sum(rare)
        return loss._replace(parts={**loss.parts, "share": part})


def run(folder, *callbacks, **changes):
    task = f"{__name__}:Weighted"
    return trainer(folder, *callbacks, task=task, optimizer=FIXED, **{**MEANS, **changes})


def published(events, name):
    return {event["step"]: event["metrics"][name] for event in of(events, "metrics") if name in event["metrics"]}


def weight_of_share(step):
    """Of the 16 examples of the batch that makes a step, of 96."""
    return sum(1 for sample in range(16 * (step - 1), 16 * step) if sample % 96 % 5 == 0 and sample % 96 < 48)


@pytest.mark.slow("trains")
def test_it_is_the_mean_over_all_steps_weighted_like_the_metric(tmp_path, events):
    run(tmp_path).train()
    for name in ("loss", "accuracy"):  # each step has as many targets
        values = published(events, name)
        means = {step: np.mean([values[k] for k in range(1, step + 1)]) for step in values}
        assert published(events, f"mean_{name}") == pytest.approx(means, rel=1e-6)
    shares = published(events, "share")
    assert shares.keys() == {1, 2, 3, 7, 8, 9}  # the others have a weight of 0
    sums = {step: value * weight_of_share(step) for step, value in shares.items()}
    means = {
        step: sum(sums.get(k, 0) for k in range(1, step + 1)) / sum(weight_of_share(k) for k in range(1, step + 1))
        for step in range(1, 13)
    }
    assert published(events, "mean_share") == pytest.approx(means, rel=1e-6)


@pytest.mark.slow("trains three times")
def test_it_does_not_depend_on_when_it_is_published(tmp_path, events):
    run(tmp_path / "often").train()
    often = published(events, "mean_accuracy")
    events.clear()
    run(tmp_path / "seldom", publish_every_steps=4).train()
    assert published(events, "mean_accuracy") == {step: often[step] for step in (4, 8, 12)}


def test_a_restart_goes_on_bit_for_bit(tmp_path, events):
    run(tmp_path / "whole").train()
    whole = {name: published(events, name) for name in ("mean_accuracy", "mean_loss", "mean_share")}
    assert all(values.keys() == set(range(1, 13)) for values in whole.values())
    events.clear()
    run(tmp_path / "parts", StopAt(6, "interrupted")).train()
    runtime.install(runtime.Runtime(events.append))
    run(tmp_path / "parts").train()
    assert {name: published(events, name) for name in whole} == whole


def test_a_skipped_batch_does_not_count(tmp_path, events):
    runtime.install(runtime.Runtime(events.append, skip_batches=(1,)))
    run(tmp_path, max_num_steps=3).train()
    values = published(events, "accuracy")
    assert values.keys() == {1, 3}
    assert published(events, "mean_accuracy")[3] == pytest.approx((values[1] + values[3]) / 2, rel=1e-6)


@pytest.mark.parametrize(("name", "near"), [("acuracy", "; did you mean accuracy"), ("tokens", ""), ("learning_rate", "")])
def test_only_weighted_means_have_one(tmp_path, name, near):
    match = rf"metrics\.running_means: '{name}' is no metric that is published as a weighted mean: .*accuracy.*{near}"
    with pytest.raises(UsageError, match=match):
        trainer(tmp_path, metrics={"running_means": [name]}).configure_model()


def test_each_only_once(tmp_path):
    with pytest.raises(ValueError, match=r"running_means = \['loss', 'loss'\]: expected each name once"):
        trainer(tmp_path, metrics={"running_means": ["loss", "loss"]})
