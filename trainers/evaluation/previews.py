"""Generates texts with the model while it trains, by a compiled decoder that caches keys and values.

Dimensions: B prompts, P tokens of the longest prompt, T tokens at once, S slots of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gangway.errors import UsageError
from trainers.config import PreviewConfig
from trainers.config.frozen import BASE
from trainers.models.decoding import decode
from trainers.parallel import mesh as meshes
from trainers.parallel.platform import wait_for_device
from trainers.runtime.executables import Bound, Program, ProgramStore
from trainers.runtime.multihost import in_stages
from trainers.step import rng
from trainers.step.loss import in_mode

NO_STATE: Mapping[str, Any] = MappingProxyType({})


def can_generate(task: Any) -> bool:
    """Whether a task has what previews need beside a model that is a `Decoder`: `encode` (text -> tokens), and `decode`."""
    return hasattr(task, "encode") and hasattr(task, "decode")


def context_of(task: Any) -> int:
    """Returns how many tokens a token attends to at most: as many as an example had in training. If that is more than one
    sequence, the attribute `context_length` says it."""
    return getattr(task, "context_length", task.tokens_per_example)


@dataclass
class Previews:
    """Continues the prompts of the configuration with the present model. Parameters keep their sharding. The prompts are
    divided among the replicas, and the cache's heads among the devices of a tensor group."""

    config: PreviewConfig
    task: Any
    """What encodes the prompts, and decodes their continuations."""
    mesh: Mesh
    seed: int
    program: Program

    @classmethod
    def of(
        cls,
        task: Any,
        merge: Callable[..., Any],
        config: PreviewConfig,
        mesh: Mesh,
        seed: int,
        programs: ProgramStore,
        frozen: Bound | None = None,
    ) -> Previews:
        """Builds the previews of a task. `merge` is that of its `ModelParts`. `frozen` are the frozen weights, if there are
        any."""
        place = partial(shard_cache, mesh)

        def continued(
            params: Any, model_state: Any, tokens_BP: jax.Array, lengths_B: jax.Array, step: jax.Array, frozen: Any = NO_STATE
        ) -> jax.Array:
            key, window = rng.key(seed, "preview", step), context_of(task)
            # Sampling depends on (seed, step) alone: a replayed step shows the same texts.
            model = in_mode(merge(params, model_state, frozen=frozen.get(BASE)), training=False)
            return decode(model, tokens_BP, lengths_B, key, config=config, window=window, place=place)

        jitted = jax.jit(meshes.tracing_for(mesh, continued), out_shardings=meshes.replicated(mesh))
        return cls(config, task, mesh, seed, Program("preview", jitted, programs, programs.note, frozen))

    def __call__(self, params: Any, step: int, model_state: Any = NO_STATE) -> list[dict[str, str]]:
        """Returns `prompt` and `text`, what follows it, of each preview. `model_state` is the model's other state, without its
        parameters. All hosts must call this. Raises StageError."""

        def prepared(_: Any) -> tuple[Any, ...]:
            args = (params, dict(model_state), *self._prompts(), meshes.put_everywhere(self.mesh, np.array(step, np.int32)))
            if self.program.compiled is None:
                self.program.prepare(*args)
            return args

        # The collective has a stage of its own: the user's `encode` or `decode` may fail on one host alone.
        return in_stages("preview", prepared, lambda args: wait_for_device(self.program(*args)), self._texts)

    def _prompts(self) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens of the prompts, aligned at the right of [B, P], and the length of each."""
        encoded = [self._encoded(prompt) for prompt in self.config.prompts]
        rows, width = meshes.padded_rows(self.mesh, len(encoded)), max(map(len, encoded))
        tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
        for row, prompt in enumerate(encoded):
            # At the right: the last tokens of all prompts share one slot, so that one position decodes every row.
            tokens[row, width - len(prompt) :], lengths[row] = prompt, len(prompt)
        sharding = NamedSharding(self.mesh, PartitionSpec(meshes.batch_axes(self.mesh.shape)))
        put = partial(jax.make_array_from_callback, sharding=sharding)
        return put(tokens.shape, data_callback=tokens.__getitem__), put(lengths.shape, data_callback=lengths.__getitem__)

    def _encoded(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt; only the last ones, if it is longer than the model's context."""
        tokens = list(self.task.encode(prompt))[-context_of(self.task) :]
        if not tokens:
            raise UsageError(f"previews.prompts: {prompt!r} has no tokens: expected at least one to continue from")
        return tokens

    def _texts(self, tokens_BN: np.ndarray) -> list[dict[str, str]]:
        # Without the rows that pad the prompts for the replicas.
        texts = [self.task.decode(row.tolist()) for row in tokens_BN[: len(self.config.prompts)]]
        return [{"prompt": prompt, "text": text} for prompt, text in zip(self.config.prompts, texts, strict=True)]


def shard_cache(mesh: Mesh, cache: Any) -> Any:
    def put(leaf: jax.Array) -> jax.Array:
        # leaf: [..., B, S, heads, channels]. Heads that the tensor axis does not divide stay whole.
        heads = meshes.over_tensor(mesh, leaf.shape[-2])
        spec = PartitionSpec(*[None] * (leaf.ndim - 4), meshes.batch_axes(mesh.shape), None, heads, None)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(put, cache)
