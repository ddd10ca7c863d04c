"""What sequences that several devices share (`mesh.context`) must be like. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainers.config import attention

CHUNKS = 2
"""Of a sequence, for each device: an early one and a late one."""


def problems(arguments: Any, parts: int) -> Iterator[str]:
    """Yields why `parts` devices cannot share each sequence of a run. `arguments` is a `TrainingArguments`."""
    if parts == 1:
        return
    if arguments.vision is not None:
        yield (
            f"mesh.context = {parts}: tokens of images (vision) attend to each other in both directions, which no attention of "
            "divided sequences knows; use mesh.data or mesh.fsdp for these devices"
        )
    length = arguments.data.sequence_length
    if length % (CHUNKS * parts):
        yield (
            f"mesh.context = {parts}: {of_length(length, parts)} (data.sequence_length), and the nearest "
            f"{nearest_parts(length, parts)}"
        )
    yield from attention.check(arguments.model.attention, arguments.attention_needs._replace(context=parts))


def of_length(length: int, parts: int) -> str:
    """Returns what is wrong with a length, and the nearest that fit."""
    multiple = CHUNKS * parts
    below = length // multiple * multiple
    nearest = f"lengths are {below} and {below + multiple}" if below else f"length is {multiple}"
    return (
        f"a sequence of {length} tokens has no {CHUNKS} x {parts} equal chunks, an early and a late one for each device; the "
        f"nearest {nearest}"
    )


def nearest_parts(length: int, parts: int) -> str:
    """Returns the numbers of devices next to `parts` that can share a sequence of this length."""
    fits = [number for number in range(1, length // CHUNKS + 1) if length % (CHUNKS * number) == 0] or [1]
    nearest = [*[number for number in fits if number < parts][-1:], *[number for number in fits if number > parts][:1]]
    return f"sizes of mesh.context are {nearest[0]} and {nearest[1]}" if len(nearest) > 1 else f"size of it is {nearest[0]}"
