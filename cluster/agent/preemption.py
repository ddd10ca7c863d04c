"""Notices that a machine is about to be taken away: from a file, from the cloud's metadata server, from Ray."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

Notice = dict[str, Any]
"""`reason`, and `deadline_s`: seconds that are left, None if nobody says."""
Source = Callable[[], Notice | None]
"""Asks once. Raises OSError if there is no answer."""

INTERVAL_S = 1.0
METADATA_URL = "http://metadata.google.internal"
METADATA_URL_VARIABLE = "GANGWAY_METADATA_URL"
METADATA_TIMEOUT_S = 2.0
PREEMPTION_DEADLINE_S = 30.0
"""What Google Cloud leaves a preempted machine: https://cloud.google.com/compute/docs/instances/preemptible."""


def sources(notice_file: str | None, metadata: str | None) -> list[Source]:
    """Where a machine's notices come from. `metadata`: `gce`, or none."""
    found: list[Source] = []
    if notice_file:
        path = os.path.expanduser(notice_file)
        found.append(lambda: read_notice_file(path))
    if metadata == "gce":
        url = os.environ.get(METADATA_URL_VARIABLE, METADATA_URL)
        found.append(lambda: ask_gce(url))
    return found


def keep_asking(
    sources: Sequence[Source], on_answer: Callable[[Notice | None], None], on_trouble: Callable[[str], None]
) -> NoReturn:
    """Asks all sources again and again. A source that does not answer is told of once."""
    silent: set[int] = set()
    while True:
        found = None
        for number, source in enumerate(sources):
            try:
                found = found or source()
            except OSError as error:
                if number not in silent:
                    silent.add(number)
                    on_trouble(f"this machine cannot learn whether it is about to be taken away: {error}")
        on_answer(found)
        time.sleep(INTERVAL_S)


def read_notice_file(path: str) -> Notice | None:
    """A notice if the file is there, whatever it holds; JSON in it may say more."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        said = json.loads(text)
    except ValueError:
        said = {"reason": text.strip()}
    said = said if isinstance(said, dict) else {}
    deadline_s = said.get("deadline_s")
    return {
        "reason": str(said.get("reason") or f"{path} exists"),
        "deadline_s": float(deadline_s) if isinstance(deadline_s, int | float) else None,
    }


def ask_gce(base_url: str) -> Notice | None:
    """What Google Cloud says of this machine: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice.
    Live migration is none: the machine stays."""
    if _metadata(base_url, "preempted") == "TRUE":
        return {"reason": "the machine is preempted", "deadline_s": PREEMPTION_DEADLINE_S}
    if _metadata(base_url, "maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
        return {"reason": "the machine is to be terminated for maintenance", "deadline_s": None}
    return None


def draining_nodes() -> dict[str, float | None]:
    """The machines that Ray is told to empty, by node id, and the seconds that are left (None: nobody says). Takes about 1 ms."""
    from ray._private.state import state  # as in Ray Train: there is no public way to ask

    now_s = time.time()
    return {node: max(0.0, at_ms / 1000 - now_s) if at_ms else None for node, at_ms in state.get_draining_nodes().items()}


def _metadata(base_url: str, name: str) -> str:
    request = urllib.request.Request(f"{base_url}/computeMetadata/v1/instance/{name}", headers={"Metadata-Flavor": "Google"})
    # Never through a proxy: the server answers for the machine that asks.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=METADATA_TIMEOUT_S) as answer:
            return answer.read().decode(errors="replace").strip()
    except http.client.HTTPException as error:  # what answers is no such server
        raise OSError(f"{request.full_url}: {error!r}") from error
