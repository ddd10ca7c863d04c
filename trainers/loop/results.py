"""What is told of a run at its end."""

from __future__ import annotations

from typing import Any

from trainers.checkpoint.fingerprint import digest, leaf_names
from trainers.runtime.device import wait_for_device
from trainers.step.state import TrainState, num_parameters, wide


def describe(state: TrainState, fingerprints: Any) -> dict[str, Any]:
    """Counts, and the digests that two runs can be compared by: equal digests mean equal parameters, bit for bit, and the same
    samples, each at its place. `fingerprints` are those of all leaves of `state`. Waits for the device."""
    rows = zip(leaf_names(state), wait_for_device(fingerprints), strict=True)
    params = {name: row for name, row in rows if name.startswith(".params")}
    totals = {name: wide(wait_for_device(words)) for name, words in state.totals.items()}
    return {
        "steps": int(state.step),
        "batches": int(state.batch_index),
        "tokens": totals["tokens"],
        "samples": totals["samples"],
        "num_parameters": num_parameters(state.params),
        "params_digest": digest(list(params), list(params.values())),
        "samples_digest": f"{totals['samples_digest']:016x}",
    }
