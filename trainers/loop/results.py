"""The summary of a run at its end."""

from __future__ import annotations

from typing import Any

from trainers.checkpoint.fingerprints import digest, leaf_names
from trainers.parallel.platform import wait_for_device
from trainers.step.state import TrainState, num_parameters, wide


def describe(state: TrainState, fingerprints: Any) -> dict[str, Any]:
    """Returns counts, and two digests by which runs are compared: equal digests mean an equal model (its parameters and its
    other state), bit for bit, and the same samples, each in the same row of the same batch. `fingerprints` are those of all
    leaves of `state`. Waits for the device."""
    # Both are in the order of the leaves.
    rows = zip(leaf_names(state), wait_for_device(fingerprints), strict=True)
    # Leaf names are paths in TrainState: the digest leaves out the optimizer's moments.
    model = {name: row for name, row in rows if name.startswith((".params", ".model_state"))}
    totals = {name: wide(wait_for_device(words)) for name, words in state.totals.items()}
    return {
        "steps": int(state.step),
        "batches": int(state.batch_index),
        "tokens": totals["tokens"],
        "samples": totals["samples"],
        "num_parameters": num_parameters(state.params),
        "params_digest": digest(list(model), list(model.values())),
        "samples_digest": f"{totals['samples_digest']:016x}",
    }
