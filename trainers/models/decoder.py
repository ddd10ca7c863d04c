"""A decoder of any family of `trainers.config.families`: Llama and those that differ from it in a few places.

Shape suffixes: B batch, T time (of queries), S time (of keys), D width, H query heads, K key and value heads, C channels of a
head, N = B * T (or B, T: two dimensions, where several devices share a sequence), V vocabulary. A leading L: one slice for each
layer.

The layers are stacked and run in one scan: a program to trace, compile and load after a failure whose size does not grow with
depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainers.config import ModelConfig
from trainers.config.model import RopeScaling
from trainers.config.vision import LayerSizes
from trainers.models import kv_cache, lora, remat
from trainers.models.attention import attend, soft_capped
from trainers.models.attention_kernels import attention
from trainers.models.experts import RouterSums, mixture
from trainers.models.kv_cache import Cache, Slots
from trainers.models.layers import Layers, Product, in_fp8, parameter, plain
from trainers.parallel import pipeline, sequence
from trainers.parallel.mesh import by_rows
from trainers.parallel.platform import platform
from trainers.parallel.sequence import WHOLE, TokenParts

Weights = dict[str, jax.Array]

TABLE_SCALE = 0.02
"""The standard deviation of the embedding's initial values. It is small beside what the layers add: otherwise a table that also
scores the next token would begin by expecting every token to repeat itself."""

TURNED = "turned"
"""Beside the weights of a layer: whether it has rotary positions, if only some have."""


OfRows = tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]
"""Positions, segments, how much each token counts, and blocks, as for `Decoder.hidden`, each [B, T]."""


class Hidden(NamedTuple):
    """What logits are computed from, which a loss may do in parts."""

    x_BTD: jax.Array
    table_DV: jax.Array
    softcap: float | None = None
    router: RouterSums | None = None
    """Of a mixture of experts, if the caller has said which tokens count; each [L, ...]."""

    def logits(self, x_ND: jax.Array) -> jax.Array:
        """Returns the float32 logits [N, V] of some of the rows of x."""
        with jax.named_scope("unembed"):
            logits = (x_ND @ self.table_DV).astype(jnp.float32)
            return logits if self.softcap is None else soft_capped(logits, self.softcap)


def divides_sequences(model: Any) -> bool:
    """Returns whether several devices can share each sequence of a model: whether it is a `Decoder`, with its `hidden`."""
    return isinstance(model, Decoder) and type(model).hidden is Decoder.hidden


def multiplies_in_fp8(model: Any) -> bool:
    """Returns whether a `Decoder` with its own `hidden` is in the model, or is the model, and has `fp8`."""
    return any(divides_sequences(module) and module.config.fp8 != "none" for _, module in nnx.iter_graph(model))


class LayerProducts(NamedTuple):
    """How the products of a layer are computed."""

    product: Product = plain
    parts: TokenParts = WHOLE
    """What each device has of the activations."""


PLAINLY = LayerProducts()


class Decoder(nnx.Module):
    """A decoder. `__call__` maps int32 tokens [B, T] to float32 logits [B, T, V].

    Every parameter has logical axis names; `trainers.parallel.mesh.LOGICAL_AXIS_RULES` maps them to mesh axes. The channels of
    all heads are one dimension, so that each weight of a layer is a matrix.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32):
        self.config, self.dtype = config, dtype
        if config.fp8 != "none":
            self.deterministic = True  # `train()` and `eval()` set it
        shape = (config.vocab_size, config.width)
        self.embed = parameter(rngs, ("vocab", "embed"), shape, TABLE_SCALE, param_dtype)
        if config.num_positions is not None:
            self.positions = parameter(rngs, (None, "embed"), (config.num_positions, config.width), TABLE_SCALE, param_dtype)
        self.layers = Layers(config, rngs=rngs, param_dtype=param_dtype)
        scale = jnp.zeros if config.structure.norm_offset else jnp.ones
        self.final_norm = nnx.Param(scale(config.width, param_dtype), logical_axes=("norm",))
        if config.structure.norm == "layer":
            self.final_norm_bias = nnx.Param(jnp.zeros(config.width, param_dtype), logical_axes=("norm",))
        if not config.tie_embeddings:
            self.unembed = parameter(rngs, ("embed", "vocab"), shape[::-1], TABLE_SCALE, param_dtype)

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        hidden = self.hidden(tokens_BT, positions_BT, segments_BT)
        return hidden.logits(hidden.x_BTD.reshape(-1, self.config.width)).reshape(*tokens_BT.shape, -1)

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        counted_BT: jax.Array | None = None,
        *,
        embedded_BTD: jax.Array | None = None,
        blocks_BT: jax.Array | None = None,
    ) -> Hidden:
        """Returns what the logits are computed from. Of packed rows, `segments_BT` numbers the documents, and `positions_BT`
        begins anew in each: a token sees its own document alone. `counted_BT`: how much each token counts in the sums of the
        routers of a mixture of experts; None: there are no sums. Where several devices share each sequence (`mesh.context`), all
        arguments and `x_BTD` have its usual order.

        `embedded_BTD` is in place of what `embedded` gives for the tokens, as where some of them stand for parts of an image.
        `blocks_BT` (int32) numbers those of one image: they attend to each other, also to later ones; 0: the token is of none."""
        config, (batch, time) = self.config, tokens_BT.shape
        sequence.check_length(time)
        if positions_BT is None:
            # [1, T]: the same positions for every row.
            positions_BT = jnp.arange(time)[None]
        # Before the weights are looked up: of tokens these are few numbers.
        tokens_BT, positions_BT, segments_BT, counted_BT = jax.tree.map(
            sequence.balanced, (tokens_BT, positions_BT, segments_BT, counted_BT)
        )
        with jax.named_scope("layers"):
            # Which layers have the window; None: all have, or none has.
            local = jnp.asarray(config.local_layers) if len(set(config.local_layers)) > 1 else None
            xs, of_rows = (self._layer_weights(), local), (positions_BT, segments_BT, counted_BT, blocks_BT)
            embedded_BTD = self.embedded(tokens_BT, positions_BT) if embedded_BTD is None else embedded_BTD
            if (stages := pipeline.mesh_of(batch, config.num_layers)) is None:
                x_ND, sums = self._through(embedded_BTD, of_rows, xs)
            else:
                in_turns = partial(remat.in_turns, policy=remat.resolved(config.remat))
                x_BTD, sums = pipeline.through_stages(stages, self._stage, embedded_BTD, of_rows, xs, in_turns)
                x_ND = by_rows(x_BTD.reshape(-1, config.width))
        x_BTD = self._final_normed(x_ND).reshape(batch, time, config.width)
        return Hidden(sequence.in_order(x_BTD), self._table(), config.logit_softcap, sums)

    def _stage(self, x_BTD: jax.Array, of_rows: OfRows, xs: Any) -> tuple[jax.Array, RouterSums | None]:
        x_ND, sums = self._through(x_BTD, of_rows, xs)
        return x_ND.reshape(x_BTD.shape), sums

    def _through(self, x_BTD: jax.Array, of_rows: OfRows, xs: Any) -> tuple[jax.Array, RouterSums | None]:
        """Returns what the layers `xs` make of x, [B * T, D] (where several devices share a sequence [B, T, D]), and the routers'
        sums of each of them."""
        config, (batch, time, _) = self.config, x_BTD.shape
        policy = remat.resolved(config.remat)
        positions_BT, segments_BT, counted_BT, blocks_BT = of_rows
        attend_all = attention(config, segments_BT, time, jnp.dtype(self.dtype).name, blocks_BT)
        turned = self._angles(positions_BT)
        shared = sequence.num_parts() > 1
        # An evaluation measures the weights as they are exported.
        product = in_fp8 if config.fp8 != "none" and not self.deterministic else plain
        counted_N = counted_BT if counted_BT is None or shared else counted_BT.reshape(-1)

        def layer(x_ND: jax.Array, xs: tuple[Weights, jax.Array | None]) -> tuple[jax.Array, RouterSums | None]:
            (weights, local), x_ND = xs, remat.named(x_ND)
            mix = partial(attend_all, local)
            x_ND, sums = self._layer(x_ND, weights, batch, turned(local), mix, counted_N, how)
            return how.parts.between(x_ND), sums

        body = remat.wrap(layer, policy, in_loop=True)
        # [B * T, D]: a CPU multiplies such operands 1.3 times faster than [B, T, D].
        x_ND = sequence.divided_from_table(x_BTD) if shared else by_rows(x_BTD.reshape(-1, config.width))
        how = LayerProducts(product, TokenParts.of(x_ND))
        x_ND, sums = jax.lax.scan(body, how.parts.scattered(x_ND), xs, unroll=config.unrolled(platform(), policy))
        return how.parts.gathered(x_ND), sums

    def init_cache(self, batch: int, length: int) -> Cache:
        """Returns an empty cache for `decode_step`, for the keys and values of `length` tokens."""
        return kv_cache.empty(self.config, batch, length, self.dtype)

    def decode_step(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        mask_BTS: jax.Array,
        cache: Cache,
        slot: jax.Array | int,
        *,
        embedded_BTD: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Returns (float32 logits [B, V] for the token after the last of the T tokens, the cache with these tokens).

        The keys and values of the tokens go to the slots from `slot` on; several at once must be the first ones, from slot 0 on,
        for layers with a window keep no more than that. `mask_BTS` is true where token t attends to slot s, including its own;
        layers with a window see the last slots of these, and later ones. `embedded_BTD` is as for `hidden`.
        """
        config, (batch, time) = self.config, tokens_BT.shape
        slots = jnp.arange(mask_BTS.shape[-1])
        near_TS = None if config.window is None else slot + jnp.arange(time)[:, None] - slots < config.window
        turned = self._angles(positions_BT)

        def layer(x_ND: jax.Array, weights: Weights, local: bool, old: Slots) -> tuple[jax.Array, Slots]:
            mask = mask_BTS & near_TS if local and near_TS is not None else mask_BTS
            new: Slots = {}

            def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                kept, seen, seen_mask = kv_cache.added(old, {"key": key, "value": value}, mask, slot)
                new.update(kept)
                scale = (config.query_scalar or config.channels) ** -0.5
                return attend(query, seen["key"], seen["value"], seen_mask, scale=scale, softcap=config.attention_softcap)

            return self._layer(x_ND, weights, batch, turned(jnp.asarray(local)), mix)[0], new

        # Never unrolled: previews are rare, and training waits while this program is compiled.
        embedded_BTD = self.embedded(tokens_BT, positions_BT) if embedded_BTD is None else embedded_BTD
        x_ND = embedded_BTD.reshape(-1, config.width)
        x_ND, cache = kv_cache.over_layers(layer, x_ND, self._layer_weights(), cache)
        # Of the last token alone: logits of a whole prompt would be [B, T, V], for nothing.
        last_BD = self._final_normed(x_ND.reshape(batch, -1, config.width)[:, -1])
        return Hidden(last_BD[:, None], self._table(), config.logit_softcap).logits(last_BD), cache

    def _layer(
        self,
        x_ND: jax.Array,
        weights: Weights,
        batch: int,
        angles: Angles | None,
        mix: Callable[..., jax.Array],
        counted_N: jax.Array | None = None,
        how: LayerProducts = PLAINLY,
    ) -> tuple[jax.Array, RouterSums | None]:
        config, structure, parts = self.config, self.config.structure, how.parts
        with jax.named_scope("attention"):
            normed_ND = parts.gathered(norm(config, x_ND, weights, "attention_norm") if structure.pre_norms else x_ND)
            query, key, value = heads_of(config, normed_ND, weights, batch, angles, how)
            # [B, T, H, C] -> [N, H * C], or [B, T, H * C].
            mixed_NF = parts.columns(mix(query, key, value).reshape(*x_ND.shape[:-1], -1))
            mixed_ND = parts.scattered(project(mixed_NF, weights, "out", how.product))
            added_ND = norm(config, mixed_ND, weights, "attention_post_norm") if structure.post_norms else mixed_ND
            x_ND += times(added_ND, config.residual_multiplier)
        with jax.named_scope("mlp"):
            normed_ND = parts.gathered(norm(config, x_ND, weights, "mlp_norm") if structure.pre_norms else x_ND)
            sums = None
            if structure.experts:
                added_ND, sums = mixture(config, normed_ND, weights, counted_N, activation(config))
            else:
                added_ND = mlp(config, normed_ND, weights, how)
            added_ND = parts.scattered(added_ND)
            added_ND = norm(config, added_ND, weights, "mlp_post_norm") if structure.post_norms else added_ND
            return x_ND + times(added_ND, config.residual_multiplier), sums

    def _angles(self, positions_BT: jax.Array) -> Callable[[jax.Array | None], Angles | None]:
        """Returns the angles of a layer, given whether it has the window (traced; None: all have, or none has)."""
        config = self.config
        if not any(config.turned_layers):
            return lambda local: None
        of = partial(rotary_angles, positions_BT, config.channels)
        everywhere = of(config.rope_theta, config.rope_scaling)
        if config.local_rope_theta is None:
            return lambda local: everywhere
        nearby = of(config.local_rope_theta)
        if all(config.local_layers):
            return lambda local: nearby
        return lambda local: jax.tree.map(partial(jnp.where, local), nearby, everywhere)

    def _layer_weights(self) -> Weights:
        weights = lora.scaled(self.layers)
        # The router computes in float32: its weights are not rounded first.
        cast = {name: weight if name == "router" else weight.astype(self.dtype) for name, weight in weights.items()}
        turned = self.config.turned_layers
        flags = {TURNED: jnp.asarray(turned)} if any(turned) and not all(turned) else {}
        return cast | flags | lora.noise(self.layers)

    def embedded(self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None) -> jax.Array:
        """Returns what the first layer reads of the tokens, [B, T, D]. Only models with learned positions read `positions_BT`."""
        with jax.named_scope("embed"):
            x_BTD = self.embed[...].astype(self.dtype)[tokens_BT]
            if self.config.structure.scaled_embedding:
                # Rounded to the type of the computation, as the models were trained.
                x_BTD *= jnp.asarray(math.sqrt(self.config.width), self.dtype)
            x_BTD = times(x_BTD, self.config.embedding_multiplier)
            if self.config.num_positions is not None:
                x_BTD += self.positions[...].astype(self.dtype)[positions_BT]
            return x_BTD

    def _final_normed(self, x_ND: jax.Array) -> jax.Array:
        weights = {name: value[...].astype(self.dtype) for name, value in vars(self).items() if name.startswith("final_norm")}
        with jax.named_scope("final_norm"):
            return norm(self.config, x_ND, weights, "final_norm")

    def _table(self) -> jax.Array:
        table_DV = self.embed[...].T if self.config.tie_embeddings else self.unembed[...]
        divisor = self.config.logit_divisor
        return times(table_DV.astype(self.dtype), None if divisor is None else 1 / divisor)


def times(x: jax.Array, multiplier: float | None) -> jax.Array:
    return x if multiplier is None else x * jnp.asarray(multiplier, x.dtype)


def norm(config: LayerSizes, x: jax.Array, weights: Weights, name: str) -> jax.Array:
    """The norm of the family, over the last dimension, with the scale `name` (and the bias `name`_bias)."""
    scale = weights[name]
    if config.structure.norm == "layer":
        return layer_norm(x, scale, weights[f"{name}_bias"], config.norm_eps)
    return rms_norm(x, scale, config.norm_eps, offset=config.structure.norm_offset)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, *, offset: bool = False) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang & Sennrich, 2019). With `offset`: * (1 + scale)."""
    # A mean of squares in bfloat16 would lose most of its digits.
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    if offset:
        return (normed * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * scale


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * scale + bias, in float32 (Ba et al., 2016)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def project(x_ND: jax.Array, weights: Weights, name: str, product: Product = plain) -> jax.Array:
    """Returns x @ weight, computed by `product`, plus what the adapter and the bias make, if the layer has them."""
    y = remat.product(lora.added(product(x_ND, weights[name]), x_ND, weights, name), name)
    return y + weights[f"{name}_bias"] if f"{name}_bias" in weights else y


def heads_of(
    config: LayerSizes, x_ND: jax.Array, weights: Weights, batch: int, angles: Angles | None, how: LayerProducts = PLAINLY
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query [B, T, H, C], key and value [B, T, K, C], turned to their places."""

    def heads(name: str) -> jax.Array:
        x_NF = how.parts.columns(project(x_ND, weights, name, how.product))
        if config.structure.whole_qk_norm and name != "value":
            x_NF = norm(config, x_NF, weights, f"{name}_norm")
        x_BTHC = x_NF.reshape(batch, -1, weights[name].shape[1] // config.channels, config.channels)
        if name == "value":
            return x_BTHC
        if config.structure.qk_norm:
            x_BTHC = norm(config, x_BTHC, weights, f"{name}_norm")
        if angles is None:
            return x_BTHC
        return jnp.where(weights[TURNED], rotate(x_BTHC, angles), x_BTHC) if TURNED in weights else rotate(x_BTHC, angles)

    return heads("query"), heads("key"), heads("value")


def mlp(config: LayerSizes, x_ND: jax.Array, weights: Weights, how: LayerProducts = PLAINLY) -> jax.Array:
    """Returns (activation(x gate) * (x up)) down (Shazeer, 2020); without a gate activation(x up) down."""

    def columns(name: str) -> jax.Array:
        return how.parts.columns(project(x_ND, weights, name, how.product))

    up, act = columns("up"), activation(config)
    inner = act(columns("gate")) * up if config.structure.gated else act(up)
    return project(inner, weights, "down", how.product)


def activation(config: LayerSizes) -> Callable[[jax.Array], jax.Array]:
    exact = config.structure.activation == "exact_gelu"
    return jax.nn.silu if config.structure.activation == "silu" else partial(jax.nn.gelu, approximate=not exact)


Angles = tuple[jax.Array, jax.Array]
"""cos and sin, [B, T, C/2] each."""


def rotary_angles(positions_BT: jax.Array, channels: int, theta: float, scaling: RopeScaling | None = None) -> Angles:
    """Returns cos and sin [B, T, C/2] of position * theta^(-2i/C) (Su et al., 2021, eq. 15)."""
    # [C/2]; in float32, for the angles of late positions need its precision.
    frequencies = theta ** (-jnp.arange(0, channels, 2, dtype=jnp.float32) / channels)
    if scaling is not None:
        frequencies = scaled(frequencies, scaling, theta)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    factor = attention_factor(scaling)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def scaled(frequencies: jax.Array, scaling: RopeScaling, theta: float) -> jax.Array:
    """Returns the frequencies for longer texts (`model.rope_scaling`), [C/2]."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "yarn":
        share = changed_over(len(frequencies), scaling, theta)
        return share * slow + (1 - share) * frequencies
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0: turns seldom, and is slowed down; 1: turns often, and stays.
    share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - share) * slow + share * frequencies


def changed_over(pairs: int, scaling: RopeScaling, theta: float) -> jax.Array:
    """Returns how far each pair of channels is slowed down by YaRN, from 0 to 1 (Peng et al., 2023, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(scaling.original_length / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    return jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - first) / ((last - first) or 0.001), 0.0, 1.0)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Returns what queries and keys are multiplied by: 1, but for YaRN."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention_factor is None else scaling.attention_factor


def rotate(x_BTHC: jax.Array, angles: Angles) -> jax.Array:
    """Rotates channels i and i + C/2 of each head by the position's angle i."""
    # [B, T, 1, C/2]: the same angles for all heads.
    cos, sin = (part[:, :, None, :] for part in angles)
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)
