"""The attention of a whole sequence, by the kernel that fits the platform and the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gangway.config.section import require, require_none
from trainers.config import ModelConfig
from trainers.config.arguments import load_object
from trainers.config.attention import NEEDS, SPLASH_BLOCK_TOKENS, Needs, check, check_platform, choose, choose_exchange, needs_of
from trainers.models.attention import attend, causal_mask, same_block, within
from trainers.models.context_attention import context_attention
from trainers.parallel import sequence
from trainers.parallel.mesh import over_tensor, rows_over, traced_for
from trainers.parallel.platform import is_known, kind_of_host

Mix = Callable[[jax.Array | None, jax.Array, jax.Array, jax.Array], jax.Array]
"""(local, query [B, T, H, C], key and value [B, T, K, C]) -> [B, T, H, C]. `local` is whether the layer has the window (traced;
None: all layers have it, or none has)."""

BLOCKS = "only xla knows tokens of an image, which attend to each other in both directions; take auto or xla"
BLOCKS_OF_PARTS = "tokens of an image attend to each other in both directions, which no attention of divided sequences knows"


class Kernel(Protocol):
    """A function for `model.attention: package.module:function`."""

    def __call__(
        self,
        query_BTHC: jax.Array,
        key_BTKC: jax.Array,
        value_BTKC: jax.Array,
        *,
        segments_BT: jax.Array | None,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> jax.Array:
        """Returns causal attention [B, T, H, C] of grouped queries: query head h has the key and value head h * K // H.

        A token attends to itself and to those before it; with a window, to so many, including itself; of packed rows only to
        those of its segment. `scale` multiplies the scores; `softcap` then keeps them within +-softcap by a tanh.
        """


def attention(
    config: ModelConfig, segments_BT: jax.Array | None, time: int, dtype: str, blocks_BT: jax.Array | None = None
) -> Mix:
    """Returns the attention of all layers for sequences of `time` tokens, which are in the balanced order if several devices
    share each sequence (`trainers.parallel.sequence`). Tokens of the same number in `blocks_BT`, if it is not 0, attend to each
    other whatever their order; the window counts for earlier ones alone.

    Raises ValueError if the kernel of `model.attention` does not fit the model, or this platform."""
    scale, parts = (config.query_scalar or config.channels) ** -0.5, sequence.num_parts()
    if blocks_BT is not None:
        require(parts == 1, f"mesh.context = {parts}: {BLOCKS_OF_PARTS}")
        require(config.attention in ("auto", "xla"), f"model.attention = {config.attention!r}: {BLOCKS}")
        return _dense(config, segments_BT, time, scale, blocks_BT)
    needs = needs_of(config, time, dtype, parts)
    name = checked(choose(config.attention, kind_of_host(), needs).kernel, needs)
    if name == "xla":
        return _dense(config, segments_BT, time, scale)
    if parts > 1:
        return _shared(config, segments_BT, time, scale)
    kernel: Kernel = {"blockwise": blockwise, "cudnn": cudnn, "splash": splash}.get(name) or load_object(name)
    of_layer = partial(kernel, segments_BT=segments_BT, scale=scale, softcap=config.attention_softcap)

    def mix(local: jax.Array | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        near, far = partial(of_layer, window=config.window), partial(of_layer, window=None)
        # A kernel's window is a constant of its program, and the layers are one program: it has both.
        return near(query, key, value) if local is None else jax.lax.cond(local, near, far, query, key, value)

    return mix


def _shared(config: ModelConfig, segments_BT: jax.Array | None, time: int, scale: float) -> Mix:
    """Returns the attention of sequences that several devices share."""
    exchange = choose_exchange(config.context_attention, kind_of_host(), time).kernel
    of_layer = partial(context_attention, exchange, segments_BT=segments_BT, scale=scale, softcap=config.attention_softcap)
    window = time if config.window is None else config.window

    def mix(local: jax.Array | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        reach = jnp.asarray(window, jnp.int32)
        # A number and no branch: devices exchange keys and values in the same place, whether the layer has the window or not.
        return of_layer(query, key, value, reach=reach if local is None else jnp.where(local, reach, time))

    return mix


def checked(name: str, needs: Needs) -> str:
    """Returns the kernel `name`. Where only shapes are traced, before a device is touched, `xla` stands for kernels of
    accelerators: to trace those starts the backend, and a standby could not join its gang."""
    require_none(check(name, needs))
    if not is_known():
        return "xla" if name in NEEDS else name
    require_none(check_platform(name, kind_of_host()))
    return name


def _dense(
    config: ModelConfig, segments_BT: jax.Array | None, time: int, scale: float, blocks_BT: jax.Array | None = None
) -> Mix:
    # Without a mask the attention is causal.
    is_plain = segments_BT is None and config.window is None and blocks_BT is None
    mask_BTS = None if is_plain else causal_mask(segments_BT, time)
    if mask_BTS is not None and blocks_BT is not None:
        mask_BTS |= same_block(blocks_BT)
    slots = jnp.arange(time)
    # A window ends on one side: later tokens of the same block are within it.
    near_TS = None if config.window is None else slots[:, None] - slots < config.window
    return lambda local, query, key, value: attend(
        query, key, value, within(mask_BTS, near_TS, local), scale=scale, softcap=config.attention_softcap
    )


def cudnn(
    query_BTHC: jax.Array,
    key_BTKC: jax.Array,
    value_BTKC: jax.Array,
    *,
    segments_BT: jax.Array | None,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Returns causal attention by cuDNN. Of packed rows it reads a mask [B, 1, T, T]. Its backward pass adds up in no fixed
    order, unless XLA gets `--xla_gpu_deterministic_ops`."""
    assert softcap is None, "checked by trainers.config.attention.problems"
    # The mask of the segments is the same for all heads; causality and the window are the kernel's own.
    mask = None if segments_BT is None else (segments_BT[:, :, None] == segments_BT[:, None])[:, None]
    return jax.nn.dot_product_attention(
        query_BTHC,
        key_BTKC,
        value_BTKC,
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


BLOCK_TOKENS = 256
"""Queries whose scores are in memory at a time. Fewer: more passes over the keys; more: more memory."""


def blockwise(
    query_BTHC: jax.Array,
    key_BTKC: jax.Array,
    value_BTKC: jax.Array,
    *,
    segments_BT: jax.Array | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    block_tokens: int = BLOCK_TOKENS,
) -> jax.Array:
    """Returns causal attention [B, T, H, C], one block of queries after the other; the backward pass computes the scores again.
    With a window, a block reads only the keys that are near it."""
    time = query_BTHC.shape[1]
    block = min(block_tokens, time)
    num_blocks = -(-time // block)
    padded = num_blocks * block
    # The keys that a block may attend to: those before it within the window, and its own.
    span = padded if window is None else min(padded, block + window - 1)
    query, key, value = (_filled(x, padded) for x in (query_BTHC, key_BTKC, value_BTKC))
    segments = None if segments_BT is None else _filled(segments_BT, padded)

    # Checkpointed: else the scores of all blocks would be kept for the backward pass, [B, H, T, T] together.
    @jax.checkpoint
    def of_block(index: jax.Array) -> jax.Array:
        first = index * block
        begin = jnp.maximum(first + block - span, 0)
        part = jax.lax.dynamic_slice_in_dim
        back_TS = (first + jnp.arange(block))[:, None] - (begin + jnp.arange(span))
        mask_BTS = ((back_TS >= 0) if window is None else (back_TS >= 0) & (back_TS < window))[None]
        if segments is not None:
            mask_BTS &= part(segments, first, block, 1)[:, :, None] == part(segments, begin, span, 1)[:, None]
        near_key, near_value = part(key, begin, span, 1), part(value, begin, span, 1)
        return attend(part(query, first, block, 1), near_key, near_value, mask_BTS, scale=scale, softcap=softcap)

    # [num_blocks, B, block, H, C] -> [B, T, H, C]
    blocks = jax.lax.map(of_block, jnp.arange(num_blocks))
    return jnp.moveaxis(blocks, 0, 1).reshape(query.shape)[:, :time]


def _filled(x_BT: jax.Array, time: int) -> jax.Array:
    """Returns x with zeros at its end, `time` tokens in all. No token before them attends to what is filled in."""
    return jnp.pad(x_BT, [(0, 0), (0, time - x_BT.shape[1])] + [(0, 0)] * (x_BT.ndim - 2))


LARGEST_BLOCK_TOKENS = 512


def splash(
    query_BTHC: jax.Array,
    key_BTKC: jax.Array,
    value_BTKC: jax.Array,
    *,
    segments_BT: jax.Array | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Returns causal attention [B, T, H, C]. T must be a multiple of 128. `interpret`: on any platform, slowly, for tests.

    The compiler cannot divide a kernel over a mesh: each device computes its own rows and heads.
    """
    mesh = traced_for()
    kernel = partial(_local, window=window, scale=scale, softcap=softcap, interpret=interpret)
    if mesh is None:
        return kernel(query_BTHC, key_BTKC, value_BTKC, segments_BT)
    # Where the axis does not divide the keys' heads, every device computes all heads, as it holds their weights.
    heads = over_tensor(mesh, key_BTKC.shape[2])
    rows = rows_over(mesh)
    x_BTHC, rows_BT = PartitionSpec(rows, None, heads, None), PartitionSpec(rows, None)
    arrays = [query_BTHC, key_BTKC, value_BTKC, *([] if segments_BT is None else [segments_BT])]
    specs = (x_BTHC, x_BTHC, x_BTHC, rows_BT)[: len(arrays)]
    return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=x_BTHC, check_vma=False)(*arrays)


def _local(
    query_BTHC: jax.Array,
    key_BTKC: jax.Array,
    value_BTKC: jax.Array,
    segments_BT: jax.Array | None = None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    interpret: bool,
) -> jax.Array:
    # Imported here: it takes a second that only a TPU's process needs to spend.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    time, heads = query_BTHC.shape[1:3]
    shape = (time, time)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=_block_sizes(kernels, time),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )

    def of_row(query_HTC: jax.Array, key_KTC: jax.Array, value_KTC: jax.Array, segments_T: jax.Array | None) -> jax.Array:
        segments = None if segments_T is None else kernels.SegmentIds(segments_T, segments_T)
        return kernel(query_HTC, key_KTC, value_KTC, segment_ids=segments)

    query, key, value = (x_BTHC.swapaxes(1, 2) for x_BTHC in (query_BTHC * scale, key_BTKC, value_BTKC))
    return jax.vmap(of_row)(query, key, value, segments_BT).swapaxes(1, 2)


def _block_sizes(kernels, time: int):  # type: ignore[no-untyped-def]  # of the module that is imported late
    block = next(size for size in (LARGEST_BLOCK_TOKENS, 256, SPLASH_BLOCK_TOKENS) if time % size == 0)
    forward = dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), block)
    backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"), block)
    return kernels.BlockSizes(**forward, **backward)
