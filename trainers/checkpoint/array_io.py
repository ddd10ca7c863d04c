"""Arrays to and from files, by Orbax's handler of array trees: sharded, asynchronous, readable by plain Orbax.

Only the handler is used, none of Orbax's managers: those wait for hosts that have failed. Nothing here waits for another host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

WRITE_TIMEOUT_S = 1800


class ArrayFiles:
    def __init__(self) -> None:
        # What Orbax's threads log at length they raise as well, and what is raised is reported.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        # Of a replicated array host 0 writes all: shared out among replicas, copying took ten times as long.
        arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        self._handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True,
            use_zarr3=True,
            use_compression=False,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
            ),
        )

    def write(self, folder: Path, take: Callable[[], Any], copied: Callable[[], None]) -> None:
        """Writes this host's part of the tree that `take` hands over to `folder`, which must exist. Calls `copied` as soon as the
        arrays may be donated. To be called from a thread of its own, by all hosts. Raises whatever Orbax raises."""
        save = self._handler.async_save(epath.Path(folder), args=ocp.args.PyTreeSave(take()))
        futures = asyncio.run(save) or []
        copied()
        for future in futures:
            future.result(timeout=WRITE_TIMEOUT_S)

    def merge(self, folder: Path) -> None:
        """Makes one tree of all hosts' parts: host 0 calls this once all have written."""
        self._handler.finalize(epath.Path(folder))

    def read(self, folder: Path, abstract: Any, *, partly: bool = False) -> Any:
        """The tree in `folder`, with the shapes and shardings of `abstract`; with `partly`, what `abstract` has of it. Raises
        whatever Orbax raises."""
        places = ocp.checkpoint_utils.construct_restore_args(abstract)
        wanted = ocp.args.PyTreeRestore(item=abstract, restore_args=places, partial_restore=partly)
        return jax.block_until_ready(self._handler.restore(epath.Path(folder), args=wanted))

    def read_part(self, folder: Path, name: str) -> Any:
        """{name: what the tree in `folder` has below it}, as NumPy arrays in this host's memory: no device, no other host."""
        part = {name: self._handler.metadata(epath.Path(folder)).tree[name]}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), part)
        wanted = ocp.args.PyTreeRestore(item=jax.tree.map(lambda _: 0, part), restore_args=as_numpy, partial_restore=True)
        return self._handler.restore(epath.Path(folder), args=wanted)

    def copy_part(self, source: Path, target: Path, name: str) -> None:
        """Writes to `target` what the tree in `source` has below `name`."""
        values = self.read_part(source, name)
        self.write(target, lambda: values, lambda: None)
        self.merge(target)
