"""The attention of sequences that several devices share (`mesh.context`): keys and values are gathered, or go around in a ring.

Each device computes the attention of its own tokens, in blocks. The backward pass gets the keys and values of the others again:
only a device's own are kept for it. Gradients of keys and values are added up in float32, and each device gets back the sums for
its own.

Shape suffixes: B rows and T tokens of a device, S tokens of the whole sequence, H query heads, K key and value heads, G = H / K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trainers.config.mesh import CONTEXT
from trainers.models import partial_attention
from trainers.models.partial_attention import Gradients, Part, Score, Tokens, joined
from trainers.parallel import sequence
from trainers.parallel.mesh import dividing, over_tensor, traced_for
from trainers.parallel.platform import kind_of_host


class How(NamedTuple):
    """What is known of an attention when it is compiled."""

    exchange: Literal["gather", "ring"]
    parts: int
    """The devices that share a sequence."""
    score: Score
    rows: tuple[str, ...] | None
    """The axes of the mesh over which the rows are divided. The backward pass is traced later, and not within a stage."""


def context_attention(
    exchange: Any,
    query_BTHC: jax.Array,
    key_BTKC: jax.Array,
    value_BTKC: jax.Array,
    *,
    segments_BT: jax.Array | None,
    reach: jax.Array,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Returns causal attention [B, T, H, C] of whole sequences, whose tokens are divided in the balanced order
    (`trainers.parallel.sequence`), and so are the queries, keys and values. A token sees tokens less than `reach` (int32) before
    it; of packed rows only those of its segment. Traced for a mesh with the axis `context`."""
    dtype = query_BTHC.dtype
    if dtype == jnp.float16 and kind_of_host() != "gpu":  # elsewhere XLA has no such product
        query_BTHC, key_BTKC, value_BTKC = (x.astype(jnp.float32) for x in (query_BTHC, key_BTKC, value_BTKC))
    mesh = traced_for()
    assert mesh is not None
    how = How(exchange, sequence.num_parts(), Score(scale, softcap), dividing(mesh, key_BTKC.shape[0]))
    return _mixed(how, query_BTHC, key_BTKC, value_BTKC, segments_BT, reach).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(
    how: How,
    query_BTHC: jax.Array,
    key_BTKC: jax.Array,
    value_BTKC: jax.Array,
    segments_BT: jax.Array | None,
    reach: jax.Array,
) -> jax.Array:
    return _forward(how, query_BTHC, key_BTKC, value_BTKC, segments_BT, reach)[0]


def _forward(
    how: How,
    query_BTHC: jax.Array,
    key_BTKC: jax.Array,
    value_BTKC: jax.Array,
    segments_BT: jax.Array | None,
    reach: jax.Array,
) -> tuple[jax.Array, Any]:
    slots_S, passed = _slots(how, key_BTKC), _gathered_forward if how.exchange == "gather" else _ring_forward

    def of_device(
        query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, reach: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        part = passed(how, _grouped(query, key), (key, value), Tokens(slots_S, segments), reach)
        return part.mixed_BTKGC.reshape(query.shape).astype(query.dtype), part.log_sum_BTKG.reshape(query.shape[:-1])

    found = _on_devices(how, of_device, 3, 2, key_BTKC)(query_BTHC, key_BTKC, value_BTKC, segments_BT, reach)
    return found[0], (query_BTHC, key_BTKC, value_BTKC, segments_BT, reach, *found)


def _backward(how: How, kept: Any, gradient_BTHC: jax.Array) -> tuple[Any, ...]:
    query_BTHC, key_BTKC, value_BTKC, segments_BT, reach, mixed_BTHC, log_sum_BTH = kept
    slots_S, passed = _slots(how, key_BTKC), _gathered_backward if how.exchange == "gather" else _ring_backward

    def of_device(*arrays: Any) -> tuple[jax.Array, ...]:
        query, key, value, mixed, log_sum, gradient, segments, reach = arrays
        whole = Part(_grouped(mixed, key).astype(jnp.float32), _grouped(log_sum[..., None], key)[..., 0])
        tokens = Tokens(slots_S, segments)
        found = passed(how, _grouped(query, key), (key, value), tokens, reach, whole, _grouped(gradient, key))
        return tuple(each.reshape(x.shape).astype(x.dtype) for each, x in zip(found, (query, key, value), strict=True))

    divided = (query_BTHC, key_BTKC, value_BTKC, mixed_BTHC, log_sum_BTH, gradient_BTHC)
    return (*_on_devices(how, of_device, len(divided), 3, key_BTKC)(*divided, segments_BT, reach), None, None)


_mixed.defvjp(_forward, _backward)


def _on_devices(how: How, function: Callable[..., Any], divided: int, returned: int, key_BTKC: jax.Array) -> Callable[..., Any]:
    """Returns `function`, to be called with arrays of whole rows: so many arrays of heads [B, T, H, ...], the segments and
    `reach`; it returns so many arrays of heads."""
    mesh = traced_for()
    assert mesh is not None
    # Where the axis does not divide the keys' heads, every device computes all heads, as it holds their weights.
    heads = over_tensor(mesh, key_BTKC.shape[2])
    of_heads = PartitionSpec(how.rows, CONTEXT, heads)
    # The segments of whole rows: they are few numbers, and every device knows them.
    specs = (*[of_heads] * divided, PartitionSpec(how.rows), PartitionSpec())
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=(of_heads,) * returned, check_vma=False)


def _slots(how: How, key_BTKC: jax.Array) -> jax.Array:
    return jnp.asarray(sequence.slots(key_BTKC.shape[1], how.parts))


def _grouped(x_BTHC: jax.Array, key_BTKC: jax.Array) -> jax.Array:
    """Returns [B, T, K, G, C]."""
    return x_BTHC.reshape(*x_BTHC.shape[:2], key_BTKC.shape[2], -1, x_BTHC.shape[-1])


Pair = tuple[jax.Array, jax.Array]
"""Keys and values, or their gradients."""


def _of(device: jax.Array, how: How, tokens: Tokens) -> Tokens:
    """Returns the tokens of one device along the axis."""
    length = tokens.slots_T.size // how.parts
    part = partial(jax.lax.dynamic_slice_in_dim, start_index=device * length, slice_size=length)
    return Tokens(part(tokens.slots_T), None if tokens.segments_BT is None else part(tokens.segments_BT, axis=1))


def _gathered(pair: Pair) -> Pair:
    return jax.tree.map(lambda x: jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True), pair)


def _gathered_forward(how: How, query: jax.Array, pair: Pair, tokens: Tokens, reach: jax.Array) -> Part:
    own = _of(jax.lax.axis_index(CONTEXT), how, tokens)
    return partial_attention.forward(how.score, query, *_gathered(pair), own, tokens, reach)


def _gathered_backward(
    how: How, query: jax.Array, pair: Pair, tokens: Tokens, reach: jax.Array, whole: Part, gradient: jax.Array
) -> Gradients:
    own = _of(jax.lax.axis_index(CONTEXT), how, tokens)
    of_query, *of_pair = partial_attention.backward(how.score, query, *_gathered(pair), own, tokens, reach, whole, gradient)
    return Gradients(of_query, *(jax.lax.psum_scatter(x, CONTEXT, scatter_dimension=1, tiled=True) for x in of_pair))


def _sent_on(pair: Pair, how: How) -> Pair:
    """Returns the pair of the device before this one."""
    around = [(device, (device + 1) % how.parts) for device in range(how.parts)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, around), pair)


def _ring_forward(how: How, query: jax.Array, pair: Pair, tokens: Tokens, reach: jax.Array) -> Part:
    here = jax.lax.axis_index(CONTEXT)
    own = _of(here, how, tokens)

    def of_part(pair: Pair, turn: jax.Array | int) -> Part:
        others = _of((here - turn) % how.parts, how, tokens)
        return partial_attention.forward(how.score, query, *pair, own, others, reach)

    def body(carry: tuple[Pair, Part], turn: jax.Array) -> tuple[tuple[Pair, Part], None]:
        pair, so_far = carry
        # Begun before the attention to this part, and needed after it: the exchange takes place meanwhile.
        following = _sent_on(pair, how)
        return (following, joined(so_far, of_part(pair, turn))), None

    last = how.parts - 1
    (pair, so_far), _ = jax.lax.scan(body, (pair, _nothing(query)), jnp.arange(last))
    return joined(so_far, of_part(pair, last))


def _nothing(query: jax.Array) -> Part:
    return Part(jnp.zeros(query.shape, jnp.float32), jnp.full(query.shape[:-1], partial_attention.NOTHING))


def _ring_backward(
    how: How, query: jax.Array, pair: Pair, tokens: Tokens, reach: jax.Array, whole: Part, gradient: jax.Array
) -> Gradients:
    here = jax.lax.axis_index(CONTEXT)
    own = _of(here, how, tokens)

    def of_part(pair: Pair, turn: jax.Array | int) -> Gradients:
        others = _of((here - turn) % how.parts, how, tokens)
        return partial_attention.backward(how.score, query, *pair, own, others, reach, whole, gradient)

    def added(of_query: jax.Array, of_pair: Pair, found: Gradients) -> tuple[jax.Array, Pair]:
        return of_query + found.query_BTKGC, (of_pair[0] + found.key_BSKC, of_pair[1] + found.value_BSKC)

    def body(carry: tuple[Pair, jax.Array, Pair], turn: jax.Array) -> tuple[tuple[Pair, jax.Array, Pair], None]:
        pair, of_query, of_pair = carry
        # Their gradients go around behind the keys and values, and are needed only when this turn's are known.
        following, arrived = _sent_on(pair, how), _sent_on(of_pair, how)
        return (following, *added(of_query, arrived, of_part(pair, turn))), None

    last = how.parts - 1
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (query, pair))
    (pair, of_query, of_pair), _ = jax.lax.scan(body, (pair, *zeros), jnp.arange(last))
    of_query, of_pair = added(of_query, _sent_on(of_pair, how), of_part(pair, last))
    # They are with the device before their own.
    return Gradients(of_query, *_sent_on(of_pair, how))
