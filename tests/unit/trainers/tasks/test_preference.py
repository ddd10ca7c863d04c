"""The preference task: against a computation of its own for each pair, at any accumulation, and with each kind of reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests import ROOT
from tests.programs.preferences import PROMPT, Pairs, datasets
from tests.unit.training import arguments, of
from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.step import rng
from trainers.tasks.preference import PreferenceTask

LLAMA, QWEN = (str(ROOT / "tests" / "unit" / "data" / "parity" / name) for name in ("llama3", "qwen2"))
SETTINGS = {
    "task": "trainers.tasks.preference:PreferenceTask",
    "model": {"pretrained": LLAMA},
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "global_batch_size": 20,
    "max_num_steps": 3,
    "optimizer": {
        "name": "sgd",
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "schedule": {"name": "constant"},
        "max_grad_norm": None,
    },
    "previews": {"prompts": []},
    "data": {"sequence_length": 8, "dataset": "tests.programs.preferences:datasets"},
    "frozen": {"reference": LLAMA},
}


def trainer(storage, **changes):
    made = arguments(storage, **{**SETTINGS, **changes})
    return BaseTrainer(made, datasets(made)[0])


def published(events):
    return [event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"]]


def task_of(**changes):
    model = {"vocab_size": 64, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 16}
    settings = {"name": "t", "max_num_steps": 1, "model": model, "data": {"sequence_length": 8}}
    return PreferenceTask(from_dict(TrainingArguments, {**settings, "preference": {"loss": "simpo"}, **changes}))


@pytest.fixture(scope="module")
def models():
    task = task_of()
    return [nnx.jit(lambda seed: task.build_model(nnx.Rngs(rng.key(seed, "init", 0))), static_argnums=0)(i) for i in (0, 1)]


def log_p(model, tokens, weight):
    """Of one row, token by token."""
    logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens[None, :-1]), np.float64)[0]
    all_log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = [all_log_p[place - 1, token] for place, token in enumerate(tokens) if weight[place] > 0]
    return np.array([sum(found), len(found)])


def batch_of(num_pairs):
    pairs = [Pairs(num_pairs, 5, False)[index] for index in range(num_pairs)]
    return {name: np.stack([pair[name] for pair in pairs]) for name in pairs[0]}


def test_the_loss_of_a_pair_is_that_of_its_completions_alone(models):
    policy, reference = models
    task, batch = task_of(preference={"beta": 0.3}, frozen={"reference": "x"}), batch_of(3)
    found = jax.jit(task.loss)(policy, batch, {"reference": reference})
    for row in range(3):
        pair = list(zip(batch["tokens"][row], batch["token_weight"][row], strict=True))
        ours, theirs = (np.stack([log_p(model, *each) for each in pair]) for model in models)
        rewards = 0.3 * (ours - theirs)[:, 0]
        assert float(found.losses[row]) == pytest.approx(np.logaddexp(0, rewards[1] - rewards[0]), rel=1e-4)
        assert float(found.metrics["rewards/chosen"][row]) == pytest.approx(rewards[0], rel=1e-3, abs=1e-5)
        assert float(found.metrics["rewards/rejected"][row]) == pytest.approx(rewards[1], rel=1e-3, abs=1e-5)
        assert float(found.metrics["rewards/margin"][row]) == pytest.approx(rewards[0] - rewards[1], rel=1e-3, abs=1e-5)
        assert float(found.metrics["accuracy"][row]) == (rewards[0] > rewards[1])
        assert float(found.num_tokens[row]) == ours[:, 1].sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", ["ipo", "orpo", "simpo"])
def test_padding_counts_for_nothing(models, loss):
    """What is after a completion, in any of the losses; and the tokens of the prompt are no targets, but what a model sees."""
    references = {"frozen": {"reference": "x"}} if loss == "ipo" else {}
    task, batch = task_of(preference={"loss": loss}, **references), batch_of(4)
    after = (np.cumsum(batch["token_weight"], -1) == batch["token_weight"].sum(-1, keepdims=True)) & (batch["token_weight"] == 0)
    assert after.any()
    other = {**batch, "tokens": np.where(after, 7, batch["tokens"])}
    loss_of = jax.jit(task.loss)
    one, same = (loss_of(models[0], each, {"reference": models[1]}).losses for each in (batch, other))
    np.testing.assert_allclose(one, same, rtol=1e-5)
    prompts = {**batch, "tokens": batch["tokens"].copy()}
    prompts["tokens"][:, :, : PROMPT - 1] = 9
    assert not np.allclose(one, loss_of(models[0], prompts, {"reference": models[1]}).losses, rtol=1e-5)


def direct_step(made, params, reference, rows, config):
    """The mean loss of the pairs of a batch and its gradient, pair by pair."""

    def loss(params):
        total = 0.0
        for pair in rows:
            sums = []
            for model in (made.model.merge(params), reference):
                log_p = jax.nn.log_softmax(model(jnp.asarray(pair["tokens"][:, :-1])))
                of_targets = jnp.take_along_axis(log_p, jnp.asarray(pair["tokens"][:, 1:, None]), -1)[..., 0]
                sums.append(jnp.sum(of_targets * pair["token_weight"][:, 1:], -1))
            h = sums[0] - sums[1]
            total -= jax.nn.log_sigmoid(config.beta * (h[0] - h[1]))
        return total / len(rows)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.slow("compiles several steps")
def test_a_step_is_that_of_one_big_batch_at_any_accumulation(tmp_path, events, accumulation_steps):
    """20 rows in micro-batches of 20 and 5, for 4 replicas: padded to 20 and 8."""
    made = trainer(tmp_path, accumulation_steps=accumulation_steps, preference={"beta": 0.5}, max_num_steps=1)
    made.train()
    first = [made.dataset_train[index] for index in range(20)]
    params = jax.tree.map(jnp.asarray, jax.device_get(made.frozen["reference"]))  # the policy begins with the same weights
    merged = made.model.merge(params)
    loss, gradient = direct_step(made, params, merged, first, made.arguments.preference)
    assert published(events)[0]["loss"] == pytest.approx(float(loss), rel=1e-5) == pytest.approx(np.log(2), rel=1e-5)
    metrics = published(events)[0]
    assert metrics["tokens"] == sum(pair["token_weight"].sum() for pair in first)
    assert "perplexity" not in metrics
    after = jax.device_get(made.output.state.params)
    jax.tree.map(
        lambda new, old, grad: np.testing.assert_allclose(old - new, 0.1 * grad, rtol=2e-3, atol=2e-6), after, params, gradient
    )


@pytest.mark.slow("compiles several steps")
def test_the_base_of_lora_is_a_reference_like_a_second_model(tmp_path, events):
    lora = {"lora": {"rank": 2, "alpha": 8}, "optimizer": {**SETTINGS["optimizer"], "learning_rate": 1.0}}
    runs = {}
    for kind, frozen in (("base", {}), ("frozen", {"reference": LLAMA})):
        events.clear()
        made = trainer(tmp_path / kind, preference={"reference": kind}, frozen=frozen, **lora)
        made.train()
        runs[kind] = [metrics["loss"] for metrics in published(events)]
        assert set(made.frozen) == {"base", *frozen}
    np.testing.assert_allclose(runs["base"], runs["frozen"], rtol=1e-5)
    assert len(set(runs["base"])) == 3


@pytest.mark.slow("compiles several steps")
def test_log_probabilities_in_columns_are_a_reference_too(tmp_path, events):
    made = trainer(tmp_path, preference={"reference": "columns", "loss": "ipo", "beta": 1.0}, frozen={}, max_num_steps=1)
    made.train()
    assert made.frozen == {}
    pairs = [made.dataset_train[index] for index in range(20)]
    assert published(events)[0]["loss"] == pytest.approx(expected_of_columns(tmp_path / "again", pairs), rel=1e-4)


def expected_of_columns(storage, pairs):
    """With the weights of the folder, which are what the policy begins with."""
    made = trainer(storage)
    made.prepare()
    model = made.model.merge(jax.device_get(made.frozen["reference"]))
    losses = []
    for pair in pairs:
        means = []
        for side in (0, 1):
            log_probability, count = log_p(model, pair["tokens"][side], pair["token_weight"][side])
            means.append((log_probability - pair["ref_logps"][side]) / count)
        losses.append((means[0] - means[1] - 0.5) ** 2)
    return np.mean(losses)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"preference": {}}, "preference.loss = 'dpo' compares the model with a reference: name its weights in frozen.reference"),
        ({"preference": {"reference": "base"}}, "preference.reference = 'base': only a run with lora has one"),
        ({"frozen": {"reference": "x"}}, "frozen.reference: the loss simpo needs none; leave it out"),
        (
            {"preference": {"reference": "columns"}, "frozen": {"reference": "x"}},
            "frozen.reference: the reference is columns; leave it out",
        ),
        ({"loss": {"z_loss_weight": 0.1}}, r"loss.z_loss_weight = 0\.1: PreferenceTask has a loss of its own"),
    ],
)
def test_settings_that_do_not_fit_together_are_errors(changes, error):
    with pytest.raises(UsageError, match=error):
        task_of(**changes)


def test_a_token_costs_the_pass_of_the_reference_too():
    task, plain = task_of(preference={}, frozen={"reference": "x"}), task_of()
    assert task.flops_per_token(10**6) == pytest.approx(4 / 3 * plain.flops_per_token(10**6))
    assert (task.tokens_per_example, task.context_length) == (16, 8)
