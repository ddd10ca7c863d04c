"""A mixture of experts: what it computes, on one device and on meshes; the router's losses and the load."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.unit.training import trainer
from trainers.config import LossConfig, MeshConfig, ModelConfig
from trainers.models import experts
from trainers.models.decoder import Decoder
from trainers.models.experts import RouterSums, load, load_balancing_loss, mixture, router_losses, router_z_loss
from trainers.parallel import mesh as meshes

CONFIG = ModelConfig(
    family="mixtral", width=8, mlp_width=12, num_heads=2, num_kv_heads=1, num_layers=2, num_experts=4, experts_per_token=2
)
UNNORMALIZED = {"family": "qwen3_moe", "normalize_routing": False}
D, F, E = CONFIG.width, CONFIG.mlp_width, CONFIG.num_experts
TOKENS = 16


def drawn(seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    shapes = {"router": (D, E), "expert_gate": (E, D, F), "expert_up": (E, D, F), "expert_down": (E, F, D)}
    weights = {name: rng.standard_normal(shape, np.float32) / 2 for name, shape in shapes.items()}
    return rng.standard_normal((tokens, D), np.float32), weights


def test_the_parameters_have_the_sizes_of_the_settings_and_the_axis_of_the_experts():
    state = nnx.state(nnx.eval_shape(lambda: Decoder(dataclasses.replace(CONFIG, num_experts=6), rngs=nnx.Rngs(0))).layers)
    found = {name: (leaf.shape, leaf.get_metadata("logical_axes")) for name, leaf in state.items()}
    assert {name for name in found if "gate" in name or "up" in name or "down" in name} == {
        "expert_gate",
        "expert_up",
        "expert_down",
    }
    assert found["router"] == ((2, D, 6), ("layers", "embed", None))
    assert found["expert_up"] == found["expert_gate"] == ((2, 6, D, F), ("layers", "experts", "embed", "mlp"))
    assert found["expert_down"] == ((2, 6, F, D), ("layers", "experts", "mlp", "embed"))


def by_hand(config, x, weights):
    """Token by token, in float64."""
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    out = np.zeros_like(x, np.float64)
    for n, token in enumerate(x.astype(np.float64)):
        p = np.exp(token @ weights["router"])
        p /= p.sum()
        best = np.argsort(-p)[: config.experts_per_token]
        shares = p[best] / p[best].sum() if config.normalize_routing else p[best]
        for share, expert in zip(shares, best, strict=True):
            gate, up = token @ weights["expert_gate"][expert], token @ weights["expert_up"][expert]
            out[n] += share * ((gate / (1 + np.exp(-gate)) * up) @ weights["expert_down"][expert])
    return out


@pytest.mark.parametrize("changes", [{}, UNNORMALIZED, {"experts_per_token": 1}, {"experts_per_token": 4}])
def test_each_token_gets_the_sum_of_its_experts_by_their_shares(changes):
    config, (x, weights) = dataclasses.replace(CONFIG, **changes), drawn()
    found, sums = mixed(x, weights, config=config)
    assert sums is None
    np.testing.assert_allclose(found, by_hand(config, x, weights), rtol=1e-4, atol=1e-4)


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@partial(jax.jit, static_argnames="config")
def mixed(x, weights, counted=None, config=CONFIG):
    return mixture(config, x, weights, counted, jax.nn.silu)


def objective(config, x, weights, counted):
    out, sums = mixture(config, x, weights, counted, jax.nn.silu)
    return jnp.sum(jnp.sin(out)) + load_balancing_loss(sums) + router_z_loss(sums), (out, sums)


def value_and_gradients(config=CONFIG, mesh=None):
    def function(x, weights, counted):
        return jax.value_and_grad(lambda x, weights: objective(config, x, weights, counted), (0, 1), has_aux=True)(x, weights)

    return jax.jit(function if mesh is None else meshes.tracing_for(mesh, function))


def test_nothing_is_added_by_index_forward_or_backward():
    """GPUs add by index in no fixed order: a run would not be repeatable bit for bit."""
    x, weights = drawn()
    program = str(jax.make_jaxpr(value_and_gradients())(x, weights, np.ones(TOKENS, np.float32)))
    assert "ragged_dot" in program
    assert "scatter" not in program


@pytest.mark.slow("compiles a model in several forms")
@pytest.mark.parametrize(
    ("sizes", "tokens", "changes"),
    [
        ({"data": 2, "expert": 4}, 16, {}),
        ({"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}, 16, UNNORMALIZED),
        ({"data": 4, "expert": 2}, 6, {}),  # tokens that the replicas cannot share: each device has all of them
        ({"data": 2, "expert": 2, "tensor": 2}, 6, {"mlp_width": 5}),  # an inner width that tensor does not divide
        ({"data": 8}, 16, {}),
    ],
)
def test_on_a_mesh_it_is_the_same(sizes, tokens, changes):
    config, (x, weights) = dataclasses.replace(CONFIG, **changes), drawn(1, tokens)
    inner = {"expert_gate": (..., slice(config.mlp_width)), "expert_up": (..., slice(config.mlp_width))}
    weights = {name: value[inner.get(name, ...)] for name, value in weights.items()}
    weights["expert_down"] = weights["expert_down"][:, : config.mlp_width]
    counted = np.linspace(0, 1, tokens, dtype=np.float32)
    expected = value_and_gradients(config)(x, weights, counted)
    found = value_and_gradients(config, meshes.make_mesh(MeshConfig(**sizes)))(x, weights, counted)
    jax.tree.map(assert_near, found, expected)


@jax.custom_vjp
def careless(rows, matrices, sizes):
    """As a kernel may do, it leaves anything in the places beyond its groups, and so does its gradient."""
    return beyond_groups(jax.lax.ragged_dot(rows, matrices, sizes), sizes)


def beyond_groups(rows, sizes):
    return jnp.where((jnp.arange(len(rows)) < jnp.sum(sizes))[:, None], rows, jnp.nan)


def careless_forward(rows, matrices, sizes):
    return careless(rows, matrices, sizes), (rows, matrices, sizes)


def careless_backward(kept, gradient):
    rows, matrices, sizes = kept
    within = jnp.where(jnp.isnan(gradient), 0.0, gradient)
    _, transposed = jax.vjp(lambda rows, matrices: jax.lax.ragged_dot(rows, matrices, sizes), rows, matrices)
    of_rows, of_matrices = transposed(within)
    return beyond_groups(of_rows, sizes), of_matrices, None


careless.defvjp(careless_forward, careless_backward)


@pytest.mark.parametrize("tokens", [16, 6])
def test_what_a_product_leaves_in_the_places_of_other_devices_experts_counts_for_nothing(tokens):
    x, weights = drawn(3, tokens)
    counted = np.ones(tokens, np.float32)
    config = dataclasses.replace(CONFIG, grouped_product=f"{__name__}:careless")
    found = value_and_gradients(config, meshes.make_mesh(MeshConfig(data=4, expert=2)))(x, weights, counted)
    jax.tree.map(assert_near, found, value_and_gradients()(x, weights, counted))


TRACED = []


def noted(rows, matrices, sizes):
    TRACED.append((rows.shape[0], matrices.shape[0]))
    return jax.lax.ragged_dot(rows, matrices, sizes)


@pytest.mark.slow("compiles a model several times")
def test_training_evaluations_and_previews_divide_the_experts(tmp_path, events):
    model = {"family": "mixtral", "width": 8, "mlp_width": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    made = trainer(
        tmp_path,
        task="trainers.tasks.causal_lm:CausalLMTask",
        model={**model, "num_experts": 4, "experts_per_token": 2, "grouped_product": f"{__name__}:noted"},
        mesh={"data": 4, "expert": 2},
        max_num_steps=1,
        checkpoint={"save_at_end": False},
        evaluation={"batch_size": 24},
        previews={"prompts": ["abc"], "num_tokens": 1, "greedy": True},
    )
    TRACED.clear()
    made.train()
    # Rows of two devices: 2 x 2 examples of 8 tokens, or 2 x 3; a preview of 3 tokens in 2 of 8 rows; two experts for each token.
    assert {rows: number for rows, number in TRACED if number == 2} == {64: 2, 96: 2, 12: 2, 4: 2}


def test_each_device_of_the_axis_computes_its_own_experts_alone():
    x, weights = drawn()
    mesh = meshes.make_mesh(MeshConfig(data=2, expert=4))
    program = str(jax.make_jaxpr(value_and_gradients(CONFIG, mesh))(x, weights, np.ones(TOKENS, np.float32)))
    products = [line for line in program.splitlines() if "ragged_dot" in line and ":f32" in line]
    assert "all_gather" in program
    assert "reduce_scatter" in program
    assert products
    assert all(f"f32[{E}," not in line for line in products)


def test_tokens_that_do_not_count_are_in_no_sum_whatever_they_hold():
    x, weights = drawn()
    counted = np.array([1, 0.5, 0, 0] * 4, np.float32)
    kept = counted > 0
    alone = mixed(x[kept], weights, counted[kept])[1]
    x[~kept] = np.nan
    padded = mixed(x, weights, counted)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), padded, alone)
    assert (float(padded.weight), padded.tokens_E.sum()) == (6, 12)  # two experts for each


def sums_of(tokens, probabilities, log_z_squared=(8.0, 4.0), weight=(4.0, 4.0)):
    return RouterSums(*(np.asarray(each, np.float32) for each in (tokens, probabilities, log_z_squared, weight)))


def test_the_losses_of_the_router_are_those_of_the_papers():
    weighted = jax.jit(lambda sums: router_losses(sums, LossConfig(load_balancing_weight=0.5, router_z_loss_weight=0.1)).losses)
    even = sums_of([[2, 2, 2, 2]] * 2, [[1, 1, 1, 1]] * 2)
    # Two experts for each token.
    assert jax.tree.map(float, weighted(even)) == pytest.approx({"load_balancing_loss": 0.5 * 2, "router_z_loss": 0.1 * 12 / 8})
    skewed = sums_of([[4, 4, 0, 0], [4, 2, 2, 0]], [[3, 1, 0, 0], [2, 1, 1, 0]])
    f, p = np.array([8, 6, 2, 0]) / 8, np.array([5, 2, 1, 0]) / 8
    assert float(weighted(skewed)["load_balancing_loss"]) == pytest.approx(0.5 * 4 * (f * p).sum())
    assert set(map(float, weighted(jax.tree.map(np.zeros_like, even)).values())) == {0.0}
    assert jax.eval_shape(lambda sums: router_losses(sums, LossConfig()).losses, even) == {}


def test_the_load_says_how_even_it_is():
    jitted = jax.jit(load)
    one_of_two = jax.tree.map(float, jitted(sums_of([[2, 2, 2, 2], [8, 0, 0, 0]], np.ones((2, 4)))))
    assert one_of_two == pytest.approx({"busiest_expert": 1.0, "router_entropy": 0.5})
    skewed = jax.tree.map(float, jitted(sums_of([[4, 4, 0, 0]] * 2, np.ones((2, 4)))))
    assert skewed == pytest.approx({"busiest_expert": 0.5, "router_entropy": math.log(2) / math.log(4)})


def test_the_router_is_float32_whatever_the_computation_is():
    """Two experts whose scores differ by less than bfloat16 can tell."""
    weights = jax.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)._layer_weights())
    assert {name for name, weight in weights.items() if weight.dtype == jnp.float32} == {"router"}
    router = jnp.zeros((D, E)).at[0].set(jnp.array([1.0, 0.0, 1.001, 1.002]))
    index, _, _ = jax.jit(lambda x: experts.route(CONFIG, x, router, None))(jnp.ones((1, D), jnp.bfloat16))
    assert index.tolist() == [[3, 2]]


@pytest.mark.slow("compiles a model several times")
def test_recomputed_activations_change_no_number():
    tokens = np.random.default_rng(2).integers(0, 256, (2, 6), np.int32)

    def gradients(remat):
        config = dataclasses.replace(CONFIG, remat=remat, num_layers=1)
        graph, params = nnx.split(nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))())

        @jax.jit
        def run(params):
            def loss(params):
                hidden = nnx.merge(graph, params).hidden(tokens, counted_BT=jnp.ones(tokens.shape))
                return jnp.sum(jnp.sin(hidden.x_BTD)) + load_balancing_loss(hidden.router)

            return jax.grad(loss)(params)

        return run(params)

    both = gradients("none"), gradients("full")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *both)


def doubled(rows, matrices, sizes):
    return 2 * jax.lax.ragged_dot(rows, matrices, sizes)


def test_the_product_may_be_a_function_of_ones_own():
    x, weights = drawn()
    config = dataclasses.replace(CONFIG, grouped_product=f"{__name__}:doubled")
    twice = {name: value * (1 if name == "router" else 2) for name, value in weights.items()}
    found, expected = mixed(x, weights, config=config)[0], mixed(x, twice)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
