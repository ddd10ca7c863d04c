"""The state of a stream of data in a checkpoint: a resumed run sets it, and does not read the data again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from trainers.runtime import multihost

KEY = "data_state"
"""The key in the meta of a checkpoint."""


@dataclass
class DataState:
    """The states of the streams of all hosts. `loader` is that of the training. All hosts must call its methods alike."""

    loader: Any
    global_batch_size: int
    note: Callable[[str], None]
    """Tells something, on host 0 alone."""

    def meta(self, batch_index: int) -> dict[str, Any]:
        """Returns what a checkpoint at `batch_index` has of the data, on host 0; empty if the data has no state."""
        if not getattr(self.loader, "is_stream", False):
            return {}
        # Asked of every stream, with a state or without one: a host that did not take part would leave the others waiting.
        states = multihost.to_host0("data state", self.loader.state_at(batch_index))
        if states is None or None in states:
            return {}
        same = all(state == states[0] for state in states)
        about = {"num_hosts": len(states), "global_batch_size": self.global_batch_size}
        return {KEY: {**about, "states": states[:1] if same else states}}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Sets the streams as `meta` has recorded them. If the gang or the batches are others now, they are not set: then the
        data is read again up to its position, which a note tells."""
        recorded = meta.get(KEY)
        if recorded is None or not getattr(self.loader, "is_stream", False):
            return
        if problem := self._problem(recorded):
            self.note(f"the state of the data was not used: {problem}; the data is read again up to its position")
            return
        states = recorded["states"]
        self.loader.remember(meta["batch_index"], states[0] if len(states) == 1 else states[jax.process_index()])

    def _problem(self, recorded: Mapping[str, Any]) -> str:
        """Returns why the recorded states do not fit; empty if they do. The same on all hosts."""
        saved_by, hosts = recorded["num_hosts"], jax.process_count()
        # Of a stream that every host reads as a whole, one state is that of any number of hosts.
        one_for_all = self.loader.is_shared and len(recorded["states"]) == 1
        if saved_by != hosts and not one_for_all:
            return f"it was saved by {saved_by} host{'s' if saved_by > 1 else ''}, and the run has {hosts} now"
        if recorded["global_batch_size"] != self.global_batch_size:
            return f"it is of batches of {recorded['global_batch_size']}, and global_batch_size is {self.global_batch_size} now"
        return ""
