"""Files of compiled programs: their contents, which of them are trusted, how they are written, and which are deleted.

To load an executable is to run it. So a file is loaded only if it belongs to this user, nobody else may write it, and no bit of
it has changed since it was written.
"""

from __future__ import annotations

import enum
import hashlib
import io
import os
import pickle
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import jax
from jax.experimental import serialize_executable

from gangway.storage import durable, ours
from gangway.storage.documents import DocumentKind, StorageError
from trainers.jax_internals import NAMES_IN_EXECUTABLES, tree_util

MAGIC = b"gangway program 1\n"
HEADER_BYTES = len(MAGIC) + hashlib.sha256().digest_size
KEPT_DAYS = 90
"""What was not loaded for this long is deleted when something new is kept."""
IN_USE_S = 2 * 3600.0
"""What was used within this time is not deleted to make room; a process marks what it uses once an hour."""
EXACT = frozenset(
    {
        ("jax", "P"),
        *NAMES_IN_EXECUTABLES,
        ("ml_dtypes", "bfloat16"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("builtins", "set"),
        ("builtins", "frozenset"),
        ("builtins", "slice"),
        ("collections", "OrderedDict"),
    }
)
"""What JAX pickles with an executable: each by its exact module and name, for what is called by name runs."""
_own_trees: set[Any] = set()
_own: set[tuple[str, str]] = set()
"""The trees of this process's own arguments (`trust_tree`), and the names in them."""
KEPT = ours.named("a kept executable", r".+-[0-9a-f]+\.(json|xla)(\..+)?|[0-9a-f]{32}\.trying")
"""Executables and what names them, what a process that died has left of one, and the records of their use."""


class _Pointer(TypedDict):
    of: str
    executable: str


POINTER_KIND = DocumentKind("the pointer to a kept program", _Pointer, "the program is compiled again")


class UntrustedError(Exception):
    """A file or folder belongs to, or may be written by, another user; the message says what to do."""


class DamagedProgramError(Exception):
    """A file does not contain what was written."""


# ---------------------------------------------------------------------- whom a file is believed


def make_folder(folder: Path) -> None:
    """Creates a folder for this user alone. Raises UntrustedError if there is one that others may write, and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # `exist_ok` accepts a folder that somebody else made: so the owner is checked after, never before.
    check_owner(folder, os.stat(folder), f"remove it, or empty it and chmod 700 {folder}")


def check_owner(path: Path, status: os.stat_result, remedy: str) -> None:
    """Raises UntrustedError if `path` is somebody else's, or others may write it."""
    # The effective user: the one by whose rights files are opened.
    user = os.geteuid()
    if status.st_uid != user:
        raise UntrustedError(f"{path} belongs to user {status.st_uid}, this process to user {user}: {remedy}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedError(f"{path} may be written by others (mode {stat.S_IMODE(status.st_mode):o}): {remedy}")


def read(path: Path) -> bytes:
    """Returns the contents, and marks the file as in use. Raises UntrustedError and OSError."""
    with durable.reading(path) as file:
        # On the open file: between a check by name and the opening, the file could be replaced.
        check_owner(path, os.fstat(file.fileno()), "remove it")
        # Its time is that of its last use: `delete_old` goes by it.
        with suppress(OSError):
            os.utime(path)
        return file.read()


def touch(paths: list[Path]) -> None:
    """Marks the files as in use."""
    for path in paths:
        with suppress(OSError):  # somebody has deleted it
            os.utime(path)


# ---------------------------------------------------------------------- executables


def write_executable(path: Path, compiled: jax.stages.Compiled) -> None:
    """Writes an executable. Raises OSError, and whatever a tree raises that cannot be pickled, or could not be loaded."""
    payload = _serialize(compiled)
    # Read back what was pickled: what a later process could not load must not be kept.
    _, (executable, _, _) = _Trees(io.BytesIO(payload)).load()
    _Check(io.BytesIO(executable)).load()
    durable.write_shared(path, MAGIC + _digest(path.name, memoryview(payload)) + payload, 0o600)


def read_executable(path: Path) -> io.BytesIO:
    """Returns the file for `load`. Raises DamagedProgramError, UntrustedError and OSError."""
    # One read for digest and contents: the bytes that are checked are those that run.
    data = read(path)
    if data[: len(MAGIC)] != MAGIC:
        raise DamagedProgramError("it does not begin as a program of this version does")
    # Before unpickling: a pickle runs code as it is read.
    if data[len(MAGIC) : HEADER_BYTES] != _digest(path.name, memoryview(data)[HEADER_BYTES:]):
        raise DamagedProgramError("its contents are not those that were written (digests differ)")
    return io.BytesIO(data)


def load(file: io.BytesIO) -> jax.stages.Compiled:
    """Loads an executable. May raise anything: classes move, and plugins change."""
    file.seek(HEADER_BYTES)
    # Two pickles, one in the other: the inner one cannot be read before the devices of the outer one are known.
    device_ids, (executable, in_tree, out_tree) = _Trees(file).load()
    devices = {device.id: device for device in jax.devices()}
    # Given explicitly: the default is all devices, also for a program that runs on some of them.
    execution_devices = [devices[number] for number in device_ids]
    # What serialize_executable.deserialize_and_load does.
    unloaded, args_info, no_kwargs = _Executable(io.BytesIO(executable), jax.devices()[0].client, execution_devices).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)


def _serialize(compiled: jax.stages.Compiled) -> bytes:
    shardings = jax.tree.leaves(compiled.output_shardings)
    # All outputs of one program share their devices, so the first one tells.
    device_ids = [device.id for device in shardings[0]._device_assignment]
    return pickle.dumps((device_ids, serialize_executable.serialize(compiled)))


def _digest(name: str, payload: memoryview) -> bytes:
    """Includes the name: a file that was renamed is not trusted."""
    sha256 = hashlib.sha256(f"{name}\0".encode())
    sha256.update(payload)
    return sha256.digest()


def trust_tree(args: Any) -> None:
    """Lets what is read later name the classes that are in the tree of these arguments: they are this process's own. No function,
    and no class of the standard library: some of those run commands when they are created (subprocess.Popen)."""
    tree = jax.tree.structure(args)
    if tree in _own_trees:
        return
    _own_trees.add(tree)
    # A tree that cannot be pickled is kept by nobody, and need not be read.
    with suppress(Exception):
        names = _Names(io.BytesIO(pickle.dumps(tree)))
        names.load()
        _own.update(name for name in names.found if _is_plain_class(*name))


def _is_plain_class(module: str, name: str) -> bool:
    return isinstance(_named(module, name), type) and module.partition(".")[0] not in sys.stdlib_module_names


class _Names(pickle.Unpickler):
    """Reads what this process has just pickled, and notes the names in it."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.found: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        return super().find_class(module, name)


class _KnownOnly:
    """Reads pickles of EXACT, of names in this process's own trees, and of classes of trees. It imports nothing, and walks into
    no module: `jax` has `os`, and `os` has `system`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = _named(module, name)
        if found is not None and ((module, name) in EXACT or (module, name) in _own or _is_node(found)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no class that this process has imported, or none of a tree")


def _named(module: str, name: str) -> Any:
    """Returns what has this name in an imported module; None if nothing has. A dotted name is that of a class in a class."""
    # From `sys.modules`, never by import: an import would run code that a forged file names.
    found = vars(sys.modules[module]).get(name.partition(".")[0]) if module in sys.modules else None
    for part in name.split(".")[1:]:
        found = vars(found).get(part) if isinstance(found, type) else None
    return found


def _is_node(found: Any) -> bool:
    """Whether it is a class whose objects are nodes of trees: a NamedTuple, or one registered with JAX."""
    if not isinstance(found, type):
        return False
    return (issubclass(found, tuple) and hasattr(found, "_fields")) or found in tree_util._registry


def _member(cls: Any, name: str) -> enum.Enum:
    """Returns a member of an enumeration. Python 3.11.0 to 3.11.3 pickle a member as a call of `getattr`, which could also reach
    the functions of a module."""
    if isinstance(cls, enum.EnumType):
        return cls[name]
    raise pickle.UnpicklingError(f"getattr of {cls!r}, which is no enumeration")


class _Trees(_KnownOnly, pickle.Unpickler):
    pass


class _Executable(_KnownOnly, serialize_executable._JaxPjrtUnpickler):
    pass


class _Check(_KnownOnly, pickle.Unpickler):
    """Reads the names in a pickle, and makes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        super().find_class(module, name)
        return _Nothing

    def persistent_load(self, pid: Any) -> Any:
        return None


class _Nothing:
    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __hash__(self) -> int:
        return 0

    def append(self, item: Any) -> None:
        pass


# ---------------------------------------------------------------------- what an executable was made from


def write_pointer(path: Path, executable: Path) -> None:
    durable.write_shared(path, POINTER_KIND.text({"of": path.name, "executable": executable.name}).encode(), 0o600)


def read_pointer(path: Path) -> Path:
    """Returns the path of the executable. Raises DamagedProgramError, UntrustedError and OSError."""
    try:
        document = POINTER_KIND.parse(read(path), path.name)
        if document["of"] != path.name:
            raise ValueError(f"it was written as {document['of']}")
        return path.with_name(document["executable"])
    except (ValueError, StorageError, IsADirectoryError) as error:
        raise DamagedProgramError(str(error)) from error


# ---------------------------------------------------------------------- room


def delete_old(folder: Path, newest: Path, max_bytes: float | None) -> None:
    """Deletes what was not used for a long time. If the files have more than `max_bytes` together, also what was used least
    recently.

    `newest` was written just now: its time is "now" by the clock of the folder, which may be another machine's.
    """
    now_s = newest.stat().st_mtime
    # Oldest first: room is made by what was used least recently.
    files = sorted(_files(folder), key=lambda file: file[1].st_mtime)
    total_bytes = sum(status.st_size for _, status in files)
    for path, status in files:
        unused_s = now_s - status.st_mtime
        too_much = max_bytes is not None and total_bytes > max_bytes
        # A `.tmp` that nobody has touched for so long is from a process that died while writing.
        if unused_s > KEPT_DAYS * 24 * 3600 or (unused_s > IN_USE_S and (too_much or path.suffix == ".tmp")):
            with suppress(OSError):  # it is somebody else's
                ours.delete(path, KEPT)
                # Only after `unlink` has succeeded: what is still there still takes room.
                total_bytes -= status.st_size


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if not KEPT.is_on(Path(name)):
                continue  # it is somebody's own
            with suppress(OSError):  # another host has deleted it
                yield Path(parent, name), os.stat(Path(parent, name))
