"""Loss and tokens of each source of the data (its channels, in other words), exact over micro-batches and hosts."""

from __future__ import annotations

import jax.numpy as jnp

from trainers.errors import UsageError
from trainers.protocol import Batch, Loss, Sum


def with_sources(loss: Loss, batch: Batch, names: tuple[str, ...]) -> Loss:
    """`loss`, with the parts `loss/NAME` and `total_tokens/NAME` of each source. Traced.

    `batch["source"]` (int32 of each row) is a place in `names`; `loss.rows` tells what each row adds.
    """
    if not names:
        return loss
    if loss.rows is None or "source" not in batch:
        lacking = "the task's Loss has no `rows`" if loss.rows is None else f"its leaves are {', '.join(sorted(batch))}"
        raise UsageError(
            f"data.sources = {list(names)}: expected a batch with a leaf `source` and a task that tells the loss of each row; "
            f"{lacking}"
        )
    row_losses, row_targets = loss.rows
    parts = dict(loss.parts)
    for place, name in enumerate(names):
        own = batch["source"] == place
        num_targets = jnp.sum(jnp.where(own, row_targets, 0))
        parts[f"loss/{name}"] = (jnp.sum(jnp.where(own, row_losses, 0)), num_targets)
        parts[f"total_tokens/{name}"] = Sum(num_targets)
    return loss._replace(parts=parts)
