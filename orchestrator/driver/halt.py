"""What is left of a generation that failed: every host halted and asked, the evidence kept in files, and told to the user."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.gang.gang import Gang
from orchestrator.driver.ask_hosts import ask_hosts
from orchestrator.driver.generation import Generation
from orchestrator.failures import classify
from orchestrator.failures.classify import Failure
from trainers.storage import documents

AGENT_TIMEOUT_S = 20.0
"""For an agent's answer to a call that does not wait for its process."""
SUSPECT_TIMEOUT_S = 2.0
"""The same for one that owed an answer already: the others have better things to do than to wait for a dead machine."""
DYING_TIMEOUT_S = 600.0
"""For a process that was killed to be gone: to give a terabyte of memory back takes minutes."""
KEPT_STACKS = 20
"""Incidents of which the stacks are kept: the newest."""
KEPT_STACKS_BYTES = 256 << 20


@dataclass(frozen=True)
class Findings:
    failure: Failure
    last_step: int
    """The furthest that any host got."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Of each host whose process was alive and was looked at."""


class Halt:
    """Halts all hosts of a generation, and asks them what is known. All of it at once for all hosts."""

    def __init__(self, gang: Gang, generation: Generation, clock: Callable[[], float] = time.monotonic):
        self._gang, self._generation, self._clock = gang, generation, clock
        self.began_s = clock()
        """When the hosts were asked to halt."""

    def run(self, cursors: Mapping[int, int], waiting: Callable[[list[int]], None]) -> dict[int, Any]:
        """Each host's answer to `halt`, with its events since its cursor; none from a host whose agent is gone or silent.

        `waiting` is called with the hosts whose processes take long to die.
        """
        if self._generation.overdue:
            self._ask(range(self._generation.num_hosts), lambda host: self._gang.call(host, "take_stacks"))
        self.began_s = self._clock()
        answers = self._ask(range(self._generation.num_hosts), lambda host: self._call_halt(host, cursors))
        while dying := [host for host, answer in answers.items() if not answer.get("gone", True)]:
            if self._clock() - self.began_s > DYING_TIMEOUT_S:
                for host in dying:
                    self._generation.lose_agent(host)
                    del answers[host]
                break
            waiting(dying)
            answers = {**answers, **self._ask(dying, lambda host: self._call_halt(host, cursors))}
            answers = {host: answer for host, answer in answers.items() if self._generation.broken.get(host) != "agent"}
        return answers

    def _call_halt(self, host: int, cursors: Mapping[int, int]) -> Any:
        return self._gang.call(host, "halt", cursor=cursors.get(host, 0))

    def _ask(self, hosts: Iterable[int], call: Callable[[int], Any]) -> dict[int, Any]:
        """The answers of those hosts that answer. The suspects are given less time."""
        generation = self._generation
        limits_s = {
            host: SUSPECT_TIMEOUT_S if host in generation.suspects else AGENT_TIMEOUT_S
            for host in hosts
            if generation.broken.get(host) != "agent"
        }
        return ask_hosts(self._gang, generation, call, limits_s, self._clock)


def find_cause(generation: Generation, answers: Mapping[int, Mapping[str, Any]], asked_at_s: float) -> Findings:
    """What happened to a generation. `answers`: of those hosts that answered to `halt`; `asked_at_s`: when they were asked, by
    the driver's clock, which tells the time of every failure."""
    dead = [
        classify.read_post_mortem(
            host, answers.get(host), asked_at_s, done=host in generation.done, notice=generation.notices.get(host)
        )
        for host in range(generation.num_hosts)
    ]
    return Findings(
        failure=classify.classify(dead, lost_hosts(generation)),
        last_step=max((d.last_step or 0 for d in dead), default=0),
        stacks={d.host: d.stacks for d in dead if d.stacks},
    )


def late_events(answers: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of the answers to `halt`, what the hosts had told since they were last polled, as answers to a poll."""
    told = {host: answer for host, answer in answers.items() if "events" in answer}
    return {
        host: {"events": answer["events"], "cursor": answer["cursor"], "heartbeat": answer.get("last_heartbeat")}
        for host, answer in told.items()
    }


def lost_hosts(generation: Generation) -> tuple[int, ...]:
    """Those whose agent is gone."""
    return tuple(host for host, how in generation.broken.items() if how == "agent")


def stacks_folder(run_dir: str, number: int) -> str:
    """Where the stacks of an incident are kept."""
    return documents.join(run_dir, "incidents", f"{number:04d}")


def write_stacks(folder: str, texts: Mapping[int, str]) -> None:
    """Writes each host's stacks to a file of its own, and removes those of old incidents. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    for host, text in texts.items():
        with open(documents.join(folder, f"host-{host:04d}.txt"), "w", encoding="utf-8") as file:
            file.write(text)
    newest_first = sorted((path for path in Path(folder).parent.iterdir() if path.name.isdigit()), reverse=True)
    num_bytes = 0
    for place, path in enumerate(newest_first):
        num_bytes += sum(file.stat().st_size for file in path.iterdir())
        if place >= KEPT_STACKS or (place and num_bytes > KEPT_STACKS_BYTES):
            shutil.rmtree(path)


def final_error(failure: Failure, reason: str) -> str:
    """The last word to the user: their traceback, or what the process printed; what happened; why it is over."""
    exception = failure.exception or {}
    where = f" on host {failure.host}" if failure.host is not None else ""
    details = exception.get("traceback") or "\n".join(failure.evidence.get("log_tail", []))
    text = f"{failure.kind}{where}: {failure.summary}\ngiving up: {reason}"
    is_explained = exception.get("deterministic") or exception.get("kind") == "data"  # by its message
    return text if is_explained or not details else f"{details.rstrip()}\n\n{text}"
