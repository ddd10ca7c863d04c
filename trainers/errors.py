"""Errors of the training program, and what each says about trying again.

Three things can be said of an error, and `kind_of` says them:

- it is *deterministic*: trying again gives the same error (a wrong setting, a checkpoint of another model). The run ends.
- it looks like a *mistake* (a TypeError, a path that is not there). Where nothing has been trained yet, it is believed at the
  second time; in a run that has trained, it is more likely that something went away, and it is tried again like any other.
- neither: it may go away by itself, or on another machine. What is *transient* is tried again for `driver.restart.retry_for_s`.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from trainers import foreign_errors
from trainers.config.section import did_you_mean


class UsageError(Exception):
    """The settings, the data or the checkpoint do not fit: trying again gives the same error. The message is for the user."""


class DataError(UsageError):
    """The data was read, and does not fit: it is too short, or of another form."""


class CheckpointError(UsageError):
    """The checkpoint was read, and does not fit: it is of another model. Or a file that was to be made exists already."""


class TransientError(Exception):
    """Something outside this program did not answer, or cannot be read just now: it may go away by itself.

    A user's code may raise it, or a subclass: the run then waits and tries again instead of giving up.
    """


class DataUnavailableError(TransientError):
    """The data cannot be read just now."""


class DataMissingError(DataUnavailableError):
    """There is no data where it was looked for: a wrong path, or a mount that went away."""


class CheckpointUnavailableError(TransientError):
    """Checkpoints cannot be read just now, are missing where there should be some, or are damaged: an error of the storage.

    Training never starts again from nothing because of it.
    """


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
    hint = did_you_mean(name.lower(), known)
    return UsageError(f"{field} = {name!r}: expected one of {', '.join(known)}, or package.module:function{hint}")


def kind_of(error: BaseException) -> dict[str, Any]:
    """`kind` of failure, and whether it is `deterministic`; `mistake` where it looks like one; of hosts out of step, the
    `batch_indices`.

    Kinds: user, data, non_finite, loss_spike, desync, out_of_memory, storage, transient, device (of this host), runtime (JAX's
    own, of unknown cause), collateral (another host's failure), link (this host's or another one's).
    """
    if isinstance(error, UsageError):
        return {"kind": "data" if isinstance(error, DataError) else "user", "deterministic": True}
    if isinstance(error, OutOfMemoryError):
        return {"kind": "out_of_memory", "deterministic": error.deterministic}
    if isinstance(error, DesyncError):
        return {"kind": "desync", "deterministic": False, "batch_indices": error.batch_indices}
    kind, mistake = _kind_and_mistake(error)
    return {"kind": kind, "deterministic": False, **({"mistake": True} if mistake else {})}


def may_pass(error: BaseException) -> bool:
    """Whether it came from outside the program and may go away by itself: nothing is wrong with what was asked for."""
    kind = kind_of(error)
    return kind["kind"] in ("transient", "data", "storage") and not kind["deterministic"] and not kind.get("mistake")


def _kind_and_mistake(error: BaseException) -> tuple[str, bool]:
    for types, kind in KIND_OF_TYPE.items():
        if isinstance(error, types):
            return kind, isinstance(error, DataMissingError)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        return "storage", False
    if runtime := foreign_errors.runtime_kind(error):
        return runtime, False
    if outside := foreign_errors.outside(error):
        return "transient", outside == "mistake"
    return "user", isinstance(error, PROGRAM_ERRORS)


KIND_OF_TYPE: dict[type[BaseException], str] = {
    NonFiniteLossError: "non_finite",
    LossSpikeError: "loss_spike",
    SaveFailedError: "storage",
    CheckpointUnavailableError: "storage",
    DataUnavailableError: "data",
    TransientError: "transient",
    CoordinatorError: "collateral",
    MemoryError: "out_of_memory",
}
"""The first that fits holds: subclasses come before their base."""
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
PROGRAM_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What Python raises when a program is wrong. A RuntimeError, or a type of a library's own, may mean anything."""
