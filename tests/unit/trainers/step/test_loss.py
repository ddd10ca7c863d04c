"""What a task's loss may return, and what becomes of it in the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests.programs.tiny import TableTask, numbers
from tests.unit.training import FIXED, arguments, losses, of, trainer
from trainers.planning.estimate import plan
from trainers.protocol import Last, Loss, Max, PerExample
from trainers.step.loss import as_loss, scales_of, terms_of, weighted
from trainers.step.train_step import Sums, means

# ---------------------------------------------------------------------- the forms


def test_a_pair_is_a_sum_and_its_targets():
    assert as_loss((6.0, 3.0)) == Loss(6.0, 3.0)
    assert as_loss((6.0, None)) == Loss(6.0, jnp.ones(()))
    assert as_loss(Loss(1.0, 2.0, {"x": (1.0, 1.0)})).parts == {"x": (1.0, 1.0)}


def test_a_dict_is_the_sum_of_the_means_of_its_terms():
    loss = as_loss({"one": (6.0, 3.0), "two": (5.0, 10.0), "none": (0.0, 0.0), "big": Max(4.0)})
    assert float(loss.loss_sum / loss.num_targets) == pytest.approx(6 / 3 + 5 / 10)
    assert loss.parts == {"one": (6.0, 3.0), "two": (5.0, 10.0), "none": (0.0, 0.0), "big": Max(4.0)}


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (1.0, "returned float: expected the loss of each example"),
        ((1.0, 2.0, 3.0), "returned tuple: expected"),
        ({}, "a dict without a loss .empty."),
        ({"big": Max(1.0)}, "a dict without a loss .big."),
        ({"loss": (1.0, 1.0)}, "the name 'loss', which is that of the total"),
        ({"one": 1.0}, "returned float"),
    ],
)
def test_anything_else_is_an_error_that_says_what_is_expected(returned, problem):
    with pytest.raises(UsageError, match=problem):
        as_loss(returned)


WEIGHT = np.array([1.0, 2.0, 0.0], np.float32)


@pytest.mark.parametrize("garbage", [7.0, jnp.nan, jnp.inf])
def test_rows_that_only_fill_up_a_batch_count_in_no_sum_of_single_examples(garbage):
    hits, lengths = jnp.array([1.0, 4.0, garbage]), jnp.array([2.0, 5.0, garbage])
    loss = weighted(PerExample(jnp.array([3.0, 1.0, garbage]), {"hits": hits}, lengths), WEIGHT)
    assert (float(loss.loss_sum), float(loss.num_targets)) == (3 + 2 * 1, 2 + 2 * 5)
    assert [float(value) for value in loss.parts["hits"]] == [1 + 2 * 4, 2 + 2 * 5]
    assert [row.tolist() for row in loss.rows] == [[3, 2, 0], [2, 10, 0], [2, 5, 0]]


def test_an_array_is_the_loss_of_each_example():
    loss = weighted(jnp.array([3.0, 1.0, 9.0]), WEIGHT)
    assert (float(loss.loss_sum), float(loss.num_targets), loss.parts) == (5, 3, {})


@pytest.mark.parametrize("weight", [1.0, 0.25, 1e-6])
def test_the_size_of_the_weights_changes_no_mean(weight):
    """Of a batch whose weights are all the same: the guard against no targets is no floor of 1."""
    number = jnp.float32(weight)
    sums = Sums(3.0 * number, number, number, number, None, {"w": 5.0 * number}, {})
    mean_loss, gradients = means(sums)
    assert (float(mean_loss), float(gradients["w"])) == pytest.approx((3, 5))
    # The first term has two targets, and the second one.
    assert [float(scale) for scale in scales_of([2 * number, number])] == pytest.approx([1, 2])
    terms = as_loss({"one": (6 * number, 2 * number), "two": (5 * number, number)})
    assert float(terms.loss_sum / terms.num_targets) == pytest.approx(6 / 2 + 5)


def test_gradients_are_divided_in_float32_and_not_in_their_own_type():
    """In bfloat16 2049 targets would be 2048."""
    number, gradients = jnp.float32(2049), {"w": jnp.full(3, 2048, jnp.bfloat16)}
    _, found = means(Sums(number, number, number, number, None, gradients, {}))
    assert found["w"].dtype == jnp.float32
    np.testing.assert_allclose(found["w"], 2048 / 2049, rtol=1e-6)


def test_an_example_counts_with_all_its_tokens_whatever_its_weight():
    weight = jnp.array([0.25, 0.5, 0.0])
    assert float(weighted(jnp.ones(3), weight).num_tokens) == 2
    found = weighted(PerExample(jnp.ones(3), num_targets=jnp.array([3.0, 4.0, 5.0])), weight)
    assert (float(found.num_tokens), [float(row) for row in found.rows[2]]) == (7, [3, 4, 0])
    assert float(as_loss({"one": Loss(1.0, 0.5, num_tokens=jnp.int32(3))}).num_tokens) == 3


class ScalarTask(TableTask):
    """Learns w = 1 from 0, by (w - 1)^2, of rows whose weights add up to 0.08."""

    def build_model(self, rngs):
        return nnx.Dict(w=nnx.Param(jnp.zeros(())))

    def loss(self, model, batch):
        return jnp.sum(batch["weight"]) * 0.005 * (model["w"][...] - 1) ** 2, jnp.sum(batch["weight"]) * 0.005


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_fraction_of_a_target_is_one_token_in_any_number_of_micro_batches(tmp_path, events, accumulation_steps):
    settings = {"max_num_steps": 2, "checkpoint": {"save_at_end": False}, "accumulation_steps": accumulation_steps}
    trainer(tmp_path, task="tests.unit.trainers.step.test_loss:ScalarTask", **settings).train()
    assert [event["metrics"]["total_tokens"] for event in of(events, "metrics") if "loss" in event["metrics"]] == [1, 2]


def test_thirty_steps_with_weights_that_add_up_to_less_than_1_are_those_of_the_formula(tmp_path, events):
    """With 1 as the least divisor, w ended at 0.28."""
    settings = {"name": "sgd", "betas": [0.0, 0.0], "learning_rate": 0.0685, "max_grad_norm": None, "weight_decay": 0.0}
    made = trainer(
        tmp_path,
        task="tests.unit.trainers.step.test_loss:ScalarTask",
        optimizer={**settings, "schedule": {"name": "constant"}},
        max_num_steps=30,
        publish_every_steps=30,
        checkpoint={"save_at_end": False},
    )
    w = float(made.train().params["w"])
    assert w == pytest.approx(1 - (1 - 2 * 0.0685) ** 30, rel=1e-5) == pytest.approx(0.988, abs=1e-3)


def test_a_batch_without_targets_has_a_loss_of_0():
    zero = jnp.float32(0)
    mean_loss, gradients = means(Sums(zero, zero, zero, zero, None, {"w": zero}, {}))
    assert (float(mean_loss), float(gradients["w"])) == (0, 0)
    assert [float(scale) for scale in scales_of([zero, jnp.float32(0.5)])] == [1, 2]


def test_single_examples_may_be_terms_of_a_dict_and_keep_their_metrics():
    fit = PerExample(jnp.array([3.0, 1.0, 9.0]), {"hits": jnp.array([1.0, 1.0, 1.0])})
    loss = as_loss(weighted({"fit": fit, "plain": jnp.array([6.0, 0.0, 9.0]), "penalty": (4.0, None)}, WEIGHT))
    assert float(loss.loss_sum / loss.num_targets) == pytest.approx(5 / 3 + 6 / 3 + 4)
    assert {name: float(sum_ / weight) for name, (sum_, weight) in loss.parts.items()} == pytest.approx(
        {"fit": 5 / 3, "plain": 2, "penalty": 4, "hits": 1}
    )


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (lambda: jnp.ones((3, 2)), r"losses \[3, 2\]: expected \[3\], a number for each example"),
        (lambda: PerExample(jnp.ones(3), {"hits": jnp.ones(())}), r"hits \[\]: expected \[3\]"),
    ],
)
def test_what_is_no_number_for_each_example_is_an_error(value, problem):
    with pytest.raises(UsageError, match=problem):
        weighted(value(), WEIGHT)


class TableOfExamples(TableTask):
    """Says nothing of weights."""

    def loss(self, model, batch):
        targets = batch["tokens"][:, 1:]
        logits = model(batch["tokens"][:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        hits = (jnp.argmax(logits, -1) == targets).astype(jnp.float32)
        return PerExample(jnp.sum(losses, -1), {"accuracy": jnp.sum(hits, -1)}, jnp.full(len(targets), targets.shape[1]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_task_of_single_examples_trains_and_evaluates_like_one_of_sums(tmp_path, steps):
    """In global batches that 8 devices cannot divide, and with a held-out set whose last batch is not full."""
    settings = {"global_batch_size": 18, "accumulation_steps": steps, "optimizer": FIXED}
    sums = trainer(tmp_path / "sums", **settings)
    singles = trainer(tmp_path / "singles", task=f"{__name__}:TableOfExamples", **settings)
    # Only the order of the additions differs.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), sums.train().params, singles.train().params)
    assert sums.output.metrics["eval_accuracy"] == singles.output.metrics["eval_accuracy"]
    assert sums.output.metrics["eval_loss"] == pytest.approx(singles.output.metrics["eval_loss"], rel=1e-5)


def test_only_a_dict_has_terms():
    assert terms_of(Loss(1.0, 1.0)) == {}
    assert terms_of({"one": (1.0, 2.0), "big": Max(1.0)}).keys() == {"one"}


# ---------------------------------------------------------------------- in the step


class TwoTerms(TableTask):
    """The second term is of odd samples alone: ragged over micro-batches."""

    def loss(self, model, batch):
        plain = super().loss(model, batch)
        odd = super().loss(model, {**batch, "weight": batch["weight"] * (batch["sample_id"] % 3 == 1)})
        return {"main": plain[:2], "odd": (0.5 * odd.loss_sum, odd.num_targets), "largest": Max(jnp.max(batch["sample_id"]))}


def by_step(events, name):
    return [e["metrics"][name] for e in of(events, "metrics") if "loss" in e["metrics"]]


@pytest.mark.slow("compiles a step and trains")
def test_a_loss_may_be_a_dict_whose_total_drives_the_update_and_whose_parts_are_metrics(tmp_path, events):
    states = []
    for accumulation_steps in (1, 2):
        events.clear()
        made = trainer(
            tmp_path / str(accumulation_steps),
            task=f"{__name__}:TwoTerms",
            accumulation_steps=accumulation_steps,
            max_num_steps=4,
            optimizer=FIXED,
        )
        states.append(made.train())
        main, odd, total = by_step(events, "main"), by_step(events, "odd"), list(losses(events).values())
        np.testing.assert_allclose(total, np.add(main, odd), rtol=1e-6)
        assert by_step(events, "largest") == [15, 31, 47, 63]
        assert 0.4 < odd[0] / main[0] < 0.6
        assert {"eval_main", "eval_odd", "eval_loss"} <= made.output.metrics.keys()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), states[0].params, states[1].params)
    plain = trainer(tmp_path / "plain", max_num_steps=4, optimizer=FIXED).train()
    assert not np.allclose(states[0].params["out"], plain.params["out"], atol=1e-4)


class OnlyTheSecondTerm(TableTask):
    """No sample has a target of the first term."""

    def loss(self, model, batch):
        plain = super().loss(model, batch)
        return {"first": (plain.loss_sum * 0, plain.num_targets * 0), "second": plain[:2]}


def test_the_loss_of_a_batch_without_targets_of_the_first_term_is_that_of_the_others(tmp_path, events):
    trainer(tmp_path, task=f"{__name__}:OnlyTheSecondTerm", max_num_steps=1, checkpoint={"save_at_end": False}).train()
    assert [*losses(events).values()] == by_step(events, "second")
    assert by_step(events, "second")[0] > 1


class MeanOverBatches(TableTask):
    """The loss of a micro-batch is its largest sample id, whatever its number of targets."""

    def loss(self, model, batch):
        return super().loss(model, batch).loss_sum * 0.0 + jnp.max(batch["sample_id"]), None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("accumulation_steps", "global_batch_size", "first"), [(1, 16, 15.0), (2, 16, 11.0), (4, 32, 19.0)])
def test_without_targets_the_loss_is_the_mean_over_micro_batches(tmp_path, events, accumulation_steps, global_batch_size, first):
    made = trainer(
        tmp_path,
        task=f"{__name__}:MeanOverBatches",
        accumulation_steps=accumulation_steps,
        global_batch_size=global_batch_size,
        max_num_steps=2,
    )
    made.train()
    assert losses(events)[1] == pytest.approx(first)


class Told(TableTask):
    """Wants to know the step, and shows what it was told."""

    told = ()

    def set_step_nr(self, step):
        self.step = step
        Told.told = (*Told.told, step)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss._replace(parts={"step_seen": Last(self.step)})


def test_a_task_that_wants_it_is_reported_the_step_as_a_traced_value(tmp_path, events):
    """Over a restart, with one program for all steps."""
    Told.told = ()
    changes = {"task": f"{__name__}:Told", "accumulation_steps": 2, "optimizer": FIXED}
    trainer(tmp_path, max_num_steps=3, **changes).train()
    trainer(tmp_path, max_num_steps=6, **changes).train()
    assert by_step(events, "step_seen") == [0, 1, 2, 3, 4, 5]
    assert Told.told
    assert all(isinstance(step, jax.core.Tracer) for step in Told.told)
    assert not [event for event in of(events, "note") if "compil" in event["message"]]


def test_a_task_that_wants_the_step_can_be_planned(tmp_path):
    made = arguments(tmp_path, task=f"{__name__}:Told", data={"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"})
    assert plan(made, 8)[0] == []
    assert len(numbers(made)) == 2


def test_the_total_of_terms_over_held_out_data_is_the_sum_of_their_means(tmp_path):
    """Not a mean of the batches' totals: the second term has other numbers of targets in each batch."""
    made = trainer(tmp_path, task=f"{__name__}:TwoTerms", optimizer=FIXED, global_batch_size=8, max_num_steps=1)
    state = made.train()
    whole, batches = made.evaluate(state), list(made.eval(state))
    assert whole["loss"] == pytest.approx(whole["main"] + whole["odd"], rel=1e-6)
    assert len(batches) > 1
    for batch in batches:
        assert batch["loss"] == pytest.approx(batch["main"] + batch.get("odd", 0.0), rel=1e-6)
