"""Errors of the training program, and what each says about trying again."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Sequence
from typing import Any


class UsageError(Exception):
    """The settings, the data or the checkpoint do not fit: trying again gives the same error. The message is for the user."""


class DataError(UsageError):
    """The data is missing, unreadable or too short."""


class CheckpointError(UsageError):
    """There are checkpoints, and none of them can be used."""


class NotConfiguredError(UsageError):
    """Something was asked for before the method that makes it was called."""


class SaveFailedError(Exception):
    """The last state of a run is not in its storage: the run has not succeeded."""


class NonFiniteLossError(Exception):
    """A loss or gradient was not finite; its update was not applied."""


class LossScaleError(NonFiniteLossError):
    """Gradients overflow float16 at the smallest scale of the loss."""


class OutOfMemoryError(Exception):
    """A device has no room. The message says for what, and what to change first."""

    def __init__(self, message: str, deterministic: bool):
        super().__init__(message)
        self.deterministic = deterministic
        """Not a step was done: trying again gives the same error."""


class LossSpikeError(Exception):
    """A loss was far above what it had been; its update was not applied."""


class DesyncError(Exception):
    """The hosts took the same step with different batches: one of them has skipped or repeated a step."""

    def __init__(self, message: str, batch_indices: Sequence[int] | None):
        super().__init__(message)
        self.batch_indices = batch_indices
        """Of each host; None if not all have said theirs."""


class CoordinatorError(Exception):
    """Another host did not answer: a consequence of its failure, not a failure of this host."""


def unknown_name(field: str, name: str, known: Sequence[str]) -> UsageError:
    """The error for a name that is neither one of `known` nor a user's `package.module:function`."""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UsageError(f"{field} = {name!r}: expected one of {', '.join(known)}, or package.module:function{hint}")


LOST_PEER_SIGNS = (
    "gloo",
    "connection closed by peer",
    "connection reset",
    "coordination",
    "heartbeat",
    "nccl",
    "deadline_exceeded",
)
OUT_OF_MEMORY_SIGNS = ("resource_exhausted", "out of memory")


def kind_of(error: BaseException) -> dict[str, Any]:
    """`kind` of failure (user, data, non_finite, loss_spike, desync, out_of_memory, storage, collateral), and whether it is
    `deterministic`; of hosts out of step, the `batch_indices`.

    JAX raises one type for everything that happens on a device or between hosts; only its message tells which.
    """
    if isinstance(error, UsageError):
        return {"kind": "data" if isinstance(error, DataError) else "user", "deterministic": True}
    if isinstance(error, OutOfMemoryError):
        return {"kind": "out_of_memory", "deterministic": error.deterministic}
    if isinstance(error, DesyncError):
        return {"kind": "desync", "deterministic": False, "batch_indices": error.batch_indices}
    kind = next((kind for types, kind in KIND_OF_TYPE.items() if isinstance(error, types)), None)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        kind = "storage"
    return {"kind": kind or _kind_of_runtime_error(error), "deterministic": False}


KIND_OF_TYPE = {
    NonFiniteLossError: "non_finite",
    LossSpikeError: "loss_spike",
    SaveFailedError: "storage",
    CoordinatorError: "collateral",
    MemoryError: "out_of_memory",
}
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def _kind_of_runtime_error(error: BaseException) -> str:
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError"):
        return "user"
    message = str(error).lower()
    if any(sign in message for sign in OUT_OF_MEMORY_SIGNS):
        return "out_of_memory"
    return "collateral" if any(sign in message for sign in LOST_PEER_SIGNS) else "user"
