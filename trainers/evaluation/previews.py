"""Texts that a model generates while it trains: a compiled decoder that keeps the keys and values of the tokens so far.

Dimensions: B prompts, P tokens of the longest prompt, T tokens at once, S slots of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainers.config import PreviewConfig
from trainers.errors import UsageError
from trainers.parallel import mesh as meshes
from trainers.runtime.executables import Program, ProgramStore
from trainers.runtime.together import in_stages
from trainers.step import rng


class Decoder(Protocol):
    """What a model must offer to generate. `trainers.models.llama.Llama` does."""

    def init_cache(self, batch: int, length: int) -> Any:
        """Room for the keys and values of `length` tokens: leaves [layers, batch, length, heads, channels]."""

    def decode_step(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, mask_BTS: jax.Array, cache: Any, slot: jax.Array
    ) -> tuple[jax.Array, Any]:
        """(float32 logits [B, V] of what follows the last token, the cache with these tokens in the slots from `slot` on). Token
        t may look at slot s where the mask is true."""


class TextTask(Protocol):
    """What a task must offer for previews, beside a model that is a `Decoder`."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    @property
    def tokens_per_example(self) -> int:
        """No token looks further back than the model was trained to."""


def can_generate(task: Any) -> bool:
    return hasattr(task, "encode") and hasattr(task, "decode")


def decode(
    model: Decoder,
    tokens_BP: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array,
    *,
    config: PreviewConfig,
    window: int,
    place: Callable[[Any], Any] = lambda cache: cache,
) -> jax.Array:
    """int32[B, num_tokens]: what follows each prompt. Traced; of the greedy kind, exactly what the model without a cache gives.

    Prompts lie at the right of `tokens_BP`, `lengths_B` tokens each. A token sees the last `window` tokens, itself included.
    `place` says where the cache lies.
    """
    batch, prompt = tokens_BP.shape
    first_B = prompt - lengths_B
    slots_S = jnp.arange(prompt + config.num_tokens)

    def step(tokens_BT: jax.Array, slots_T: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        back_TS = slots_T[:, None] - slots_S
        mask_BTS = ((back_TS >= 0) & (back_TS < window)) & (slots_S >= first_B[:, None])[:, None]
        # Left of a prompt there is nothing that anyone looks at: any position will do.
        positions_BT = jnp.maximum(slots_T - first_B[:, None], 0)
        logits_BV, cache = model.decode_step(tokens_BT, positions_BT, mask_BTS, cache, slots_T[0])
        return logits_BV, place(cache)

    def one(carry: tuple[jax.Array, Any], i: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        logits_BV, cache = carry
        tokens_B = pick(logits_BV, jax.random.fold_in(key, i), config)
        return step(tokens_B[:, None], prompt + i[None], cache), tokens_B

    begun = step(tokens_BP, jnp.arange(prompt), place(model.init_cache(batch, len(slots_S))))
    return jax.lax.scan(one, begun, jnp.arange(config.num_tokens))[1].T


def pick(logits_BV: jax.Array, key: jax.Array, config: PreviewConfig) -> jax.Array:
    """int32[B]: the likeliest token, or one drawn from softmax(logits / temperature), of the `top_k` likeliest, and of the
    likeliest that together have the probability `top_p` (Holtzman et al., 2020). A row's draw does not depend on the others."""
    if config.greedy or config.temperature == 0:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    logits_BV = logits_BV / config.temperature
    if config.top_k is not None:
        best_BK, _ = jax.lax.top_k(logits_BV, min(config.top_k, logits_BV.shape[-1]))
        logits_BV = jnp.where(logits_BV < best_BK[:, -1:], -jnp.inf, logits_BV)
    if config.top_p is not None:
        sorted_BV = jnp.sort(logits_BV, descending=True)
        p_BV = jax.nn.softmax(sorted_BV)
        within_BV = jnp.cumsum(p_BV, -1) - p_BV < config.top_p  # the first that goes over is still one of them
        least_B = jnp.min(jnp.where(within_BV, sorted_BV, jnp.inf), -1)
        logits_BV = jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits_BV.shape[0]))
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


@dataclass
class Previews:
    """The prompts of the configuration, continued by the model as it is. Parameters stay where they are; prompts are shared out
    among the replicas, and the cache's heads among the devices of a tensor group."""

    config: PreviewConfig
    task: TextTask
    mesh: Mesh
    seed: int
    program: Program

    @classmethod
    def of(
        cls, task: Any, merge: Callable[[Any], Any], config: PreviewConfig, mesh: Mesh, seed: int, programs: ProgramStore
    ) -> Previews:
        """`merge` makes the model of its parameters."""
        place = partial(_place, mesh)

        def continued(params: Any, tokens_BP: jax.Array, lengths_B: jax.Array, step: jax.Array) -> jax.Array:
            key, window = rng.key(seed, "preview", step), task.tokens_per_example
            return decode(merge(params), tokens_BP, lengths_B, key, config=config, window=window, place=place)

        jitted = jax.jit(continued, out_shardings=meshes.replicated(mesh))
        return cls(config, cast(TextTask, task), mesh, seed, Program("preview", jitted, programs, programs.note))

    def __call__(self, params: Any, step: int) -> tuple[list[dict[str, str]], str]:
        """(`prompt` and `text`, what follows it, of each; ""), or ([], why there are none). All hosts must call this."""

        def prepared(_: Any) -> tuple[Any, ...]:
            args = (params, *self._prompts(), meshes.put_everywhere(self.mesh, np.array(step, np.int32)))
            if self.program.compiled is None:
                self.program.prepare(*args)
            return args

        stages = (prepared, lambda args: np.asarray(self.program(*args)), self._texts)
        previews, problem = in_stages("preview", *stages)
        return previews or [], problem

    def _prompts(self) -> tuple[jax.Array, jax.Array]:
        """The prompts' tokens, on the right of [B, P], and how many each has."""
        encoded = [self._encoded(prompt) for prompt in self.config.prompts]
        rows, width = meshes.padded_rows(self.mesh, len(encoded)), max(map(len, encoded))
        tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
        for row, prompt in enumerate(encoded):
            tokens[row, width - len(prompt) :], lengths[row] = prompt, len(prompt)
        place = NamedSharding(self.mesh, PartitionSpec(meshes.BATCH_AXES))
        put = partial(jax.make_array_from_callback, sharding=place)
        return put(tokens.shape, data_callback=tokens.__getitem__), put(lengths.shape, data_callback=lengths.__getitem__)

    def _encoded(self, prompt: str) -> list[int]:
        """The last tokens of it, if it has more than the model looks back."""
        tokens = list(self.task.encode(prompt))[-self.task.tokens_per_example :]
        if not tokens:
            raise UsageError(f"previews.prompts: {prompt!r} has no tokens: expected at least one to continue from")
        return tokens

    def _texts(self, tokens_BN: np.ndarray) -> list[dict[str, str]]:
        texts = [self.task.decode(row.tolist()) for row in tokens_BN[: len(self.config.prompts)]]
        return [{"prompt": prompt, "text": text} for prompt, text in zip(self.config.prompts, texts, strict=True)]


def _place(mesh: Mesh, cache: Any) -> Any:
    def put(leaf: jax.Array) -> jax.Array:
        heads = "tensor" if leaf.shape[3] % mesh.shape["tensor"] == 0 else None
        spec = PartitionSpec(None, meshes.BATCH_AXES, None, heads, None)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(put, cache)
