"""What is left of a generation that failed: every host halted and asked, the evidence kept in files, and told to the user."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from cluster.gang import Gang
from orchestrator import failures, storage
from orchestrator.failures import Failure
from orchestrator.generation import Generation

AGENT_TIMEOUT_S = 20.0
"""For an agent's answer to a call that does not wait for its process."""
SUSPECT_TIMEOUT_S = 2.0
"""The same for one that owed an answer already: the others have better things to do than to wait for a dead machine."""


@dataclass(frozen=True)
class Findings:
    failure: Failure
    last_step: int
    """The furthest that any host got."""
    stacks: Mapping[int, str]
    """Of each host whose process was alive and was looked at."""


def examine(gang: Gang, generation: Generation) -> Findings:
    """Halts all hosts, and says what happened."""
    if generation.overdue:
        _ask_all(gang, generation, "take_stacks")
    answers = _ask_all(gang, generation, "halt")
    dead = [
        failures.read_post_mortem(host, answers[host], done=host in generation.done, notice=generation.notices.get(host))
        for host in range(generation.num_hosts)
    ]
    return Findings(
        failure=failures.classify(dead, lost_hosts(generation)),
        last_step=max((d.last_step or 0 for d in dead), default=0),
        stacks={d.host: d.stacks for d in dead if d.stacks},
    )


def _ask_all(gang: Gang, generation: Generation, method: str) -> list[Any]:
    """Each host's answer; None of one whose agent is gone, or as good as that: from then on it counts as gone."""
    calls = {host: gang.call(host, method) for host in range(generation.num_hosts) if generation.broken.get(host) != "agent"}
    asked_s = time.monotonic()
    answers: list[Any] = []
    for host in range(generation.num_hosts):
        timeout_s = SUSPECT_TIMEOUT_S if host in generation.suspects else AGENT_TIMEOUT_S
        try:
            left_s = max(0.0, asked_s + timeout_s - time.monotonic())
            answers.append(ray.get(calls[host], timeout=left_s) if host in calls else None)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            generation.broken[host] = "agent"
            answers.append(None)
    return answers


def lost_hosts(generation: Generation) -> tuple[int, ...]:
    """Those whose agent is gone."""
    return tuple(host for host, how in generation.broken.items() if how == "agent")


def keep_stacks(run_dir: str, number: int, texts: Mapping[int, str]) -> str | None:
    """Writes each host's stacks to a file of its own; returns their folder, or None if there are none or it cannot be written."""
    if not texts or storage.is_url(run_dir):
        return None
    folder = storage.join(run_dir, "incidents", f"{number:04d}")
    try:
        os.makedirs(folder, exist_ok=True)
        for host, text in texts.items():
            with open(storage.join(folder, f"host-{host:04d}.txt"), "w", encoding="utf-8") as file:
                file.write(text)
    except OSError:
        return None
    return folder


def epitaph(failure: Failure, reason: str) -> str:
    """The last word to the user: their traceback, or what the process printed; what happened; why it is over."""
    exception = failure.exception or {}
    where = f" on host {failure.host}" if failure.host is not None else ""
    details = exception.get("traceback") or "\n".join(failure.evidence.get("log_tail", []))
    text = f"{failure.kind}{where}: {failure.summary}\ngiving up: {reason}"
    return text if exception.get("deterministic") or not details else f"{details.rstrip()}\n\n{text}"
