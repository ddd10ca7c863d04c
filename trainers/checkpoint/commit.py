"""How the hosts bring one checkpoint to disk together, from a background thread.

Once it has begun they talk by explicit keys of the coordination service, not through `trainers.runtime.multihost`: its count of
exchanges belongs to the thread that trains.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed

from trainers.checkpoint import layout, manifest
from trainers.checkpoint.fence import NO_DRIVER, WriterTerm
from trainers.runtime import multihost
from trainers.runtime.multihost import first_problem, one_line
from trainers.storage import durable, sealed

TIMEOUT_S = 1800
"""How long host 0 waits for another host. Backstop only: whoever owns the processes sees a death, or a save that takes too
long, sooner."""


class CommitError(Exception):
    """The checkpoint was not committed, on no host; one line says why."""


class Exchange:
    """What the hosts tell each other about one save. `name` must be the same on all hosts, and never used again."""

    def __init__(self, name: str):
        self.host, self.num_hosts = jax.process_index(), jax.process_count()
        self._prefix = f"checkpoint/{name}"
        self._client: Any = distributed.global_state.client

    def all_or_none(self, topic: str, work: Callable[[], Any], lead: Callable[[list[Any]], Any], *, parts: bool = False) -> Any:
        """Every host does `work`; host 0, once all have, does `lead` with the (JSON-able) results; all get what that returned, or
        with `parts`, each host its own part of that, which is a list.

        An error on one host is an error on all: CommitError, which names the host.
        """
        mine = _attempt(work)
        if self.host > 0:
            self._tell(f"{topic}/{self.host}", mine)
            verdict = self._hear(f"{self._prefix}/{topic}-verdict/{self.host if parts else 'all'}", 0, 2 * TIMEOUT_S)
        else:
            told = multihost.gather(self._client, f"{self._prefix}/{topic}", range(1, self.num_hosts), self._hear, TIMEOUT_S)
            verdict = _verdict([mine, *(told[host] for host in range(1, self.num_hosts))], lead)
            verdict = self._tell_all(f"{topic}-verdict", verdict, parts)
        if "problem" in verdict:
            raise CommitError(verdict["problem"])
        return verdict["value"]

    def forget(self) -> None:
        """Removes what was told; for host 0, once no host can be listening any more."""
        if self.num_hosts > 1 and self.host == 0:
            self._client.key_value_delete(self._prefix)

    def _tell(self, key: str, value: dict[str, Any]) -> None:
        if self.num_hosts > 1:
            self._client.key_value_set(f"{self._prefix}/{key}", json.dumps(value))

    def _tell_all(self, topic: str, verdict: dict[str, Any], parts: bool) -> dict[str, Any]:
        """Returns host 0's own."""
        if not parts:
            self._tell(f"{topic}/all", verdict)
            return verdict
        of_each = [{"value": part} for part in verdict["value"]] if "value" in verdict else [verdict] * self.num_hosts
        for host in range(1, self.num_hosts):
            self._tell(f"{topic}/{host}", of_each[host])
        return of_each[0]

    def _hear(self, key: str, host: int, timeout_s: float) -> dict[str, Any]:
        try:
            return json.loads(self._client.blocking_key_value_get(key, int(timeout_s * 1000)))
        except jax.errors.JaxRuntimeError as error:
            return {"problem": f"no answer from host {host} within {max(timeout_s, TIMEOUT_S):.0f} s: {one_line(error)}"}


@dataclass(frozen=True)
class Commit:
    """One checkpoint on its way from `work`, a new folder, to `final`."""

    work: Path
    final: Path
    meta: dict[str, Any]
    exchange: Exchange
    write: Callable[[Path], None]
    """Writes this host's part of the arrays to a folder that exists."""
    merge: Callable[[Path], None]
    """Makes one checkpoint of the parts, on host 0."""
    forbidden: Callable[[], str] = lambda: ""
    """Why nothing may be committed now; empty if it may."""
    replace: bool = False
    clock: Callable[[], float] = field(default=time.time)

    def run(self) -> None:
        """All hosts must call this. Raises CommitError on all or on none; nothing but `final` is left."""
        exchange = self.exchange
        try:
            mine = exchange.all_or_none("written", self._write, self._describe, parts=True)
            exchange.all_or_none("digested", lambda: self._digests(mine), self._finish)
        except CommitError:
            if exchange.host == 0:
                # No host writes any more: each has told its part, or has been waited for long enough.
                shutil.rmtree(self.work, ignore_errors=True)
            raise

    def _write(self) -> None:
        # Every host makes them: only this thread may wait for the storage. Never their parent: if that is gone, the storage is,
        # and a new one would lie on whatever disk is below the mount point.
        folder = self.work / manifest.STATE_FOLDER
        for made in (self.work, folder):
            made.mkdir(exist_ok=True)
        self.write(folder)

    def _describe(self, _: list[None]) -> list[list[str]]:
        """The names of the files of which each host is to find the digests."""
        self.merge(self.work / manifest.STATE_FOLDER)
        durable.write(self.work / manifest.META_FILE, sealed.seal(self.meta))
        names, num_hosts = manifest.names_below(self.work), self.exchange.num_hosts
        return [names[host::num_hosts] for host in range(num_hosts)]

    def _digests(self, names: list[str]) -> dict[str, tuple[int, str]]:
        found = {name: manifest.digest(self.work / name) for name in names}
        return {name: (entry.size, entry.sha256) for name, entry in found.items()}

    def _finish(self, parts: list[dict[str, tuple[int, str]]]) -> None:
        if problem := self.forbidden():
            raise CommitError(problem)
        files = {name: manifest.Entry(*entry) for name, entry in sorted(item for part in parts for item in part.items())}
        manifest.write(self.work, manifest.Manifest(self.meta.get("step"), self.clock(), files))
        if problem := self.forbidden():  # again, at the last moment: writing may have taken long
            raise CommitError(problem)
        layout.put_in_place(self.work, self.final, replace=self.replace)


def begin(final: Path, obstacle: Callable[[], str], term: WriterTerm = NO_DRIVER) -> tuple[Path, str]:
    """(the folder to write `final` in, "") if no host finds an `obstacle`, else (it, what prevents it).

    All hosts must call this, in the thread that trains: the one agreement before a save.
    """
    token = f"{term.driver_term}_{term.generation}_{uuid.uuid4().hex[:8]}"
    work = final.with_name(layout.name_on_the_way(final.name, "saving", token))
    try:
        problem = obstacle()
    except OSError as error:
        problem = layout.unwritable(final.parent, error)
    # The name is host 0's: what all say alike is sent once.
    answers = multihost.all_hosts("checkpoint", {"name": work.name if jax.process_index() == 0 else None, "problem": problem})
    return final.with_name(answers[0]["name"]), first_problem([answer["problem"] for answer in answers])


def _verdict(told: list[dict[str, Any]], lead: Callable[[list[Any]], Any]) -> dict[str, Any]:
    if problem := first_problem([one.get("problem", "") for one in told]):
        return {"problem": problem}
    return _attempt(lambda: lead([one["value"] for one in told]))


def _attempt(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except CommitError as error:
        return {"problem": str(error)}
    except Exception as error:  # a thread's boundary, and Orbax raises whatever its layers raise: told to all hosts
        return {"problem": one_line(error)}
