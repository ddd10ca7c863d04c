"""What sequences that several devices share (`mesh.context`) must be like. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainers.config import attention


def problems(arguments: Any, parts: int) -> Iterator[str]:
    """Yields why `parts` devices cannot share each sequence of a run. `arguments` is a `TrainingArguments`."""
    if parts == 1:
        return
    if arguments.vision is not None:
        yield (
            f"mesh.context = {parts}: tokens of images (vision) attend to each other in both directions, which no attention of "
            "divided sequences knows; use mesh.data or mesh.fsdp for these devices"
        )
    yield from attention.check(arguments.model.attention, arguments.attention_needs._replace(context=parts))
