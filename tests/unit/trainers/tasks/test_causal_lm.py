"""The language-model task: what its loss counts, what it costs, what it generates."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from tests.unit.training import arguments
from trainers.base import BaseTrainer
from trainers.config import DataConfig, LossConfig, ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.protocol import Task
from trainers.step import rng
from trainers.tasks.causal_lm import CausalLMTask

LENGTH = 12


@pytest.fixture(scope="module")
def task():
    model = ModelConfig(width=32, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=48)
    return CausalLMTask(TrainingArguments(name="t", max_num_steps=1, model=model, data=DataConfig(sequence_length=LENGTH)))


@pytest.fixture(scope="module")
def model(task):
    @nnx.jit
    def build():
        made = task.build_model(nnx.Rngs(rng.key(0, "init", 0)))
        params = nnx.to_pure_dict(nnx.state(made))
        nnx.update(made, jax.tree.map(lambda leaf: leaf + 0.2 * jax.random.normal(jax.random.key(5), leaf.shape), params))
        return made

    return build()


def batch(rows, weight):
    tokens = np.random.default_rng(rows).integers(0, 256, (rows, LENGTH + 1), np.int32)
    return {"tokens": tokens, "weight": np.asarray(weight, np.float32)}


def test_the_loss_is_the_mean_of_minus_log_p_of_each_next_token(task, model):
    rows = batch(3, [1, 1, 1])
    loss = jax.jit(task.loss)(model, rows)
    logits = np.asarray(jax.jit(lambda m, tokens: m(tokens))(model, rows["tokens"][:, :-1]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = rows["tokens"][:, 1:]
    expected = -np.take_along_axis(log_p, targets[..., None], -1)
    assert isinstance(task, Task)
    assert float(loss.num_targets) == 3 * LENGTH
    assert float(loss.loss_sum) == pytest.approx(expected.sum(), rel=1e-5)
    hits, weight = loss.parts["accuracy"]
    assert float(hits) == (logits.argmax(-1) == targets).sum()
    assert float(weight) == 3 * LENGTH


@pytest.mark.slow("compiles several steps")
def test_padding_rows_count_for_nothing_and_get_no_gradient(task, model):
    rows = batch(4, [1, 0, 1, 0])
    real = {"tokens": rows["tokens"][::2], "weight": np.ones(2, np.float32)}
    graph, params = nnx.split(model)

    @jax.jit
    def loss_and_gradient(params, rows):
        loss = task.loss(nnx.merge(graph, params), rows)
        return loss, jax.grad(lambda p: task.loss(nnx.merge(graph, p), rows).loss_sum)(params)

    padded, alone = loss_and_gradient(params, rows), loss_and_gradient(params, real)
    padded = (padded[0]._replace(rows=tuple(per_row[::2] for per_row in padded[0].rows)), padded[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), padded, alone)
    assert float(padded[0].num_targets) == 2 * LENGTH


def with_loss(task, **settings):
    return CausalLMTask(dataclasses.replace(task.arguments, loss=LossConfig(**settings)))


def test_smoothed_labels_give_the_cross_entropy_with_the_smoothed_distribution(task, model):
    rows, share = batch(2, [1, 1]), 0.1
    loss = jax.jit(with_loss(task, label_smoothing=share).loss)(model, rows)
    logits = np.asarray(jax.jit(lambda m, tokens: m(tokens))(model, rows["tokens"][:, :-1]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.full(logits.shape, share / logits.shape[-1])
    np.put_along_axis(wanted, rows["tokens"][:, 1:, None], 1 - share + share / logits.shape[-1], -1)
    assert float(loss.loss_sum) == pytest.approx(-(wanted * log_p).sum(), rel=1e-5)
    assert float(loss.num_targets) == 2 * LENGTH


def test_ignored_tokens_are_no_targets_and_have_no_loss(task, model):
    rows = batch(2, [1, 1])
    rows["tokens"][0, 5:] = 7
    num_ignored = int((rows["tokens"][:, 1:] == 7).sum())
    loss = jax.jit(with_loss(task, ignore_index=7).loss)(model, rows)
    by_weight = jax.jit(task.loss)(model, {**rows, "token_weight": (rows["tokens"] != 7).astype(np.float32)})
    assert num_ignored >= LENGTH - 4
    assert float(loss.num_targets) == 2 * LENGTH - num_ignored
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), loss, by_weight)


def test_no_token_is_ignored_by_the_index_of_other_libraries(task, model):
    rows = batch(2, [1, 1])
    ours, theirs = (jax.jit(with_loss(task, ignore_index=index).loss)(model, rows) for index in (None, -100))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing = 1.0: expected 0 <= "),
        ({"ignore_index": -1}, "ignore_index = -1: expected an id of the vocabulary, .*; or -100"),
    ],
)
def test_settings_of_the_loss_are_checked(settings, error):
    with pytest.raises(ValueError, match=error):
        LossConfig(**settings)


def test_flops_of_a_token_are_those_of_its_matrix_products(task):
    # Per token, forward: 2 per weight of a matrix, and 2 products of the attended positions (half of T) with width D.
    width, mlp, layers = 32, 48, 2
    weights = layers * (2 * width * width + 2 * width * width // 2 + 3 * width * mlp) + 256 * width
    attention = layers * 2 * 2 * (LENGTH / 2) * width
    assert task.flops_per_token(weights) == 3 * (2 * weights + attention)
    assert task.tokens_per_example == LENGTH
    untied = dataclasses.replace(task.arguments, model=dataclasses.replace(task.arguments.model, tie_embeddings=False))
    assert CausalLMTask(untied).flops_per_token(weights + 256 * width) == task.flops_per_token(weights)


def mixture(task, **loss):
    about = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2}
    model = dataclasses.replace(task.arguments.model, **about)
    return CausalLMTask(dataclasses.replace(task.arguments, model=model, loss=LossConfig(**loss)))


def test_a_token_needs_no_flops_of_the_experts_that_it_does_not_go_to(task):
    """Two of four: those of an MLP of twice the width."""
    layer = 3 * 32 * 48 * 2
    wide = dataclasses.replace(task.arguments, model=dataclasses.replace(task.arguments.model, mlp_width=96))
    assert mixture(task).flops_per_token(10**6 + 4 * layer) == CausalLMTask(wide).flops_per_token(10**6 + 2 * layer)


@pytest.fixture(scope="module")
def mixture_losses(task):
    """The losses of these rows, with no weights and with weights for the router's."""
    tasks = {name: mixture(task, **weights) for name, weights in {"plain": {}, "weighted": ROUTER_WEIGHTS}.items()}
    model = nnx.jit(lambda: tasks["plain"].build_model(nnx.Rngs(rng.key(0, "init", 0))))()
    jitted = {name: jax.jit(task.loss) for name, task in tasks.items()}
    return lambda rows: {name: loss(model, rows) for name, loss in jitted.items()}


ROUTER_WEIGHTS = {"load_balancing_weight": 0.5, "router_z_loss_weight": 0.25}
OF_ROUTER = ("load_balancing_loss", "router_z_loss", "busiest_expert", "router_entropy")


@pytest.mark.slow("compiles several steps")
def test_the_losses_of_the_router_are_parts_of_the_loss_by_their_weights(task, mixture_losses):
    plain, weighted = mixture_losses(batch(3, [1, 1, 1])).values()
    assert set(plain.parts) == {"accuracy", "busiest_expert", "router_entropy"}
    assert set(weighted.parts) == {"accuracy", *OF_ROUTER}
    added = sum(float(weighted.parts[f"{name}"][0]) for name in OF_ROUTER[:2])
    assert added > 0.5 * 3 * LENGTH  # of an even load the first is 2, and no load is evener
    assert float(weighted.loss_sum) == pytest.approx(float(plain.loss_sum) + added, rel=1e-5)
    value, count = weighted.parts["busiest_expert"]
    assert 0.25 <= float(value / count) < 1


def test_padding_counts_for_nothing_in_the_losses_of_the_router(mixture_losses):
    """Rows that only fill up a batch, and tokens of weight 0."""
    rows = {**batch(4, [1, 0, 1, 0]), "token_weight": np.ones((4, LENGTH + 1), np.float32)}
    rows["token_weight"][2, 5:] = 0
    found = mixture_losses(rows)["weighted"]
    other = {**rows, "tokens": rows["tokens"].copy()}
    other["tokens"][1::2] = 7
    other["tokens"][2, 6:] = 9
    same = mixture_losses(other)["weighted"]
    assert float(found.num_targets) == LENGTH + 4
    for name in OF_ROUTER:
        assert [float(part) for part in found.parts[name]] == pytest.approx([float(part) for part in same.parts[name]]), name
        assert float(found.parts[name][1]) == LENGTH + 4
    assert float(found.loss_sum) == pytest.approx(float(same.loss_sum), rel=1e-5)


def test_a_token_is_a_byte(task):
    assert task.encode("aé") == [97, 0xC3, 0xA9]
    assert task.decode([97, 0xC3, 0xA9]) == "aé"
    assert task.decode([97, 0xC3, 300]) == "a\ufffd"  # half a character, and what no byte is


def test_tracing_the_loss_touches_no_device():
    """A standby traces before it joins its gang, and `jax.distributed` refuses a process that has looked for devices."""
    program = """if True:
        import jax, jax.numpy as jnp
        from flax import nnx
        from jax._src import xla_bridge
        from trainers.config.arguments import TrainingArguments
        from trainers.tasks.causal_lm import CausalLMTask

        task = CausalLMTask(TrainingArguments(name="x", max_num_steps=1))
        shapes = {"tokens": jax.ShapeDtypeStruct((4, 9), jnp.int32), "weight": jax.ShapeDtypeStruct((4,), jnp.float32)}
        model = nnx.eval_shape(lambda: task.build_model(nnx.Rngs(jax.random.key(0))))
        nnx.eval_shape(task.loss, model, shapes)
        assert not xla_bridge.backends_are_initialized()
    """
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(("found", "says"), [(12, "set data.sequence_length=11"), (8, "set data.sequence_length=7"), (9, None)])
def test_rows_of_ones_own_have_the_length_of_the_settings(tmp_path, found, says):
    """By it the FLOPs are counted."""
    small = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}
    made = arguments(tmp_path, task="trainers.tasks.causal_lm:CausalLMTask", model=small)
    rows = [{"tokens": np.zeros(found, np.int32)} for _ in range(32)]
    own = BaseTrainer(made, rows)
    if says is None:
        own.configure_model()
        return
    with pytest.raises(UsageError, match=f"the rows of the training data have {found} tokens, .*= 8 is for 9, .*{says}"):
        own.configure_model()
