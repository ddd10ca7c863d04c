"""Distillation: the divergence from the teacher against its definition in float64, and in parts of the time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests import ROOT
from tests.programs.small_tokens import datasets
from tests.unit.training import arguments, of
from trainers.base import BaseTrainer
from trainers.config import DistillationConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.models.decoder import Hidden
from trainers.step import rng
from trainers.tasks import distillation
from trainers.tasks.distillation import DistillationTask, distances, divergences

LLAMA = str(ROOT / "tests" / "unit" / "data" / "parity" / "llama3")
RUN = {
    "task": "trainers.tasks.distillation:DistillationTask",
    "model": {"pretrained": LLAMA},
    "previews": {"prompts": []},
    "data": {"sequence_length": 8, "dataset": "tests.programs.small_tokens:datasets"},
}
MODEL = {"vocab_size": 64, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 16}


def task_of(**changes):
    settings = {"name": "t", "max_num_steps": 1, "model": MODEL, "data": {"sequence_length": 8}, "frozen": {"teacher": "x"}}
    return DistillationTask(from_dict(TrainingArguments, {**settings, **changes}))


def logits_of(seed, rows=5, vocab=12):
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab))


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 3, 99])
def test_the_divergence_is_that_of_the_definition(temperature, top_k):
    student, teacher = logits_of(1), logits_of(2)
    config = DistillationConfig(temperature=temperature, top_k=top_k)
    found = divergences(jnp.asarray(student, jnp.float32), jnp.asarray(teacher, jnp.float32), config)
    p, q = softmax(student / temperature), softmax(teacher / temperature)
    if top_k == 3:
        q = np.where(q >= np.sort(q, -1)[:, -3:-2], q, 0)
        q = q / q.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(q > 0, q * np.log(q / p), 0)
    np.testing.assert_allclose(found, temperature**2 * terms.sum(-1), rtol=1e-4)


@pytest.mark.slow("compiles two losses")
def test_in_parts_of_the_time_it_is_the_same_and_so_are_the_gradients():
    numbers = [
        jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(2, 7, 6), (6, 12), (2, 7, 4), (4, 12)])
    ]

    def total(max_logits, x, table):
        found = distances(Hidden(x, table), Hidden(*numbers[2:]), DistillationConfig(top_k=5), max_logits)
        return jnp.sum(found.divergences * jnp.arange(14.0).reshape(2, 7)) + 0 * jnp.sum(found.agreement), found

    results = [jax.jit(jax.value_and_grad(total, (1, 2), has_aux=True), static_argnums=0)(n, *numbers[:2]) for n in (10**6, 1)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *results)
    (_, found), _ = results[0]
    logits = [np.asarray(x @ table) for x, table in (numbers[:2], numbers[2:])]
    np.testing.assert_array_equal(found.agreement, logits[0].argmax(-1) == logits[1].argmax(-1))


@pytest.fixture(scope="module")
def models():
    task = task_of()
    return [nnx.jit(lambda seed: task.build_model(nnx.Rngs(rng.key(seed, "init", 0))), static_argnums=0)(i) for i in (0, 1)]


def test_the_loss_is_a_sum_over_the_targets(models):
    task, (student, teacher) = task_of(), models
    tokens = np.random.default_rng(3).integers(0, 64, (3, 9)).astype(np.int32)
    weight = np.ones((3, 9), np.float32)
    weight[1, 4:] = 0
    batch = {"tokens": tokens, "weight": np.array([1, 1, 0], np.float32), "token_weight": weight}
    loss = jax.jit(task.loss)(student, batch, {"teacher": teacher})
    logits = [np.asarray(jax.jit(lambda m, t: m(t))(model, tokens[:, :-1]), np.float64) for model in models]
    p, q = softmax(logits[0]), softmax(logits[1])
    divergence = (q * np.log(q / p)).sum(-1) * weight[:, 1:] * batch["weight"][:, None]
    assert float(loss.num_targets) == 8 + 3
    assert float(loss.loss_sum) == pytest.approx(divergence.sum(), rel=1e-3)
    np.testing.assert_allclose(loss.rows[0], divergence.sum(-1), rtol=1e-3, atol=1e-7)
    same = jax.jit(task.loss)(teacher, batch, {"teacher": teacher})
    assert float(same.loss_sum) == pytest.approx(0, abs=1e-5)
    assert float(same.parts["agreement"][0]) == 11


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"frozen": {}}, "frozen.teacher is missing: name the weights to learn from"),
        ({"loss": {"label_smoothing": 0.1}}, r"loss\.label_smoothing = 0\.1: DistillationTask has a loss of its own"),
    ],
)
def test_settings_that_do_not_fit_are_errors(changes, error):
    with pytest.raises(UsageError, match=error):
        task_of(**changes)


def test_packed_documents_have_the_loss_of_separate_rows(models):
    task, (student, teacher) = task_of(), models
    tokens = np.random.default_rng(4).integers(0, 64, (2, 5)).astype(np.int32)
    apart = {"tokens": np.pad(tokens, ((0, 0), (0, 4))), "weight": np.ones(2, np.float32)}
    apart["token_weight"] = np.pad(np.ones((2, 5), np.float32), ((0, 0), (0, 4)))
    packed = {
        "tokens": tokens.reshape(1, 10)[:, :9],
        "weight": np.ones(1, np.float32),
        "segments": np.array([[1] * 5 + [2] * 4], np.int32),
        "positions": np.array([[*range(5), *range(4)]], np.int32),
    }
    apart["token_weight"][1, 4] = 0  # the last token of the second one has no room in the packed row
    one, same = (jax.jit(task.loss)(student, batch, {"teacher": teacher}) for batch in (apart, packed))
    assert float(one.num_targets) == float(same.num_targets) == 7
    assert float(one.loss_sum) == pytest.approx(float(same.loss_sum), rel=1e-4)


def test_a_teacher_with_another_vocabulary_is_an_error():
    hidden = [Hidden(jnp.zeros((1, 2, 3)), jnp.zeros((3, size))) for size in (8, 9)]
    with pytest.raises(UsageError, match="a vocabulary of 9 tokens, and the model one of 8: expected the same one"):
        distances(*hidden, DistillationConfig())
    for settings, error in (({"temperature": 0.0}, "temperature = 0"), ({"top_k": 0}, "top_k = 0")):
        with pytest.raises(ValueError, match=error):
            DistillationConfig(**settings)


@pytest.mark.slow("compiles several steps")
def test_a_run_learns_from_its_teacher_in_parts_on_any_devices(tmp_path, events, monkeypatch):
    monkeypatch.setattr(distillation, "MAX_LOGITS", 64)
    changes = {
        **RUN,
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "frozen": {"teacher": LLAMA},
        "distillation": {"temperature": 2.0, "top_k": 8},
        "max_num_steps": 1,
    }
    made = arguments(tmp_path, **changes)
    trainer = BaseTrainer(made, datasets(made)[0])
    trainer.train()
    (metrics,) = (event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"])
    # The student begins as its teacher: all that is left is what the teacher gives to other tokens than its likeliest.
    tokens = np.stack([trainer.dataset_train[index]["tokens"] for index in range(16)])
    frozen = jax.tree.map(jnp.asarray, jax.device_get(trainer.frozen["teacher"]))
    logits = np.asarray(jax.jit(trainer.model.merge(frozen).__call__)(tokens[:, :-1]), np.float64) / 2
    kept = np.sort(softmax(logits), -1)[..., -8:].sum(-1)
    assert metrics["loss"] == pytest.approx(-4 * np.log(kept).mean(), rel=1e-4)
    assert metrics["agreement"] == 1
    assert "perplexity" not in metrics
