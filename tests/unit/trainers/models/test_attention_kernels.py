"""Every kernel gives the attention that is defined by its scores; and the choice among them."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gangway.errors import UsageError
from trainers.config import MeshConfig, ModelConfig
from trainers.config.attention import Choice, Needs, choose, problems
from trainers.config.mesh import batch_axes
from trainers.models import attention_kernels
from trainers.models.attention import attend, causal_mask
from trainers.models.attention_kernels import blockwise, splash
from trainers.models.decoder import Decoder
from trainers.parallel.mesh import make_mesh, tracing_for
from trainers.runtime.executables import lowered

BATCH, TIME, HEADS, KV_HEADS, CHANNELS = 2, 128, 4, 2, 16
WINDOW, SOFTCAP = 31, 20.0
SEGMENTS = np.repeat(np.repeat([1, 2, 0], [50, 60, 18])[None], BATCH, 0).astype(np.int32)


def inputs():
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw((BATCH, TIME, heads, CHANNELS), np.float32)) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def by_definition(query, key, value, *, segments_BT, window, scale, softcap):
    mask = causal_mask(segments_BT, TIME)
    if window is not None:
        back = np.arange(TIME)[:, None] - np.arange(TIME)
        mask &= back < window
    return attend(query, key, value, mask, scale=scale, softcap=softcap)


def with_gradients(kernel, **settings):
    """Returns the attention, and the gradients of a function of it."""

    def objective(arrays):
        mixed = kernel(*arrays, **settings)
        return jnp.sum(mixed * jnp.cos(jnp.arange(mixed.size).reshape(mixed.shape))), mixed

    (_, mixed), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(inputs())
    return [mixed, *gradients]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


@pytest.mark.slow("compiles a model in several forms")
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("softcap", [None, SOFTCAP])
def test_one_block_of_queries_after_the_other_gives_the_same(segments, window, softcap):
    block = 48  # does not divide the tokens, so that the last block is filled up
    settings = {"segments_BT": segments, "window": window, "scale": 0.25, "softcap": softcap}
    assert_same(with_gradients(partial(blockwise, block_tokens=block), **settings), with_gradients(by_definition, **settings))


def test_blocks_keep_no_scores_of_all_pairs():
    def temporary_bytes(kernel, time):
        shapes = [jax.ShapeDtypeStruct((1, time, 2, 8), jnp.float32)] * 3
        settings = {"segments_BT": None, "window": None, "scale": 1.0, "softcap": None}
        gradient = jax.grad(lambda arrays: kernel(*arrays, **settings).sum())
        return jax.jit(gradient).lower(shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = (temporary_bytes(partial(blockwise, block_tokens=64), time) for time in (1024, 4096))
    # Four times the tokens: sixteen times the pairs.
    assert long < 6 * short


@pytest.mark.slow("interprets a kernel")
def test_the_kernel_of_tpus_gives_the_same_with_segments_a_window_and_a_soft_cap():
    settings = {"segments_BT": SEGMENTS, "window": WINDOW, "scale": 0.25, "softcap": SOFTCAP}
    assert_same(with_gradients(partial(splash, interpret=True), **settings), with_gradients(by_definition, **settings))


@pytest.mark.slow("interprets a kernel")
def test_the_kernel_of_tpus_divides_rows_and_heads_over_a_mesh():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    settings = {"segments_BT": SEGMENTS, "window": None, "scale": 0.25, "softcap": None}
    rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh.shape)))

    on_the_mesh = tracing_for(mesh, lambda arrays: splash(*arrays, **settings, interpret=True))
    mixed = jax.jit(on_the_mesh, in_shardings=rows)(inputs())
    assert mixed.sharding.shard_shape(mixed.shape) == (1, TIME, HEADS // 2, CHANNELS)
    assert_same([mixed], [by_definition(*inputs(), **settings)])


CONFIG = ModelConfig(
    family="gemma2",
    vocab_size=50,
    width=32,
    num_layers=3,
    num_kv_heads=2,
    mlp_width=48,
    window=40,
    global_every=2,
    attention_softcap=SOFTCAP,
)
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (BATCH, TIME), np.int32)


def logits(**changes):
    model = nnx.jit(lambda: Decoder(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0)))()
    return np.asarray(jax.jit(lambda model, tokens, segments: model(tokens, None, segments))(model, TOKENS, SEGMENTS))


def of_a_user(query, key, value, **settings):
    return -blockwise(query, key, value, **settings)


@pytest.mark.slow("compiles a model in several forms")
@pytest.mark.parametrize(
    ("layers", "windows"),
    [({}, {CONFIG.window, None}), ({"global_every": None}, {CONFIG.window}), ({"window": None, "global_every": None}, {None})],
    ids=["some", "all", "none"],
)
def test_a_model_computes_with_the_kernel_of_its_settings(layers, windows, monkeypatch):
    dense = logits(**layers)
    np.testing.assert_array_equal(logits(attention="xla", **layers), dense)
    monkeypatch.setattr(attention_kernels, "blockwise", called := Counted(blockwise))
    np.testing.assert_allclose(logits(attention="blockwise", **layers), dense, atol=1e-5)
    assert called.windows == windows
    ours = f"{__name__}:of_a_user"
    assert np.abs(logits(attention=ours, **layers) - dense).max() > 1e-3


class Counted:
    def __init__(self, kernel):
        self.kernel, self.windows = kernel, set()

    def __call__(self, *arrays, window, **settings):
        self.windows.add(window)
        return self.kernel(*arrays, window=window, **settings)


NEEDS = Needs(2048, 64, "bfloat16", softcap=False)


@pytest.mark.parametrize(
    ("asked", "platform", "changes", "expected"),
    [
        ("auto", "cpu", {}, Choice("xla", "2048 tokens are few")),
        ("auto", None, {"length": 4096}, Choice("blockwise", "the scores of 4096 x 4096 tokens are not kept in memory")),
        ("auto", "gpu", {}, Choice("cudnn", "the kernel for a GPU")),
        (
            "auto",
            "gpu",
            {"softcap": True},
            Choice("xla", "not cudnn: the model has an attention_softcap, which it does not know"),
        ),
        (
            "auto",
            "gpu",
            {"dtype": "float32", "length": 4096},
            Choice("blockwise", "not cudnn: dtype is float32, and it takes bfloat16 or float16"),
        ),
        ("auto", "tpu", {"softcap": True}, Choice("splash", "the kernel for a TPU")),
        ("auto", "tpu", {"length": 100}, Choice("xla", "not splash: a sequence has 100 tokens, and it takes a multiple of 128")),
        ("blockwise", "tpu", {}, Choice("blockwise", "model.attention")),
    ],
)
def test_the_kernel_is_chosen_by_platform_length_and_model(asked, platform, changes, expected):
    assert choose(asked, platform, NEEDS._replace(**changes)) == expected


@pytest.mark.parametrize("channels", [136, 60])
def test_heads_that_cudnn_does_not_take(channels):
    told = f"a head has {channels} channels, and it takes a multiple of 8 up to 128"
    assert list(problems("cudnn", NEEDS._replace(channels=channels))) == [told]


def test_a_kernel_of_another_platform_is_refused_where_it_would_run():
    with pytest.raises(ValueError, match=r"model\.attention = 'splash': expected TPU hosts, found CPU hosts; take auto"):
        logits(attention="splash")
    with pytest.raises(ValueError, match=r"model\.attention = 'cudnn': dtype is float32"):
        logits(attention="cudnn", attention_softcap=None)


def test_float16_on_a_cpu_is_that_of_float32_forward_and_backward():
    """XLA has no product of float16 with sums of float32 there, which `jax.nn.dot_product_attention` asks for."""

    def total(heads):
        return jnp.sum(attend(*heads, None, scale=0.25).astype(jnp.float32) ** 2)

    half = [head.astype(jnp.float16) for head in inputs()]
    value, gradients = jax.jit(jax.value_and_grad(total))(half)
    expected, of_expected = jax.jit(jax.value_and_grad(total))([head.astype(jnp.float32) for head in half])
    assert {gradient.dtype for gradient in gradients} == {jnp.dtype(jnp.float16)}
    np.testing.assert_allclose(value, expected, rtol=1e-3)
    for got, want in zip(gradients, of_expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


def test_a_product_of_float16_that_the_platform_lacks_is_an_error_that_says_what_to_choose():
    head = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float16)
    attention = jax.jit(jax.nn.dot_product_attention)
    with pytest.raises(UsageError, match=r"dtype = 'float16': .* on CPU\): expected bfloat16 or float32 here, or trainers"):
        lowered(attention, (head, head, head))
    with pytest.raises(ValueError, match="something else"):
        lowered(SimpleNamespace(lower=Mock(side_effect=ValueError("something else"))), ())


def test_a_kernel_that_does_not_exist():
    with pytest.raises(ValueError, match=r"attention = 'splas': expected one of auto, .* did you mean splash"):
        ModelConfig(attention="splas")
