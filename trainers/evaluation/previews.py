"""Texts that a model generates while it trains: a compiled decoder that keeps the keys and values of the tokens so far.

Dimensions: B prompts, P tokens of the longest prompt, T tokens at once, S slots of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainers.config import PreviewConfig
from trainers.errors import UsageError
from trainers.models.decoding import decode
from trainers.parallel import mesh as meshes
from trainers.runtime.device import wait_for_device
from trainers.runtime.executables import Program, ProgramStore
from trainers.runtime.multihost import in_stages
from trainers.step import rng


class TextTask(Protocol):
    """What a task must offer for previews, beside a model that is a `Decoder`."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    @property
    def tokens_per_example(self) -> int:
        """No token looks further back than the model was trained to."""


def can_generate(task: Any) -> bool:
    return hasattr(task, "encode") and hasattr(task, "decode")


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

        stages = (prepared, lambda args: wait_for_device(self.program(*args)), self._texts)
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
