"""The loss of examples that share rows is that of the same examples in rows of their own, and so are its gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from gangway.user_modules import load_object
from tests.programs import short_pairs
from tests.unit.training import of
from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, dataset_function, from_dict
from trainers.data.collate import stack
from trainers.step import rng
from trainers.step.loss import weighted

PREFERENCE, REWARD, CLASSES = (
    f"trainers.tasks.{name}" for name in ("preference:PreferenceTask", "reward:RewardTask", "classification:ClassificationTask")
)
MODEL = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 24}
SGD = {"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "schedule": {"name": "constant"}, "max_grad_norm": None}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def arguments(tmp_path, task, packing, data=None, **changes):
    records = short_pairs.labelled(24, 5) if task == CLASSES else short_pairs.pairs(24, 5)
    tmp_path.mkdir(exist_ok=True)
    path = short_pairs.write(tmp_path / "records.jsonl", records)
    settings = {"name": "t", "max_num_steps": 1, "task": task, "model": MODEL, "storage": str(tmp_path)}
    data = {"paths": [path], "sequence_length": 48, "eval_fraction": 0.25, "packing": packing, **(data or {})}
    settings |= {"data": data, "classification": {"labels": short_pairs.LABELS}, "previews": {"prompts": []}}
    return from_dict(TrainingArguments, {**settings, **changes})


def batch_of(made):
    train, _ = dataset_function(made)(made)
    rows = [train[index] for index in range(len(train))]
    return stack(rows, [True] * len(rows))


def loss_and_gradients(made, batch, frozen):
    task = load_object(made.task)(made)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0))))

    def params_of(seed):
        numbers = np.random.default_rng(seed)
        return jax.tree.map(lambda leaf: 0.2 * numbers.standard_normal(leaf.shape, np.float32), shapes)

    extra = {"frozen": {"reference": nnx.merge(graph, params_of(1))}} if frozen else {}
    extra = extra or ({"frozen": {}} if made.task == PREFERENCE else {})

    def mean(params):
        loss = weighted(task.loss(nnx.merge(graph, params), batch, **extra), jnp.asarray(batch["weight"]))
        return loss.loss_sum / loss.num_targets, loss

    (_, loss), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(params_of(0))
    return loss, jax.tree.leaves(gradients)


FROZEN = {"frozen": {"reference": "x"}}
CASES = {
    "dpo": (PREFERENCE, {"preference": {"loss": "dpo", "label_smoothing": 0.1}, **FROZEN}),
    "dpo-columns": (PREFERENCE, {"preference": {"loss": "dpo", "reference": "columns"}}),
    "ipo": (PREFERENCE, {"preference": {"loss": "ipo"}, **FROZEN}),
    "orpo": (PREFERENCE, {"preference": {"loss": "orpo"}}),
    "simpo-cut": (PREFERENCE, {"preference": {"loss": "simpo"}, "data": {"sequence_length": 20, "truncation": "keep_end"}}),
    "reward": (REWARD, {}),
    "reward-cut": (REWARD, {"data": {"sequence_length": 20}}),
    "classes": (CLASSES, {"data": {"sequence_length": 16}}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_packed_loss_and_gradients_are_those_of_each_example_in_a_row_of_its_own(tmp_path, case):
    task, changes = CASES[case]
    apart, packed = (arguments(tmp_path, task, packing, **changes) for packing in (None, "fit"))
    alone, shared = batch_of(apart), batch_of(packed)
    assert len(shared["weight"]) < len(alone["weight"])
    frozen = "frozen" in changes
    expected, expected_gradients = loss_and_gradients(apart, alone, frozen)
    found, gradients = loss_and_gradients(packed, shared, frozen)
    assert float(found.num_targets) == float(expected.num_targets) == 18
    assert float(found.num_tokens) == float(expected.num_tokens) > 18
    np.testing.assert_allclose(found.loss_sum, expected.loss_sum, rtol=1e-5)
    assert found.parts.keys() == expected.parts.keys() >= {"accuracy"}
    for name, (value, weight) in expected.parts.items():
        np.testing.assert_allclose(found.parts[name][0], value, rtol=1e-5, atol=1e-5, err_msg=name)
        assert float(found.parts[name][1]) == float(weight) == 18
    largest = max(float(np.abs(gradient).max()) for gradient in expected_gradients)
    assert largest > 1e-4
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6 * largest)


def test_predictions_of_packed_rows_are_those_of_each_text_alone(tmp_path):
    found = {}
    for packing in (None, "fit"):
        made = arguments(tmp_path, CLASSES, packing, {"sequence_length": 16})
        task, batch = load_object(made.task)(made), batch_of(made)
        model = nnx.jit(lambda task=task: task.build_model(nnx.Rngs(rng.key(0, "init", 0))))()
        model.head[...] = jax.random.normal(jax.random.key(3), model.head.shape)
        logits = np.asarray(jax.jit(task.predictions)(model, batch)["logits"])
        counts = batch["example_weight"] > 0 if packing else batch["weight"] > 0
        found[packing] = sorted(zip(batch["label"][counts].tolist(), *logits[counts].T.tolist(), strict=True))
    np.testing.assert_allclose(found["fit"], found[None], rtol=1e-5, atol=1e-5)


@pytest.mark.slow("compiles several steps")
def test_a_step_is_the_mean_over_pairs_at_any_accumulation_and_with_filled_up_rows(tmp_path, events):
    """12 rows in micro-batches of 12 and 6, for 4 replicas: filled up to 12 and 8. Rows have different numbers of pairs."""
    runs = {}
    for steps in (1, 2):
        events.clear()
        changes = {"global_batch_size": 12, "accumulation_steps": steps, "optimizer": SGD, "mesh": {"data": 4, "tensor": 2}}
        changes |= {"preference": {"loss": "simpo"}, "publish_every_steps": 1}
        made = arguments(tmp_path / str(steps), PREFERENCE, "fit", {"eval_fraction": 0.0}, **changes)
        trainer = BaseTrainer(made, *dataset_function(made)(made))
        numbers = [float(trainer.dataset_train[index]["example_weight"].sum()) for index in range(12)]
        assert len(set(numbers)) > 1
        trainer.train()
        metrics = {name: value for event in of(events, "metrics") for name, value in event["metrics"].items()}
        runs[steps] = metrics, jax.device_get(trainer.output.state.params)
    (one, params), (two, other_params) = runs.values()
    for name in ("loss", "accuracy", "tokens"):
        assert one[name] == pytest.approx(two[name], rel=1e-5), name
    assert 0 < one["packing_efficiency"] <= 1
    # A mean over pairs: a whole number of them is right.
    assert one["accuracy"] * sum(numbers) == pytest.approx(round(one["accuracy"] * sum(numbers)), abs=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, other_params)


@pytest.mark.slow("compiles several steps")
def test_held_out_pairs_have_the_same_loss_packed_and_apart(tmp_path):
    found, state = [], None
    for packing in (None, "fit"):
        changes = {"preference": {"loss": "simpo"}, "global_batch_size": 8, "mesh": {"data": 8}}
        made = arguments(tmp_path / str(packing), PREFERENCE, packing, **changes)
        trainer = BaseTrainer(made, *dataset_function(made)(made))
        state = state or trainer.train()
        means = trainer.evaluate(state)
        found.append([means[name] for name in ("loss", "accuracy", "rewards/margin")])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-7)


class Logits(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.zeros((256, 256)))

    def __call__(self, tokens):
        return self.table[...][tokens]


def test_a_model_that_cannot_keep_pairs_apart_is_refused(tmp_path):
    made = arguments(tmp_path, PREFERENCE, "fit", preference={"loss": "simpo"})
    task = load_object(PREFERENCE)(made)
    with pytest.raises(UsageError, match=r"the rows are packed .* and Logits cannot keep their documents apart"):
        task.loss(Logits(), batch_of(made), {})
