"""Requests to a run while it goes on, from anywhere that sees its storage: a document each, in the folder `requests` of the run.

`gangway stop RUN` writes one. The driver finds it with its next look, within seconds, does it, and deletes the document.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, fields
from typing import Literal

from gangway.storage import documents, ours
from gangway.storage.opening import place_of_run
from gangway.storage.store import Place

FOLDER = "requests"
MARK = ours.named("a request", r"(stop|save)-[0-9a-f]{12}\.json")
STOP, SAVE = "stop", "save"
Kind = Literal["stop", "save"]


@dataclass(frozen=True, kw_only=True)
class Request:
    kind: Kind
    launch_id: str
    """The launch that is asked: a later one of the same run is not meant."""
    by: str
    """Who asks: user and host, for people."""
    at_s: float
    """Unix time of the one who asks, for people."""


KIND = documents.DocumentKind("requests/KIND-ID.json", Request, "the driver does not do it")


def send(run_dir: str, kind: Kind, launch_id: str) -> str:
    """Writes a request to the driver of a launch; returns its path. Raises OSError or StorageError."""
    request = Request(kind=kind, launch_id=launch_id, by=_who(), at_s=time.time())
    place = place_of_run(run_dir) / FOLDER / f"{kind}-{uuid.uuid4().hex[:12]}.json"
    KIND.write(place, asdict(request))
    return place.url


def take(run_dir: str, launch_id: str) -> list[Request]:
    """Returns the requests to this launch, and deletes all that there are: those to an earlier launch came too late. A link that
    somebody has planted is none. Raises OSError."""
    found = []
    folder = place_of_run(run_dir) / FOLDER
    for name in sorted(entry.name for entry in folder.list() if "/" not in entry.name and MARK.is_on(folder / entry.name)):
        request = _read(folder / name)
        if request is not None and request.launch_id == launch_id:
            found.append(request)
        # After it was read: of two drivers, the one that is superseded must not take a request with it.
        ours.delete(folder / name, MARK)
    return sorted(found, key=lambda request: request.at_s)


def is_waiting(path: str) -> bool:
    """Whether the driver has not taken a request yet."""
    return documents.exists(path)


def _read(path: Place) -> Request | None:
    """Returns the request in a document; None if it is none that this version knows."""
    try:
        found = KIND.read(path)
    except documents.StorageError:
        return None
    return None if found is None else Request(**{item.name: found[item.name] for item in fields(Request)})


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container has users without a name
        return f"user {os.getuid()}@{socket.gethostname()}"
