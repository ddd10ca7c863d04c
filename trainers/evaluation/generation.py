"""Continues texts with a model: many prompts at once, or one as a stream; compiled once, with a cache.

Dimensions: B prompts, P tokens of the longest prompt, N new tokens at most, I images of a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainers.config import PreviewConfig
from trainers.evaluation.previews import shard_cache
from trainers.models.decoding import Progress, begin, go_on
from trainers.parallel import mesh as meshes

WITH_TEXTS = 16
"""After so many tokens the texts are looked at, if one of them may end with a text (`stop`)."""


@dataclass(frozen=True)
class Continuation:
    tokens: list[int]
    """The new ones, without the stop token."""
    text: str
    finish: str
    """`stop`: by a stop token or a stop text; `length`: it has as many tokens as it may have."""


@dataclass
class Generator:
    """Continues prompts with one model. A prompt gets the same tokens in any batch: each token is drawn by (seed, prompt, its
    number) alone."""

    merge: Callable[[Any], Any]
    """Builds the model from its parameters."""
    params: Any
    mesh: Mesh
    decode: Callable[[Sequence[int]], str]
    sampling: PreviewConfig
    """`num_tokens`, `greedy`, `temperature`, `top_k` and `top_p` of it."""
    window: int
    """No token attends further back."""
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end a continuation; they are not part of it."""
    seed: int = 0
    rows: int = field(default=1)
    """The prompts at once. They are as many as the mesh's replicas can divide."""

    def all(self, prompts: Sequence[Sequence[int]], images: Sequence[np.ndarray] = ()) -> Iterator[Continuation]:
        """Yields the continuation of each prompt, `rows` of them at a time. `images` are those of each prompt, [I, H, W, C], as
        many for each; none: the prompts are texts."""
        width, keys = max(map(len, prompts)), keys_of(self.seed, prompts, images)
        for start in range(0, len(prompts), self.rows):
            now = slice(start, start + self.rows)
            some = prompts[now]
            for progress in self._steps(some, images[now], keys[now], width, WITH_TEXTS if self.stop else None):
                last = progress
            yield from (self._continuation(last, row) for row in range(len(some)))

    def stream(self, prompt: Sequence[int], images: Sequence[np.ndarray] = ()) -> Iterator[str | Continuation]:
        """Yields the parts of the text as they come, and then the continuation. `images` are as for `all`, of one prompt."""
        shown = ""
        for progress in self._steps([prompt], images, keys_of(self.seed, [prompt], images), len(prompt), 1):
            found = self._continuation(progress, 0)
            whole = found.text[: len(found.text) - self._held_back(found.text, done=bool(progress.done_B[0]))]
            if whole.startswith(shown) and len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole
        if len(found.text) > len(shown):
            yield found.text[len(shown) :]
        yield found

    def _held_back(self, text: str, *, done: bool) -> int:
        """Returns how many characters at the end may still change: part of a character, or the beginning of a stop text."""
        if done:
            return 0
        if text.endswith("\ufffd"):
            return len(text) - len(text.rstrip("\ufffd"))
        parts = (size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(parts, default=0)

    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[np.ndarray],
        keys: jax.Array,
        width: int,
        every: int | None,
    ) -> Iterator[Progress]:
        """Yields the generation after every so many tokens, on the host but for its cache, and at its end."""
        rows = meshes.padded_rows(self.mesh, self.rows)
        tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            # At the right: the last tokens of all prompts share one slot, so that one position decodes every row.
            tokens[row, width - len(prompt) :], lengths[row] = prompt, len(prompt)
        padding = jax.random.split(jax.random.key(0), rows - len(prompts)) if rows > len(prompts) else keys[:0]
        keys_B = jnp.concatenate([keys, padding])
        put = partial(jax.device_put, device=NamedSharding(self.mesh, PartitionSpec(meshes.batch_axes(self.mesh.shape))))
        given = put(tokens), put(lengths)
        seen_images = put(filled(images, rows)) if images else None
        progress, stopped = self._begin(self.params, *given, seen_images), np.zeros(rows, bool)
        until, end = 0, self.sampling.num_tokens
        while until < end and not np.all(np.asarray(progress.done_B) | stopped):
            until = end if every is None else min(until + every, end)
            progress = progress._replace(done_B=progress.done_B | put(stopped))
            progress = self._go_on(self.params, progress, given[1], put(keys_B), np.int32(until), prompt=width)
            seen = self._on_host(progress)
            if self.stop:
                texts = (self.decode(seen.tokens_BN[row, : seen.num_B[row]].tolist()) for row in range(len(prompts)))
                stopped[: len(prompts)] = [any(stop in text for stop in self.stop) for text in texts]
            yield seen._replace(done_B=seen.done_B | stopped)

    def _on_host(self, progress: Progress) -> Progress:
        # Copies: what is on the device is donated to the next step.
        copied: dict[str, Any] = {name: np.array(getattr(progress, name)) for name in ("tokens_BN", "num_B", "done_B", "at")}
        return progress._replace(**copied)

    def _continuation(self, progress: Progress, row: int) -> Continuation:
        tokens = progress.tokens_BN[row, : progress.num_B[row]].tolist()
        finish = "length"
        if tokens and tokens[-1] in self.stop_ids:
            tokens, finish = tokens[:-1], "stop"
        text = self.decode(tokens)
        ends = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return Continuation(tokens, text[: min(ends)], "stop") if ends else Continuation(tokens, text, finish)

    @cached_property
    def _begin(self) -> Any:
        settings: dict[str, Any] = {
            "num_tokens": self.sampling.num_tokens,
            "window": self.window,
            "place": partial(shard_cache, self.mesh),
        }

        def beginning(params: Any, tokens_BP: jax.Array, lengths_B: jax.Array, images_BIHWC: jax.Array | None) -> Progress:
            return begin(self.merge(params), tokens_BP, lengths_B, images_BIHWC=images_BIHWC, **settings)

        return jax.jit(beginning)

    @cached_property
    def _go_on(self) -> Any:
        settings: dict[str, Any] = {"config": self.sampling, "stop_ids": self.stop_ids, "window": self.window}

        def further(params: Any, progress: Progress, *given: jax.Array, prompt: int) -> Progress:
            place = partial(shard_cache, self.mesh)
            return go_on(self.merge(params), progress, *given, prompt=prompt, place=place, **settings)

        # The cache is donated: there is no room for two.
        return jax.jit(further, static_argnames="prompt", donate_argnums=1)


def filled(images: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """Returns the images of all rows, [B, I, H, W, C]: empty ones in rows without a prompt."""
    found = np.zeros((rows, *images[0].shape), np.float32)
    found[: len(images)] = images
    return found


def keys_of(seed: int, prompts: Sequence[Sequence[int]], images: Sequence[np.ndarray] = ()) -> jax.Array:
    """Returns the random key of each prompt with its images: the same alone and among others. The same prompt once more gets
    another."""
    seen: dict[bytes, int] = {}
    keys, contents_of_images = [], [each.tobytes() for each in images] or [b""] * len(prompts)
    for prompt, contents in zip(prompts, contents_of_images, strict=True):
        digest = hashlib.sha256(np.asarray(prompt, np.int32).tobytes() + contents).digest()
        number = seen[digest] = seen.get(digest, -1) + 1
        word = int.from_bytes(digest[:4], "little")
        keys.append(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), word), number))
    return jnp.stack(keys)
