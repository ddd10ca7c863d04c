"""The model: causality, grouped queries, rotary positions, the scan, first values, logical axes."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainers.config import ModelConfig
from trainers.config.families import FAMILIES
from trainers.config.model import UNROLLED_LAYERS, RopeScaling
from trainers.models.decoder import Decoder, rotary_angles, rotate

CONFIG = ModelConfig(vocab_size=50, width=32, num_layers=3, num_heads=4, num_kv_heads=2, mlp_width=48)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 10), np.int32)


@partial(nnx.jit, static_argnames=("config", "dtype", "param_dtype"))
def build(config=CONFIG, dtype=jnp.float32, param_dtype=jnp.float32):
    return Decoder(config, rngs=nnx.Rngs(jax.random.key(0)), dtype=dtype, param_dtype=param_dtype)


def weights(model):
    return nnx.to_pure_dict(nnx.state(model))


@jax.jit
def logits(model, tokens, positions=None):
    return model(tokens, positions)


def test_a_later_token_changes_nothing_earlier():
    model = build()
    for place in (1, 6, 9):
        changed = TOKENS.copy()
        changed[:, place] = (changed[:, place] + 1) % CONFIG.vocab_size
        before, after = np.asarray(logits(model, TOKENS)), np.asarray(logits(model, changed))
        np.testing.assert_array_equal(before[:, :place], after[:, :place])
        assert np.all(np.abs(before[:, place] - after[:, place]).max(-1) > 1e-3)


def test_grouped_queries_are_many_heads_with_repeated_keys_and_values():
    grouped, full = build(), build(dataclasses.replace(CONFIG, num_kv_heads=CONFIG.num_heads))
    params = weights(grouped)
    channels = CONFIG.width // CONFIG.num_heads
    for name in ("key", "value"):
        by_head = np.asarray(params["layers"][name]).reshape(CONFIG.num_layers, CONFIG.width, CONFIG.num_kv_heads, channels)
        params["layers"][name] = np.repeat(by_head, 2, axis=2).reshape(CONFIG.num_layers, CONFIG.width, CONFIG.width)
    nnx.update(full, params)
    np.testing.assert_allclose(logits(grouped, TOKENS), logits(full, TOKENS), atol=1e-5)


def test_only_the_distance_between_positions_matters():
    model = build()
    positions = np.broadcast_to(np.arange(10), TOKENS.shape)
    plain, same, moved, stretched = (
        np.asarray(logits(model, TOKENS, p)) for p in (None, positions, positions + 37, positions * 2)
    )
    np.testing.assert_allclose(plain, same, atol=1e-6)
    np.testing.assert_allclose(plain, moved, atol=1e-4)
    assert np.abs(plain - stretched).max() > 1e-3


def test_rotation_is_that_of_complex_numbers():
    x = np.random.default_rng(2).standard_normal((1, 5, 2, 8), np.float32)
    positions = np.array([[0, 1, 2, 30, 400]])
    turned = jax.jit(lambda x: rotate(x, rotary_angles(positions, 8, 100.0)))(x)
    pairs = x[..., :4] + 1j * x[..., 4:]
    angles = positions[0][:, None] * 100.0 ** (-2 * np.arange(4) / 8)
    expected = pairs * np.exp(1j * angles)[None, :, None, :]
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), atol=1e-4)


def by_hand(config, params, tokens):
    """The same model with loops over layers and heads, in float64, without JAX."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    channels = config.width // config.num_heads
    angles = np.outer(np.arange(len(tokens)), config.rope_theta ** (-np.arange(0, channels, 2) / channels))
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale

    def turn(x):
        a, b = x[:, : channels // 2], x[:, channels // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def head(x, layer, number):
        kv = number // (config.num_heads // config.num_kv_heads)
        query = turn(x @ layer["query"][:, number * channels : (number + 1) * channels])
        key = turn(x @ layer["key"][:, kv * channels : (kv + 1) * channels])
        scores = np.where(np.tri(len(tokens), dtype=bool), query @ key.T / np.sqrt(channels), -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        return weight / weight.sum(-1, keepdims=True) @ (x @ layer["value"][:, kv * channels : (kv + 1) * channels])

    x = p["embed"][np.asarray(tokens)]
    for index in range(config.num_layers):
        layer = {name: stack[index] for name, stack in p["layers"].items()}
        normed = norm(x, layer["attention_norm"])
        x = x + np.concatenate([head(normed, layer, number) for number in range(config.num_heads)], -1) @ layer["out"]
        normed = norm(x, layer["mlp_norm"])
        gate = normed @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["up"])) @ layer["down"]
    return norm(x, p["final_norm"]) @ p.get("unembed", p["embed"].T)


@pytest.mark.parametrize(("tied", "num_layers"), [(True, 2), (False, UNROLLED_LAYERS + 1)])
@pytest.mark.slow("compiles a model several times")
def test_the_model_is_the_one_written_out_with_loops(tied, num_layers):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, num_layers=num_layers)
    model = build(config)
    noise = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.1 * noise.standard_normal(leaf.shape, np.float32), weights(model))
    nnx.update(model, params)
    out = np.asarray(logits(model, TOKENS))
    for row, tokens in enumerate(TOKENS):
        np.testing.assert_allclose(out[row], by_hand(config, params, tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("platform", "num_layers", "remat", "unrolled"),
    [
        ("cpu", UNROLLED_LAYERS, "none", True),
        ("cpu", UNROLLED_LAYERS + 1, "none", False),
        ("cpu", UNROLLED_LAYERS, "full", False),
        ("gpu", 2, "none", False),
        ("tpu", 2, "none", False),
    ],
)
def test_layers_are_unrolled_by_platform_depth_and_checkpointing(platform, num_layers, remat, unrolled):
    assert dataclasses.replace(CONFIG, num_layers=num_layers, remat=remat).unrolled(platform) == unrolled


@pytest.mark.parametrize(("num_layers", "loops"), [(2, 0), (UNROLLED_LAYERS + 1, 1)])
def test_the_program_has_the_layers_one_by_one_or_as_a_loop(num_layers, loops):
    model = build(dataclasses.replace(CONFIG, num_layers=num_layers))
    program = logits.lower(model, jnp.asarray(TOKENS)).as_text()
    assert program.count("stablehlo.while") == loops


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_layers", [1, 12])
def test_a_new_model_expects_every_token_alike_whatever_its_depth(num_layers):
    out = np.asarray(logits(build(ModelConfig(width=64, num_layers=num_layers)), TOKENS))
    assert out.dtype == np.float32
    assert np.log(np.exp(out).sum(-1)).mean() - out.mean() == pytest.approx(np.log(256), abs=0.1)
    assert out.std() < 0.3


def test_computation_and_parameters_have_the_types_asked_for():
    model = build(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights(model))} == {jnp.dtype(jnp.bfloat16)}
    half = logits(model, TOKENS)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, logits(build(), TOKENS), atol=0.05)


def test_every_parameter_names_its_dimensions():
    state = nnx.eval_shape(lambda: nnx.state(build(dataclasses.replace(CONFIG, tie_embeddings=False)), nnx.Param))
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    assert len(leaves) == 12
    for leaf in leaves:
        assert len(leaf.get_metadata()["logical_axes"]) == leaf.ndim, leaf


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("llama", "rope_theta", 100.0),
        ("llama", "norm_eps", 0.1),
        ("mistral", "window", 3),
        ("gemma2", "query_scalar", 2.0),
        ("gemma2", "attention_softcap", 0.2),
        ("gemma2", "logit_softcap", 0.1),
        ("smollm3", "unturned_every", 2),
        ("granite", "embedding_multiplier", 3.0),
        ("granite", "residual_multiplier", 0.2),
        ("granite", "logit_divisor", 4.0),
        ("llama", "rope_scaling", RopeScaling(kind="linear", factor=4.0)),
    ],
)
def test_a_setting_without_parameters_changes_the_logits(family, setting, value):
    config = dataclasses.replace(CONFIG, family=family)
    usual, other = build(config), build(config=dataclasses.replace(config, **{setting: value}))
    np.testing.assert_array_equal(weights(usual)["embed"], weights(other)["embed"])
    assert np.abs(logits(usual, TOKENS) - logits(other, TOKENS)).max() > 1e-3


@pytest.mark.parametrize(("setting", "names"), [("attention_bias", "query key value out"), ("mlp_bias", "gate up down")])
def test_a_setting_of_biases_adds_them(setting, names):
    found = set(weights(build(dataclasses.replace(CONFIG, **{setting: True})))["layers"])
    assert found - set(weights(build())["layers"]) == {f"{name}_bias" for name in names.split()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("setting", "value"), [("global_every", 2), ("local_rope_theta", 10.0)])
def test_a_setting_of_layers_with_a_window_changes_the_logits(setting, value):
    usual = dataclasses.replace(CONFIG, family="gemma3", window=3)
    other = dataclasses.replace(usual, **{setting: value})
    assert np.abs(logits(build(usual), TOKENS) - logits(build(other), TOKENS)).max() > 1e-3


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("kind", "linear"), ("factor", 2.0), ("low_freq_factor", 2.0), ("high_freq_factor", 8.0), ("original_length", 64)],
        *[("beta_fast", 2.0), ("beta_slow", 0.1), ("truncate", False), ("attention_factor", 2.0)],
    ],
)
def test_a_setting_of_the_scaled_positions_changes_the_angles(setting, value):
    kind = "yarn" if setting in ("beta_fast", "beta_slow", "truncate", "attention_factor") else "llama3"
    usual = RopeScaling(kind=kind, original_length=100 if kind == "yarn" else 16)

    def angles(scaling):
        return np.stack(rotary_angles(jnp.arange(20)[None], 16, 100.0, scaling))

    other = RopeScaling(kind=value) if setting == "kind" else dataclasses.replace(usual, **{setting: value})
    assert np.abs(angles(usual) - angles(other)).max() > 1e-3


@pytest.mark.slow("compiles a model several times")
def test_the_heads_may_have_other_channels_than_the_width_gives():
    found = weights(build(config=dataclasses.replace(CONFIG, head_dim=6)))
    shapes = {name: found["layers"][name].shape for name in ("query", "key", "out")}
    assert shapes == {"query": (3, 32, 24), "key": (3, 32, 12), "out": (3, 24, 32)}


def test_a_family_decides_the_structure_and_has_as_many_positions_as_the_settings_say():
    gpt2 = dataclasses.replace(CONFIG, family="gpt2", num_positions=12, num_kv_heads=CONFIG.num_heads)
    found = weights(build(gpt2))
    assert found["positions"].shape == (12, 32)
    assert "gate" not in found["layers"]
    assert set(weights(build(dataclasses.replace(CONFIG, family="qwen3")))["layers"]) - set(weights(build())["layers"]) == {
        "query_norm",
        "key_norm",
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_any_family_begins_undecided_and_has_named_dimensions(family):
    own = {"num_experts": 4, "experts_per_token": 2} if FAMILIES[family].experts else {}
    if family == "gpt2":
        own = {"num_positions": 12, "num_kv_heads": CONFIG.num_heads}
    config = dataclasses.replace(CONFIG, family=family, **own)
    model = build(config)
    assert np.asarray(logits(model, TOKENS)).std() < 0.3
    for leaf in jax.tree.leaves(nnx.state(model), is_leaf=lambda node: isinstance(node, nnx.Variable)):
        assert len(leaf.get_metadata()["logical_axes"]) == leaf.ndim, leaf


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "lama"}, r"family = 'lama': expected one of llama, .*; did you mean llama\?"),
        ({"family": "mixtral", "num_experts": 4}, "experts_per_token = null: the family mixtral has experts; set how many"),
        (
            {"num_experts": 4},
            r"num_experts = 4: the family llama has none such; leave it out, or choose a family that has it \(mixtral, qwen",
        ),
        (
            {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 5},
            r"experts_per_token = 5: expected at most num_experts \(4\)",
        ),
        (
            {"family": "mixtral", "num_experts": 4, "experts_per_token": 2, "grouped_product": "tokamax"},
            "grouped_product = 'tokamax': expected xla, or package.module:function",
        ),
        ({"family": "gpt2"}, "num_positions = null: the family gpt2 has learned positions; set how many"),
        ({"family": "gpt2", "num_positions": 4, "rope_scaling": RopeScaling()}, "rope_scaling: the family gpt2 has none such"),
        ({"family": "gpt2", "num_positions": 4}, r"num_kv_heads = 2: the family gpt2 has as many as num_heads \(4\)"),
        ({"family": "gpt2", "num_positions": 4, "head_dim": 6}, r"head_dim = 6: the family gpt2 has width / num_heads \(8\)"),
        ({"num_positions": 4}, r"num_positions = 4: the family llama has none such; .* \(gpt2\)"),
        (
            {"window": 3},
            r"window = 3: the family llama has none such; .* \(mistral, ministral, qwen2",
        ),
        ({"family": "mistral", "window": 3, "global_every": 2}, r"global_every = 2: the family mistral has none such"),
        ({"family": "qwen2", "window": 3, "local_rope_theta": 5.0}, r"local_rope_theta = 5\.0: the family qwen2 has none such"),
        ({"family": "qwen2", "window": 3, "global_every": 1}, "global_every = 1: then no layer has the window; leave out window"),
        ({"query_scalar": 8}, r"query_scalar = 8: the family llama has none such"),
        ({"family": "gemma2", "query_scalar": 8.5}, r"query_scalar = 8\.5: the family gemma2 has a whole number"),
        ({"family": "gemma3", "attention_softcap": 50.0}, r"attention_softcap = 50\.0: the family gemma3 has none such"),
        ({"normalize_routing": False}, r"normalize_routing = False: the family llama has none such"),
        (
            {"family": "gemma3", "window": 3, "rope_scaling": RopeScaling(kind="linear")},
            r"local_rope_theta = null: rope_scaling is that of the layers without a window .*; set local_rope_theta",
        ),
        (
            {"width": 36, "num_heads": 8, "head_dim": 8},
            r"width = 36: expected a multiple of num_heads \(8\), for transformers loads no other model of the family llama",
        ),
        *(
            ({"family": name}, rf"family = '{name}': expected one of [^;]*$")
            for name in ("ministral3", "phi2", "pixtral", "gemma3n", "qwen3_next", "llama4")
        ),
        ({"family": "Qwen-3"}, r"did you mean qwen3\?"),
        ({"family": "mitsral"}, r"did you mean mistral\?"),
        ({"global_every": 2}, "global_every = 2: it is about layers with a window; set window too"),
        ({"local_rope_theta": 1e4}, "local_rope_theta = 10000.0: it is about layers with a window"),
        ({"logit_softcap": 0.0}, "logit_softcap = 0.0: expected a positive number"),
        ({"window": 0}, "window = 0: expected at least 1"),
        ({"head_dim": 7}, "expected an even number of channels"),
    ],
)
def test_settings_that_make_no_model_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **settings)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_parameters_have_the_sizes_of_the_settings(tie_embeddings):
    config = ModelConfig(
        vocab_size=50, width=32, num_layers=3, num_heads=8, num_kv_heads=2, mlp_width=48, tie_embeddings=tie_embeddings
    )
    found = weights(build(config=config))
    assert found["embed"].shape == (50, 32)
    shapes = {name: found["layers"][name].shape for name in ("query", "key", "gate")}
    assert shapes == {"query": (3, 32, 32), "key": (3, 32, 8), "gate": (3, 32, 48)}  # two keys of four channels
    assert ("unembed" in found) is not tie_embeddings
