"""The errors of the training program, and what each says about trying again.

`kind_of` says three things of an error:

- It may be *deterministic*: trying again gives the same error (a wrong setting, a checkpoint of another model). The run ends.
- It may look like a *mistake* (a TypeError, a path that does not exist). If nothing has been trained yet, the run ends when it
  happens a second time. In a run that has trained it is tried again like any other: more likely something went away.
- Otherwise it may go away by itself, or on another machine. What is *transient* is tried again for `driver.restart.retry_for_s`.
"""

from __future__ import annotations

import errno
import os
import site
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from gangway import foreign_errors
from gangway.config.importable import of_a_copy
from gangway.config.section import did_you_mean
from gangway.wire.events import FailureKind


class UsageError(Exception):
    """The settings, the data or the checkpoint do not fit: trying again gives the same error. The message is for the user."""


class ModuleError(UsageError, ValueError):
    """A user's module does more to the process, as it is imported, than to define things."""


class DataError(UsageError):
    """The data was read, and does not fit: it is too short, or has another form."""


class CheckpointError(UsageError):
    """The checkpoint was read, and does not fit: it is of another model. Or a file to be written exists already."""


class TransientError(Exception):
    """Something outside this program did not answer, or cannot be read at present. It may go away by itself.

    A user's code may raise it, or a subclass: the run then waits and tries again instead of giving up.
    """


class DataUnavailableError(TransientError):
    """The data cannot be read at present."""


class DataMissingError(DataUnavailableError):
    """There is no data at the given path: the path is wrong, or a mount went away. In a submitted job the message says that the
    working folder is a copy."""

    def __init__(self, message: str = ""):
        super().__init__(_of_a_copy(message))


class CheckpointUnavailableError(TransientError):
    """Checkpoints cannot be read at present, are missing where there should be some, or are damaged: an error of the storage.

    Training never starts again from step 0 because of it.
    """


class CheckpointMissingError(CheckpointUnavailableError):
    """There is nothing at the path of `init_from`: the path is wrong, or a mount went away. In a submitted job the message says
    that the working folder is a copy."""

    def __init__(self, message: str = ""):
        super().__init__(_of_a_copy(message))


def _of_a_copy(message: str) -> str:
    note = of_a_copy()
    # An error that came from another process has its note already.
    return message if message.endswith(note) else message + note


class NotConfiguredError(UsageError):
    """A part was used before the method that builds it was called."""


class SaveFailedError(Exception):
    """A state could not be saved as long as it was held: the run has not succeeded. To train its steps again would not help."""


class CodeMissingError(ImportError):
    """A module of the program cannot be imported on this machine. The message says which, where it was looked for, and what to
    do."""


HOW_TO_SHIP = (
    "every host needs the same code: `ray job submit --working-dir .` ships the working folder, a `runtime_env` of Ray packages; "
    "or install it in the image of the machines"
)


class NonFiniteLossError(Exception):
    """A loss or gradient was not finite; its update was not applied."""


class NonFiniteStateError(NonFiniteLossError):
    """Values of the state that were finite are infinite or NaN: it must not be saved."""

    def __init__(self, step: int, leaves: Sequence[str]):
        shown = f"{', '.join(leaves[:3])}{f' and {len(leaves) - 3} more' if len(leaves) > 3 else ''}"
        super().__init__(f"values of the state at step {step} are infinite or NaN ({shown}), so it was not saved")
        self.leaves = tuple(leaves)
        """Their names in the state."""


class LossScaleError(NonFiniteLossError):
    """Gradients overflow float16 at the smallest scale of the loss."""


class OutOfMemoryError(Exception):
    """A device has no memory left. The message says what uses it, and what to change first."""

    def __init__(self, message: str, deterministic: bool):
        super().__init__(message)
        self.deterministic = deterministic
        """True if no step was completed: trying again gives the same error."""


class LossSpikeError(Exception):
    """A loss was far above the losses before it; its update was not applied."""


class DesyncError(Exception):
    """The hosts took the same step with different batches: one of them has skipped or repeated a step."""

    def __init__(self, message: str, batch_indices: Sequence[int] | None):
        super().__init__(message)
        self.batch_indices = batch_indices
        """The batch index of each host; None if not all hosts answered."""


class CoordinatorError(Exception):
    """Another host did not answer: a consequence of its failure, not a failure of this host."""


def code_missing(error: BaseException, host_name: str, search_path: Sequence[str]) -> CodeMissingError | None:
    """Returns the error for a module that cannot be imported here; None if `error` is about something else."""
    # `load_object` explains the one that it met.
    missing = error if isinstance(error, ImportError) else error.__cause__
    if not isinstance(missing, ImportError):
        return None
    paths = ", ".join(repr(path) for path in search_path) or "nothing"
    return CodeMissingError(f"on {host_name}: {missing}; searched: {paths}; {HOW_TO_SHIP}{of_a_copy()}", name=missing.name)


def unknown_name(field: str, name: str, known: Sequence[str]) -> UsageError:
    """Returns the error for a name that is neither one of `known` nor a user's `package.module:function`."""
    hint = did_you_mean(name.lower(), known)
    return UsageError(f"{field} = {name!r}: expected one of {', '.join(known)}, or package.module:function{hint}")


def kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, UsageError):
        return {"kind": "data" if isinstance(error, DataError) else "user", "deterministic": True}
    if isinstance(error, OutOfMemoryError):
        return {"kind": "out_of_memory", "deterministic": error.deterministic}
    if isinstance(error, DesyncError):
        return {"kind": "desync", "deterministic": False, "batch_indices": error.batch_indices}
    if isinstance(error, SaveFailedError):
        return {"kind": "storage", "deterministic": True}
    kind, mistake = _kind_and_mistake(error)
    return {"kind": kind, "deterministic": False, "mistake": True} if mistake else {"kind": kind, "deterministic": False}


def may_pass(error: BaseException) -> bool:
    """Whether the error came from outside the program and may go away by itself: the request itself is not wrong."""
    kind = kind_of(error)
    return kind["kind"] in ("transient", "data", "storage") and not kind["deterministic"] and not kind.get("mistake")


def user_frame(error: BaseException) -> str | None:
    """Returns where an error arose in the user's own code, such as `/home/me/model.py, line 12, in __call__: x @ self.kernel`:
    the deepest frame outside of this project, of installed packages and of the standard library. None if there is none.

    Of errors that were raised from each other, the first one counts that has such a frame.
    """
    for raised in _first_raised_first(error, set()):
        # The file that could not be parsed was never entered: no frame is of it.
        if isinstance(raised, SyntaxError) and raised.filename and is_of_user(raised.filename):
            return f"{raised.filename}, line {raised.lineno}: {(raised.text or '').strip()}"
        frames = traceback.StackSummary.extract(traceback.walk_tb(raised.__traceback__), lookup_lines=False)
        own = [frame for frame in frames if is_of_user(frame.filename)]
        if own:
            return f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}"
    return None


def user_traceback(error: BaseException) -> str:
    """Returns the traceback of an error with the lines of the user's own code alone; empty if there are none."""
    whole = traceback.TracebackException.from_exception(error, lookup_lines=False)
    chain, found = [whole], False
    for each in chain:
        own = [frame for frame in each.stack if is_of_user(frame.filename)]
        # Without its header too.
        each.stack = traceback.StackSummary.from_list(own) if own else None  # type: ignore[assignment]
        found |= bool(own)
        chain += filter(None, (each.__cause__, each.__context__, *(each.exceptions or ())))
    return "".join(whole.format()) if found else ""


def notes_of(error: BaseException) -> list[str]:
    """Returns what this project has noted about the circumstances of an error (`while ...`); libraries note other things."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("while ")]


def _first_raised_first(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yields the causes of an error, then itself, then those during whose handling it was raised."""
    if error is None or id(error) in seen:  # a chain may be a circle
        return
    seen.add(id(error))
    yield from _first_raised_first(error.__cause__, seen)
    yield error
    # Last: an error in a user's `except` is about what the handler did, not about what it handled.
    yield from _first_raised_first(error.__context__, seen)


def is_of_user(file: str) -> bool:
    """Whether a file with code is outside of this project, of installed packages and of the standard library."""
    if file.startswith("<"):  # code that a library has made, or an interpreter's own; a notebook's cell is the user's
        return file.startswith("<ipython-input")
    return not file.startswith(_NOT_USERS) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _kind_and_mistake(error: BaseException) -> tuple[str, bool]:
    for types, kind in KIND_OF_TYPE.items():
        if isinstance(error, types):
            return kind, isinstance(error, DataMissingError | CheckpointMissingError)
    # Before the foreign errors, where any OSError with a number is transient.
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        return "storage", False
    if runtime := foreign_errors.runtime_kind(error):
        return runtime, runtime in ("runtime", "user") and _is_of_the_compiler(error)
    if outside := foreign_errors.outside(error):
        return "transient", outside == "mistake"
    # What nothing above claims comes from the program: the user's, or this one.
    return "user", isinstance(error, PROGRAM_ERRORS)


def _is_of_the_compiler(error: BaseException) -> bool:
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    return any(frame.filename.endswith(COMPILER) for frame in frames)


COMPILER = os.path.join("jax", "_src", "compiler.py")
"""Where JAX compiles a program. The same program gives the same error again."""
KIND_OF_TYPE: dict[type[BaseException], str] = {
    NonFiniteLossError: "non_finite",
    LossSpikeError: "loss_spike",
    CheckpointUnavailableError: "storage",
    DataUnavailableError: "data",
    TransientError: "transient",
    CoordinatorError: "collateral",
    MemoryError: "out_of_memory",
}
"""The first type that fits counts: subclasses come before their base."""
# No room, a quota used up, storage that is read-only, a disk that fails.
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
"""The types that Python raises when a program is wrong. A RuntimeError, or a type of a library, may mean anything."""
_PROJECT = Path(__file__).parent.parent
_NOT_USERS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(_PROJECT / package for package in ("gangway", "trainers", "orchestrator", "cluster")),
        os.path.dirname(os.__file__),
        *site.getsitepackages(),
    )
)
"""The folders of code that is not the user's: this project's, the standard library's, and those of installed packages."""
