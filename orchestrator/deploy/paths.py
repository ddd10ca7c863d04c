"""Which files of this machine a configuration names, and what they are called where the working folder was copied to.

Pure, but for the question whether a file is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

OF_HOSTS = ("storage", "cache_dir", "hosts")
"""Keys and sections with paths of the hosts: nothing is copied there."""


def copied(data: Mapping[str, Any], here: str) -> dict[str, Any]:
    """Returns the data of a configuration with the paths inside the working folder `here` relative to it."""
    return {name: value if name in OF_HOSTS else _relative(value, here) for name, value in data.items()}


def problems(data: Mapping[str, Any], here: str) -> Iterator[str]:
    """Yields a line for each path that is on this machine and not in its working folder."""
    for name, value in data.items():
        if name not in OF_HOSTS:
            yield from _outside(value, here, name)


def _relative(value: Any, here: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _relative(item, here) for name, item in value.items()}
    if isinstance(value, list):
        return [_relative(item, here) for item in value]
    return os.path.relpath(value, here) if isinstance(value, str) and _is_inside(value, here) else value


def _outside(value: Any, here: str, key: str) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _outside(item, here, f"{key}.{name}")
    elif isinstance(value, str) and _is_here(value) and not _is_inside(value, here):
        yield (
            f"{key} = {value}: a file or folder of this machine outside the working folder, which the hosts will not have; "
            "copy it into the working folder, or to a bucket"
        )


def _is_here(path: str) -> bool:
    full = os.path.expanduser(path)
    return os.path.isabs(full) and os.path.exists(full)


def _is_inside(path: str, here: str) -> bool:
    return os.path.isabs(path) and os.path.normpath(path).startswith(here + os.sep)
