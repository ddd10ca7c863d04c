"""The end of a generation: halts all hosts, collects the evidence, keeps the stacks in files, makes the final error message."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.gang.calls import AgentGone, NoAnswer, gather
from cluster.gang.gang_like import Asked
from gangway.errors import CodeMissingError
from gangway.storage import ours
from gangway.storage.opening import place_of_run
from gangway.storage.store import Place
from orchestrator.driver.generation import Generation
from orchestrator.failures import classify
from orchestrator.failures.classify import Failure


def ask_hosts(
    gang: Asked,
    generation: Generation,
    ask: Callable[[int], Any],
    limits_s: Mapping[int, float],
    clock: Callable[[], float],
) -> dict[int, Any]:
    """Makes the call `ask(host)` for each host of `limits_s`; returns the answers that come within these times, by host.

    Raises what an agent's method raised, such as StaleDriver.
    """
    answers = gather(gang.mailbox(), ask, limits_s, clock)
    for host, answer in answers.items():
        if isinstance(answer.error, AgentGone | NoAnswer):
            generation.lose_agent(host)
        elif answer.error is not None:
            raise answer.error
    return {host: answer.value for host, answer in answers.items() if answer.error is None}


AGENT_TIMEOUT_S = 20.0
"""How long an agent may take to answer a call that does not wait for its process."""
SUSPECT_TIMEOUT_S = 2.0
"""The same for an agent whose answer was late already: the other hosts must not wait long for a machine that is probably dead."""
DYING_TIMEOUT_S = 600.0
"""How long a killed process may take to be gone: freeing a terabyte of memory takes minutes. Less if a stop is asked for."""
DYING_TIMEOUT_OF_A_STOP_S = 20.0
KEPT_STACKS = 20
"""How many incidents keep their stacks: the newest ones."""
KEPT_STACKS_BYTES = 256 << 20


@dataclass(frozen=True)
class Findings:
    failure: Failure
    last_step: int
    """The furthest step of any host."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The stacks by host, of processes that were alive."""


class Halt:
    """Halts all hosts of a generation at once, and collects their post-mortems."""

    def __init__(self, gang: Asked, generation: Generation, clock: Callable[[], float] = time.monotonic):
        self._gang, self._generation, self._clock = gang, generation, clock
        self.began_s = clock()
        """When the hosts were asked to halt."""

    def run(self, cursors: Mapping[int, int], waiting: Callable[[list[int]], bool]) -> dict[int, Any]:
        """Returns each host's answer to `halt`, with its events since its cursor; none from a host whose agent is gone or silent.

        `waiting` is called with the hosts whose processes take long to die; it returns whether a stop is asked for.
        """
        if self._generation.overdue:  # before any host is halted: the stacks of all are needed to find the one that hangs
            self._ask(range(self._generation.num_hosts), lambda host: self._gang.call(host, "take_stacks"))
        self.began_s = self._clock()
        answers = self._ask(range(self._generation.num_hosts), lambda host: self._call_halt(host, cursors))
        while dying := [host for host, answer in answers.items() if not answer.get("gone", True)]:
            limit_s = DYING_TIMEOUT_OF_A_STOP_S if waiting(dying) else DYING_TIMEOUT_S
            if self._clock() - self.began_s > limit_s:
                for host in dying:
                    self._generation.lose_agent(host)
                    del answers[host]
                break
            answers = {**answers, **self._ask(dying, lambda host: self._call_halt(host, cursors))}
            # Those that fell silent meanwhile were given up by `_ask`.
            answers = {host: answer for host, answer in answers.items() if self._generation.broken.get(host) != "agent"}
        return answers

    def _call_halt(self, host: int, cursors: Mapping[int, int]) -> Any:
        return self._gang.call(host, "halt", cursor=cursors.get(host, 0))

    def _ask(self, hosts: Iterable[int], call: Callable[[int], Any]) -> dict[int, Any]:
        """Returns the answers of the hosts that answer. Suspects have less time; hosts without an agent are not asked."""
        generation = self._generation
        limits_s = {
            host: SUSPECT_TIMEOUT_S if host in generation.suspects else AGENT_TIMEOUT_S
            for host in hosts
            if generation.broken.get(host) != "agent"
        }
        return ask_hosts(self._gang, generation, call, limits_s, self._clock)


def find_cause(generation: Generation, answers: Mapping[int, Mapping[str, Any]], asked_at_s: float) -> Findings:
    """Finds out why a generation ended. `answers`: the answers to `halt`, by host. `asked_at_s`: when the hosts were asked, by
    the driver's clock, to which the times of all failures are converted."""
    post_mortems = [
        classify.read_post_mortem(
            host,
            answers.get(host),
            asked_at_s,
            done=host in generation.done,
            notice=generation.notices.get(host),
            overdue=generation.overdue.get(host),
        )
        for host in range(generation.num_hosts)
    ]
    return Findings(
        failure=classify.classify(post_mortems, lost_hosts(generation)),
        last_step=max((p.last_step or 0 for p in post_mortems), default=0),
        stacks={p.host: p.stacks for p in post_mortems if p.stacks},
    )


STACKS = ours.Mark(
    "a folder of stacks alone", lambda place: all(re.fullmatch(r"host-\d{4,}\.txt", entry.name) for entry in place.list())
)


def unpolled_events(answers: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the events since the last poll, from the answers to `halt`, in the form of answers to a poll."""
    names = ("events", "cursor", "missed", "facts")
    return {
        host: {name: answer[name] for name in names if name in answer} | {"heartbeat": answer.get("last_heartbeat")}
        for host, answer in answers.items()
        if "events" in answer
    }


def lost_hosts(generation: Generation) -> tuple[int, ...]:
    """Returns the hosts whose agent is gone."""
    return tuple(host for host, how in generation.broken.items() if how == "agent")


def stacks_folder(run_dir: str, number: int) -> Place:
    """Returns the folder for the stacks of an incident."""
    return place_of_run(run_dir) / "incidents" / f"{number:04d}"


def write_stacks(folder: Place, texts: Mapping[int, str]) -> None:
    """Writes each host's stacks to a file of its own, and removes those of old incidents. Raises OSError."""
    for host, text in texts.items():
        (folder / f"host-{host:04d}.txt").put(text.encode())
    num_bytes, newest_first = 0, sorted(filter(str.isdigit, folder.parent.folders()), reverse=True)
    for index, place in enumerate(folder.parent / number for number in newest_first):
        if place.store.is_local:  # a bucket has room, and each look at it is paid for
            num_bytes += sum(entry.size for entry in place.list())
        if (index >= KEPT_STACKS or (index and num_bytes > KEPT_STACKS_BYTES)) and STACKS.is_on(place):
            ours.delete_folder(place, STACKS)


def final_error(failure: Failure, reason: str, logs: str) -> str:
    """Returns the final message for the user: the failure, with where it arose in the user's code, and why the run ends; then
    the lines of the user's code, or else the whole traceback or the end of the log. `logs`: the folder that has all of them."""
    exception = failure.exception or {}
    own = exception.get("user_traceback")
    details = own or exception.get("traceback") or "\n".join(failure.evidence.get("log_tail", []))
    text = f"{failure.summary}\ngiving up: {reason}"
    # These exceptions explain themselves in their message: a traceback would hide it.
    if exception.get("deterministic") or exception.get("kind") == "data" or exception.get("type") == CodeMissingError.__name__:
        details = ""
    whole = f"\n(lines of your own code alone; the whole traceback is in {logs})" if own else ""
    return f"{text}\n\n{details.rstrip()}{whole}" if details else text
