"""Files of compiled programs: what is in them, whom they are believed, how they are written, and which are deleted.

To load an executable is to run it. So a file is loaded only if it belongs to this user, nobody else may write it, and no bit of
it has changed since it was written.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from trainers.storage import durable, sealed

MAGIC = b"gangway program 1\n"
HEADER_BYTES = len(MAGIC) + hashlib.sha256().digest_size
KEPT_DAYS = 90
"""What nobody has loaded for so long is deleted when something new is kept."""
IN_USE_S = 2 * 3600.0
"""What was used in so long is not deleted to make room: a process says once an hour what it uses."""
LIBRARIES = ("jax", "jaxlib", "numpy", "ml_dtypes")
"""JAX pickles objects of these, and calls their functions."""
PLAIN = ("builtins", "collections")
"""Modules of the standard library of which classes may be in a tree."""


class UntrustedError(Exception):
    """A file or folder is not ours alone; the message says what to do."""


class DamagedProgramError(Exception):
    """A file does not hold what was written."""


# ---------------------------------------------------------------------- whom a file is believed


def make_folder(folder: Path) -> None:
    """For this user alone. Raises UntrustedError if there is one that others may write, and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder, os.stat(folder), f"remove it, or empty it and chmod 700 {folder}")


def check_owner(path: Path, status: os.stat_result, remedy: str) -> None:
    """Raises UntrustedError if `path` is somebody else's, or others may write it."""
    user = os.geteuid()
    if status.st_uid != user:
        raise UntrustedError(f"{path} belongs to user {status.st_uid}, this process to user {user}: {remedy}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedError(f"{path} may be written by others (mode {stat.S_IMODE(status.st_mode):o}): {remedy}")


def read(path: Path) -> bytes:
    """All of the file; marks it as in use. Raises UntrustedError and OSError."""
    with open(path, "rb") as file:
        check_owner(path, os.fstat(file.fileno()), "remove it")
        with suppress(OSError):
            os.utime(path)
        return file.read()


def touch(paths: list[Path]) -> None:
    """Marks them as in use."""
    for path in paths:
        with suppress(OSError):  # somebody has deleted it
            os.utime(path)


# ---------------------------------------------------------------------- executables


def write_executable(path: Path, compiled: jax.stages.Compiled) -> None:
    """Raises OSError, and whatever a tree raises that cannot be pickled, or would not be loaded."""
    payload = _serialize(compiled)
    _Trees(io.BytesIO(payload)).load()
    durable.write_shared(path, MAGIC + _digest(path.name, memoryview(payload)) + payload, 0o600)


def read_executable(path: Path) -> io.BytesIO:
    """To be given to `load`. Raises DamagedProgramError, UntrustedError and OSError."""
    data = read(path)
    if data[: len(MAGIC)] != MAGIC:
        raise DamagedProgramError("it does not begin as a program of this version does")
    if data[len(MAGIC) : HEADER_BYTES] != _digest(path.name, memoryview(data)[HEADER_BYTES:]):
        raise DamagedProgramError("its contents are not those that were written (digests differ)")
    return io.BytesIO(data)


def load(file: io.BytesIO) -> jax.stages.Compiled:
    """Raises anything: classes move, and plugins change."""
    file.seek(HEADER_BYTES)
    device_ids, (executable, in_tree, out_tree) = _Trees(file).load()
    devices = {device.id: device for device in jax.devices()}
    # Said explicitly: it would take all devices there are, also for a program that runs on some of them.
    places = [devices[number] for number in device_ids]
    # As serialize_executable.deserialize_and_load does it.
    unloaded, args_info, no_kwargs = _Executable(io.BytesIO(executable), jax.devices()[0].client, places).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)


def _serialize(compiled: jax.stages.Compiled) -> bytes:
    places = jax.tree.leaves(compiled.output_shardings)
    device_ids = [device.id for device in places[0]._device_assignment]
    return pickle.dumps((device_ids, serialize_executable.serialize(compiled)))


def _digest(name: str, payload: memoryview) -> bytes:
    """With the name: a file is not believed in another's place."""
    found = hashlib.sha256(f"{name}\0".encode())
    found.update(payload)
    return found.digest()


class _Known:
    """Reads a pickle of what JAX itself pickles, and of classes in modules that this process has imported anyway: those of trees.
    Nothing is imported for it, and no function of another library is called."""

    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if package in LIBRARIES and found is not None:
            return found
        if isinstance(found, type) and (package in PLAIN or package not in sys.stdlib_module_names):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no class that this process has imported")


class _Trees(_Known, pickle.Unpickler):
    pass


class _Executable(_Known, serialize_executable._JaxPjrtUnpickler):
    pass


# ---------------------------------------------------------------------- what an executable was made from


def write_pointer(path: Path, executable: Path) -> None:
    durable.write_shared(path, sealed.seal({"of": path.name, "executable": executable.name}).encode(), 0o600)


def read_pointer(path: Path) -> Path:
    """The executable. Raises DamagedProgramError, UntrustedError and OSError."""
    try:
        document = sealed.unseal(read(path).decode())
        if document["of"] != path.name:
            raise ValueError(f"it was written as {document['of']}")
        return path.with_name(document["executable"])
    except (ValueError, KeyError) as error:
        raise DamagedProgramError(str(error)) from error


# ---------------------------------------------------------------------- room


def delete_old(folder: Path, newest: Path, max_bytes: float | None) -> None:
    """Deletes what was not used for long. Where all is more than `max_bytes`, also what was used least recently.

    `newest` was written just now: by the folder's clock, which may be another machine's.
    """
    now_s = newest.stat().st_mtime
    files = sorted(_files(folder), key=lambda found: found[1].st_mtime)
    total_bytes = sum(status.st_size for _, status in files)
    for path, status in files:
        unused_s = now_s - status.st_mtime
        too_much = max_bytes is not None and total_bytes > max_bytes
        if unused_s > KEPT_DAYS * 24 * 3600 or (unused_s > IN_USE_S and (too_much or path.suffix == ".tmp")):
            with suppress(OSError):  # another host of this machine was faster, or it is somebody else's
                path.unlink()
                total_bytes -= status.st_size


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another host has deleted it
                yield Path(parent, name), os.stat(Path(parent, name))
