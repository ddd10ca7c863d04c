"""Attention by JAX's kernel for TPUs, which skips what the mask leaves out and keeps no scores in memory."""

from __future__ import annotations

from functools import partial

import jax
from jax.sharding import PartitionSpec

from trainers.config.attention import SPLASH_BLOCK_TOKENS
from trainers.parallel.mesh import over_tensor, rows_over, traced_for

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
