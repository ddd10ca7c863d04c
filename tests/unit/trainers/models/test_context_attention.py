"""The attention of sequences that devices share is the one that is defined by its scores, in values and gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainers.config import MeshConfig, ModelConfig
from trainers.config.attention import Choice, choose_exchange
from trainers.models import attention_kernels, partial_attention
from trainers.models import context_attention as attention_of_devices
from trainers.models.attention import attend, causal_mask
from trainers.models.context_attention import context_attention
from trainers.models.decoder import Decoder
from trainers.models.partial_attention import Part, Score, Tokens
from trainers.parallel import mesh as meshes
from trainers.parallel import sequence

TIME, HEADS, KV_HEADS, CHANNELS, WINDOW, SOFTCAP = 48, 4, 2, 8, 11, 2.0
SEGMENTS = np.repeat(np.repeat([1, 2, 0], [20, 17, 11])[None], 2, 0).astype(np.int32)
SCALE = 0.5


def inputs(time=TIME, heads=HEADS, kv_heads=KV_HEADS, rows=2):
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw((rows, time, each, CHANNELS), np.float32)) for each in (heads, kv_heads, kv_heads)]


def with_gradients(attention, arrays):
    """Returns the attention, and the gradients of a function of it."""

    def objective(arrays):
        mixed = attention(*arrays)
        return jnp.sum(mixed * jnp.cos(jnp.arange(mixed.size).reshape(mixed.shape))), mixed

    (_, mixed), gradients = jax.value_and_grad(objective, has_aux=True)(arrays)
    return [mixed, *gradients]


def by_definition(query, key, value, *, segments, window, softcap):
    mask = causal_mask(segments, TIME)
    if window is not None:
        mask &= np.arange(TIME)[:, None] - np.arange(TIME) < window
    return attend(query, key, value, mask, scale=SCALE, softcap=softcap)


def assert_same(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


def over_devices(exchange, sizes, *, segments, window, softcap, time=TIME, chosen=slice(None)):
    """Returns the attention of whole sequences in the usual order, on a mesh; of the queries that are chosen."""
    number = int(np.prod(list(sizes.values())))
    mesh = meshes.make_mesh(MeshConfig(**sizes), jax.devices()[:number])
    parts = sizes["context"]
    order = sequence.slots(time, parts)
    back = np.argsort(order)

    def attention(query, key, value):
        balanced = (x[:, order] for x in (query, key, value))
        mixed = context_attention(
            exchange,
            *balanced,
            segments_BT=None if segments is None else jnp.asarray(segments)[:, order],
            reach=jnp.asarray(window or time),
            scale=SCALE,
            softcap=softcap,
        )
        return mixed[:, back[chosen]]

    return jax.jit(meshes.tracing_for(mesh, partial(with_gradients, attention)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_devices_that_share_a_sequence_compute_the_attention_of_it(exchange):
    settings = {"segments": SEGMENTS, "window": WINDOW, "softcap": SOFTCAP}
    expected = with_gradients(partial(by_definition, **settings), inputs())
    assert_same(over_devices(exchange, {"data": 1, "context": 3}, **settings)(inputs()), expected)


@pytest.mark.slow("compiles forward and backward passes on meshes")
@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("sizes", [{"data": 2, "context": 2, "tensor": 2}, {"data": 1, "context": 2, "tensor": 4}])
@pytest.mark.parametrize(
    "settings",
    [
        {"segments": None, "window": None, "softcap": None},
        {"segments": SEGMENTS, "window": None, "softcap": None},
        {"segments": None, "window": WINDOW, "softcap": SOFTCAP},
    ],
)
def test_with_each_other_axis_and_setting(exchange, sizes, settings):
    expected = with_gradients(partial(by_definition, **settings), inputs())
    assert_same(over_devices(exchange, sizes, **settings)(inputs()), expected)


def parts_of_keys(score, cuts, settings):
    """Returns the attention of one device that has the keys in parts, and the gradients of its sum, by hand."""
    query, key, value = inputs()
    grouped = query.reshape(*query.shape[:2], KV_HEADS, -1, CHANNELS)
    slots, segments = jnp.arange(TIME), jnp.asarray(settings["segments"])
    reach = jnp.asarray(settings["window"] or TIME)

    def part(first, last):
        others = Tokens(slots[first:last], segments[:, first:last])
        return key[:, first:last], value[:, first:last], Tokens(slots, segments), others, reach

    parts = [part(*cut) for cut in cuts]
    whole = Part(jnp.zeros(grouped.shape), jnp.full(grouped.shape[:-1], partial_attention.NOTHING))
    for each in parts:
        whole = partial_attention.joined(whole, partial_attention.forward(score, grouped, *each))
    gradient = jnp.cos(jnp.arange(query.size).reshape(grouped.shape))
    found = [partial_attention.backward(score, grouped, *each, whole, gradient) for each in parts]
    of_key, of_value = (jnp.concatenate([getattr(each, name) for each in found], 1) for name in ("key_BSKC", "value_BSKC"))
    of_query = sum(each.query_BTKGC for each in found)
    return [whole.mixed_BTKGC.reshape(query.shape), of_query.reshape(query.shape), of_key, of_value]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cuts", [[(0, 48)], [(0, 17), (17, 48)], [(30, 48), (0, 30)]])
def test_blocks_and_parts_of_the_keys_are_joined(cuts):
    """Blocks that divide neither queries nor keys, and others that see nothing."""
    settings = {"segments": SEGMENTS, "window": WINDOW, "softcap": SOFTCAP}
    expected = with_gradients(partial(by_definition, **settings), inputs())
    if cuts[0] != (0, 48):  # in any order
        order = np.concatenate([np.arange(*cut) for cut in cuts])
        expected = [*expected[:2], *(x[:, order] for x in expected[2:])]
    score = Score(SCALE, SOFTCAP, queries=10, keys=7)
    assert_same(jax.jit(lambda: parts_of_keys(score, cuts, settings))(), expected)


def test_a_token_that_sees_nothing_gets_nothing():
    query, key, value = inputs(time=4)
    grouped = query.reshape(2, 4, KV_HEADS, -1, CHANNELS)
    late = Tokens(jnp.arange(4) + 4, None)
    arguments = (Score(SCALE, None), grouped, key, value, Tokens(jnp.arange(4), None), late, jnp.asarray(8))
    part = partial_attention.forward(*arguments)
    assert not part.mixed_BTKGC.any()
    gradients = partial_attention.backward(*arguments, part, jnp.ones_like(grouped))
    assert not any(leaf.any() for leaf in gradients)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("recomputed", [True, False])
def test_nothing_is_kept_of_all_pairs_of_blocks(exchange, recomputed, monkeypatch):
    """Not in a loop over layers either, of which JAX takes out what depends on no layer."""
    monkeypatch.setattr(attention_of_devices, "Score", partial(Score, queries=4, keys=3))
    mesh = meshes.make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2])
    query, key, value = inputs()
    settings = {"segments_BT": jnp.asarray(SEGMENTS), "scale": SCALE, "softcap": SOFTCAP}

    def layers(query, key, value, reach):
        def layer(x):
            return x + context_attention(exchange, x, key, value, reach=reach, **settings)

        body = jax.checkpoint(layer, prevent_cse=False) if recomputed else layer
        return jnp.sum(jax.lax.scan(lambda x, _: (body(x), None), query, None, length=3)[0])

    gradient = meshes.tracing_for(mesh, jax.grad(layers, (0, 1, 2)))
    program = str(jax.make_jaxpr(gradient)(query, key, value, jnp.asarray(WINDOW)))
    blocks = (TIME // 2 // 4, TIME // 3 if exchange == "gather" else TIME // 2 // 3)
    assert f"[{blocks[0]},2," in program  # the queries in blocks
    kept = [f"[{','.join(map(str, pair))}," for pair in (blocks, blocks[::-1], (3, *blocks))]
    assert not [pair for pair in kept if pair in program]


@pytest.mark.parametrize(
    ("asked", "platform", "length", "expected"),
    [
        ("auto", "cpu", 2048, Choice("gather", "less than 262,144 tokens")),
        ("auto", "gpu", 262_144, Choice("ring", "262,144 tokens or more")),
        ("auto", "tpu", 32_768, Choice("gather", "less than 65,536 tokens on a TPU")),
        ("auto", "tpu", 65_536, Choice("ring", "65,536 tokens or more on a TPU")),
        ("ring", "cpu", 64, Choice("ring", "model.context_attention")),
    ],
)
def test_the_exchange_is_chosen_by_platform_and_length(asked, platform, length, expected):
    assert choose_exchange(asked, platform, length) == expected


@pytest.mark.parametrize(("asked", "expected"), [("auto", "gather"), ("gather", "gather"), ("ring", "ring")])
def test_a_model_exchanges_keys_and_values_as_its_settings_say(asked, expected, monkeypatch):
    exchanges = []

    def noted(exchange, query, *arrays, **settings):
        exchanges.append((exchange, settings["segments_BT"] is not None, query.shape))
        return query

    monkeypatch.setattr(attention_kernels, "context_attention", noted)
    config = ModelConfig(width=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=8, context_attention=asked)
    mesh = meshes.make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2])
    tokens = np.zeros((1, 8), np.int32)
    jax.eval_shape(meshes.tracing_for(mesh, lambda: Decoder(config, rngs=nnx.Rngs(0))(tokens, tokens, tokens)))
    assert exchanges == [(expected, True, (1, 8, 2, 8))]


def test_an_exchange_that_does_not_exist():
    with pytest.raises(ValueError, match=r"context_attention = 'rng': expected one of auto, gather, ring; did you mean ring"):
        ModelConfig(context_attention="rng")


@pytest.fixture
def optimized():
    """Compiled as in training, not as in other tests: where a test computes longer than it compiles."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.slow("computes the attention of a long sequence")
@pytest.mark.usefixtures("optimized")
def test_the_ring_at_65536_tokens():
    """Against JAX's own attention, of every 61st query to all keys before it: all scores would not fit in memory."""
    time = 65_536
    chosen = np.arange(60, time, 61)

    def plain(query, key, value):
        sees = chosen[:, None] >= jnp.arange(time)
        return jax.nn.dot_product_attention(query[:, chosen], key, value, mask=sees[None, None], scale=SCALE)

    arrays = inputs(time, heads=1, kv_heads=1, rows=1)
    expected = jax.jit(partial(with_gradients, plain))(arrays)
    settings = {"segments": None, "window": None, "softcap": None}
    found = over_devices("ring", {"data": 1, "context": 8}, **settings, time=time, chosen=chosen)(arrays)
    assert_same(found, expected, tolerance=1e-4)
