"""Writes and reads arrays by Orbax's handler of array trees: sharded, asynchronous, readable by plain Orbax.

Arrays of size zero, which the handler refuses, are None in the files. They are made again from their shapes.

Only the handler is used, none of Orbax's managers: those wait for hosts that have failed. Nothing here waits for another host.

Orbax is imported when the first array is written or read: the import takes as long as JAX's own, and in a new run the thread of
the trial save does it beside the first step. A warm process has it (`trainers.worker.IMPORTED_AHEAD`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gangway.errors import CheckpointError, CheckpointUnavailableError
from gangway.storage.store import Place
from trainers.runtime.multihost import one_line

if TYPE_CHECKING:
    from etils import epath

# Without a limit, a storage that hangs would keep this save, and with it every later one, for ever.
WRITE_TIMEOUT_S = 1800
OUTAGE = re.compile(
    r"ABORTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|INTERNAL|Timeout|timed out|"
    r"retry attempts failed|[Cc]onnect|HTTP response code: (4(?!04)|5)\d\d|ClientError|HttpError|SlowDown|EBUSY|"
    r"Forbidden|PermissionError|Access ?Denied|Errno (5|13|16)\b"
)
"""In the messages of tensorstore, and of what reads the descriptions of the arrays, for a bucket that does not answer."""


class ArrayFiles:
    _handler: Any = None

    def _open(self, folder: Place) -> tuple[Any, epath.Path]:
        """Returns Orbax's handler, and the folder as it takes it."""
        import orbax.checkpoint as ocp
        from etils import epath

        if self._handler is None:
            # What Orbax's threads log at length they also raise, and what they raise is reported.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            # Host 0 writes all of a replicated array: divided among the replicas, copying took ten times as long.
            arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
            self._handler = ocp.PyTreeCheckpointHandler(
                use_ocdbt=True,
                use_zarr3=True,
                # Random float32 hardly shrinks, and writing took two to three times as long with compression.
                use_compression=False,
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
                ),
            )
        if not folder.store.is_local:
            from trainers.checkpoint import orbax_bucket

            orbax_bucket.enable()
        return self._handler, epath.Path(folder.url)

    def write(self, folder: Place, take: Callable[[], Any], copied: Callable[[], None]) -> None:
        """Writes this host's part of the tree that `take` returns to `folder`, which must exist. Calls `copied` as soon as the
        arrays may be donated. All hosts must call this, in a thread without an event loop. Raises whatever Orbax raises."""

        import orbax.checkpoint as ocp

        handler, path = self._open(folder)

        async def begin() -> list[Any]:
            futures = await handler.async_save(path, args=ocp.args.PyTreeSave(_without_empty(take())))
            # The arrays are copied by now; the futures stand for the files. Here, for the loop takes its time to close.
            copied()
            return futures or []

        for future in asyncio.run(begin()):
            future.result(timeout=WRITE_TIMEOUT_S)

    def merge(self, folder: Place) -> None:
        """Merges the parts of all hosts into one tree. Host 0 calls this when all have written."""
        handler, path = self._open(folder)
        handler.finalize(path)

    def read(self, folder: Place, abstract: Any) -> Any:
        """Returns what `abstract` has of the tree in `folder`, with its shapes and shardings. Raises whatever Orbax raises, and
        CheckpointError if an array is not there."""
        import orbax.checkpoint as ocp

        wanted = _without_empty(abstract)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        # Partly: a checkpoint that was saved before a state had some field does not have it, not even empty.
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
        handler, path = self._open(folder)
        tree = handler.restore(path, args=args)
        # Orbax leaves the shape in the place of an array that it does not find.
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        if absent := [jax.tree_util.keystr(path) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]:
            raise CheckpointError(f"{folder} has no {', '.join(absent[:3])}")
        # Wait here, where an error of the read can still be caught.
        return jax.block_until_ready(_with_empty(tree, abstract))

    def read_parts(self, folder: Place, names: Sequence[str]) -> Any:
        """Returns {name: what the tree in `folder` has below it}, as NumPy arrays in this host's memory; None for one of size
        zero. Needs no device and no other host."""
        import orbax.checkpoint as ocp

        handler, path = self._open(folder)
        tree = handler.metadata(path).tree
        parts = {name: tree[name] for name in names}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), parts)
        args = ocp.args.PyTreeRestore(item=jax.tree.map(lambda _: 0, parts), restore_args=as_numpy, partial_restore=True)
        return handler.restore(path, args=args)

    def read_one(self, folder: Place, key: Sequence[str]) -> np.ndarray:
        """Returns one array of the tree in `folder`, whose names are `key`, in this host's memory."""
        import orbax.checkpoint as ocp

        item: Any = 0
        as_numpy: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for name in reversed(key):
            item, as_numpy = {name: item}, {name: as_numpy}
        args = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
        handler, path = self._open(folder)
        found = handler.restore(path, args=args)
        for name in key:
            found = found[name]
        return found

    def copy_parts(self, source: Place, target: Place, names: Sequence[str]) -> None:
        """Writes to `target` what the tree in `source` has below `names`."""
        values = self.read_parts(source, names)
        self.write(target, lambda: values, lambda: None)
        self.merge(target)


def is_outage(folder: Place, error: Exception) -> bool:
    """Whether a bucket did not answer, or not as it should: nothing is known of the checkpoint then."""
    return not folder.store.is_local and OUTAGE.search(f"{type(error).__name__}: {error}") is not None


@contextmanager
def outages_told(folder: Place) -> Iterator[None]:
    """Raises as CheckpointUnavailableError what is raised within because a bucket does not answer, and all else as it is."""
    try:
        yield
    except Exception as error:  # Orbax raises whatever its layers raise
        if not is_outage(folder, error):
            raise
        raise CheckpointUnavailableError(f"{folder} cannot be read: {one_line(error)}") from error


def _without_empty(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: None if leaf.size == 0 else leaf, tree)


def _with_empty(tree: Any, abstract: Any) -> Any:
    """Returns the tree with the arrays of size zero that `abstract` has."""
    found = iter(jax.tree.leaves(tree))
    return jax.tree.map(lambda leaf: _empty(leaf) if leaf.size == 0 else next(found), abstract)


def _empty(leaf: Any) -> jax.Array:
    values = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])
