"""Notices that a machine is about to be taken away: from a file, from the cloud's metadata server, from Ray."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import NoReturn

from gangway.wire.events import MachineTakenAway

Source = Callable[[], MachineTakenAway | None]
"""A function that asks one source once. It raises OSError if there is no answer."""

INTERVAL_S = 1.0
METADATA_URL = "http://metadata.google.internal"
METADATA_URL_VARIABLE = "GANGWAY_METADATA_URL"
METADATA_TIMEOUT_S = 2.0
PREEMPTION_DEADLINE_S = 30.0
"""The time that Google Cloud gives a preempted machine: https://cloud.google.com/compute/docs/instances/preemptible."""


def sources(notice_file: str | None, metadata: str | None) -> list[Source]:
    """Returns the sources of a machine's notices. `metadata`: `gce`, or none."""
    result: list[Source] = []
    if notice_file:
        path = os.path.expanduser(notice_file)
        result.append(lambda: read_notice_file(path))
    if metadata == "gce":
        url = os.environ.get(METADATA_URL_VARIABLE, METADATA_URL)
        result.append(lambda: ask_gce(url))
    return result


def poll_sources(
    sources: Sequence[Source], on_answer: Callable[[MachineTakenAway | None], None], on_trouble: Callable[[str], None]
) -> NoReturn:
    """Asks all sources again and again, and never returns. A source that does not answer is reported once an
    outage; its last answer stays."""
    silent: set[int] = set()
    answers: dict[int, MachineTakenAway | None] = {}
    while True:
        for number, source in enumerate(sources):
            try:
                answers[number] = source()
                silent.discard(number)
            except OSError as error:
                # Not an answer of None, which would withdraw a notice, and report it as a new one a second later.
                if number not in silent:
                    silent.add(number)
                    on_trouble(f"this machine cannot learn whether it is about to be taken away: {error}")
        # None too: a notice file that was removed withdraws its notice.
        on_answer(next(filter(None, answers.values()), None))
        time.sleep(INTERVAL_S)


def read_notice_file(path: str) -> MachineTakenAway | None:
    """Returns a notice if the file exists, whatever it holds. JSON in it may give the reason and the deadline."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
    except ValueError:
        # An empty file, or plain text, counts too: whoever writes it may have no time for JSON.
        content = {"reason": text.strip()}
    content = content if isinstance(content, dict) else {}
    deadline_s = content.get("deadline_s")
    return {
        "reason": str(content.get("reason") or f"{path} exists"),
        "deadline_s": float(deadline_s) if isinstance(deadline_s, int | float) else None,
    }


def ask_gce(base_url: str) -> MachineTakenAway | None:
    """Asks Google Cloud about this machine: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice.
    A live migration gives no notice: the machine stays."""
    if _metadata(base_url, "preempted") == "TRUE":
        return {"reason": "the machine is preempted", "deadline_s": PREEMPTION_DEADLINE_S}
    if _metadata(base_url, "maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
        return {"reason": "the machine is to be terminated for maintenance", "deadline_s": None}
    return None


def draining_nodes() -> dict[str, float | None]:
    """Returns the nodes that Ray is draining, by node id, with the seconds that are left (None: not known). Takes about 1 ms."""
    from cluster.ray_internals import state

    now_s = time.time()
    return {node: max(0.0, at_ms / 1000 - now_s) if at_ms else None for node, at_ms in state.get_draining_nodes().items()}


def _metadata(base_url: str, name: str) -> str:
    request = urllib.request.Request(f"{base_url}/computeMetadata/v1/instance/{name}", headers={"Metadata-Flavor": "Google"})
    # Never through a proxy: the server answers about the machine that asks.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=METADATA_TIMEOUT_S) as answer:
            return answer.read().decode(errors="replace").strip()
    except http.client.HTTPException as error:  # something else than a metadata server answers
        raise OSError(f"{request.full_url}: {error!r}") from error
