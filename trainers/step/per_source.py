"""Loss and tokens of each source of the data, exact over micro-batches and hosts."""

from __future__ import annotations

import jax.numpy as jnp

from gangway.errors import UsageError
from trainers.protocol import Batch, Loss, Sum


def with_sources(loss: Loss, batch: Batch, names: tuple[str, ...]) -> Loss:
    """Returns `loss` with the parts `loss/NAME` and `total_tokens/NAME` of each source. Traced.

    `batch["source"]` (int32 for each row) is an index into `names`; `loss.rows` holds the loss and the targets of each row.
    """
    if not names:
        return loss
    if loss.rows is None or "source" not in batch:
        lacking = "the task's Loss has no `rows`" if loss.rows is None else f"its leaves are {', '.join(sorted(batch))}"
        raise UsageError(
            f"data.sources = {list(names)}: expected a batch with a leaf `source` and a task that tells the loss of each row; "
            f"{lacking}"
        )
    row_losses, row_targets, *others = loss.rows
    # A target of weight 0.5 is a token like any other.
    row_tokens = others[0] if others else row_targets
    parts = dict(loss.parts)
    for index, name in enumerate(names):
        # [rows]
        of_source = batch["source"] == index
        num_targets = jnp.sum(jnp.where(of_source, row_targets, 0))
        # `where`, not a product: a row of another source may have a loss that is not finite.
        parts[f"loss/{name}"] = (jnp.sum(jnp.where(of_source, row_losses, 0)), num_targets)
        parts[f"total_tokens/{name}"] = Sum(jnp.sum(jnp.where(of_source, row_tokens, 0)))
    return loss._replace(parts=parts)
