"""Writes and commits one checkpoint on all hosts together, from a background thread.

Once a save has begun, the hosts exchange explicit keys of the coordination service, not through `trainers.runtime.multihost`:
the number that names its exchanges belongs to the thread that trains.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from gangway.storage.documents import StorageError
from gangway.storage.store import Place
from trainers.checkpoint import layout, manifest
from trainers.checkpoint.trial import UnsavableError, seal_meta
from trainers.jax_internals import distributed
from trainers.runtime import multihost
from trainers.runtime.multihost import first_problem, one_line

PART_OF_HOST = "ocdbt.process_"
"""How the folders begin in which Orbax writes what each host has."""
MANIFEST_OF_PART = "manifest.ocdbt"
LISTINGS, LISTING_PAUSE_S = 40, 0.5
TIMEOUT_S = 1800
"""How long host 0 waits for another host. This is a backstop only: the agents notice a death, or a save that takes too long,
sooner."""


class CommitError(Exception):
    """The checkpoint was not committed, on any host; one line says why."""

    def __init__(self, problem: str, *, is_final: bool = False):
        super().__init__(problem)
        self.is_final = is_final
        """Whether no later save of this run can succeed either (`UnsavableError`)."""


class Exchange:
    """The exchanges between the hosts about one save. `name` must be the same on all hosts, and never used again."""

    def __init__(self, name: str):
        self.host, self.num_hosts = jax.process_index(), jax.process_count()
        self._prefix = f"checkpoint/{name}"
        self._client: Any = distributed.global_state.client

    def all_or_none(self, topic: str, work: Callable[[], Any], decide: Callable[[list[Any]], Any], *, parts: bool = False) -> Any:
        """Every host calls `work`. When all have, host 0 calls `decide` with the results, which must be JSON. All hosts get
        what that returns; with `parts` it must be a list, and each host gets its own part.

        An error on one host is an error on all: CommitError, which names the host.
        """
        # An error is an answer too: a host that raised here would leave host 0 waiting for it.
        answer = _attempt(work)
        if self.host > 0:
            self._send(f"{topic}/{self.host}", answer)
            # Twice as long as host 0 waits: its reply must come first, for it names the host that did not answer.
            reply = self._receive(f"{self._prefix}/{topic}-reply/{self.host if parts else 'all'}", 0, 2 * TIMEOUT_S)
        else:
            answers = multihost.gather(
                self._client, f"{self._prefix}/{topic}", range(1, self.num_hosts), self._receive, TIMEOUT_S
            )
            reply = _reply([answer, *(answers[host] for host in range(1, self.num_hosts))], decide)
            reply = self._send_to_all(f"{topic}-reply", reply, parts)
        if "problem" in reply:
            raise CommitError(reply["problem"], is_final=reply.get("final", False))
        return reply["value"]

    def forget(self) -> None:
        """Removes the keys. For host 0, once no host can be waiting for them any more."""
        if self.num_hosts > 1 and self.host == 0:
            # This deletes all keys below the prefix.
            self._client.key_value_delete(self._prefix)

    def _send(self, key: str, value: dict[str, Any]) -> None:
        if self.num_hosts > 1:
            self._client.key_value_set(f"{self._prefix}/{key}", json.dumps(value))

    def _send_to_all(self, topic: str, reply: dict[str, Any], parts: bool) -> dict[str, Any]:
        """Returns host 0's own reply."""
        if not parts:
            self._send(f"{topic}/all", reply)
            return reply
        # Each host gets its own part of a result, and all get the same problem.
        replies = [{"value": part} for part in reply["value"]] if "value" in reply else [reply] * self.num_hosts
        for host in range(1, self.num_hosts):
            self._send(f"{topic}/{host}", replies[host])
        return replies[0]

    def _receive(self, key: str, host: int, timeout_s: float) -> dict[str, Any]:
        try:
            return json.loads(self._client.blocking_key_value_get(key, int(timeout_s * 1000)))
        except jax.errors.JaxRuntimeError as error:
            return {"problem": f"no answer from host {host} within {max(timeout_s, TIMEOUT_S):.0f} s: {one_line(error)}"}


@dataclass(frozen=True)
class Commit:
    """A save of one checkpoint: written to `work`, a new folder, and then recorded."""

    work: Place
    meta: Callable[[], dict[str, Any]]
    """Returns the meta, once the arrays are written: what the devices compute of them needs not be there before. Raises
    CommitError if the arrays must not be saved."""
    exchange: Exchange
    write: Callable[[Place], None]
    """Writes this host's part of the arrays to a folder that exists."""
    merge: Callable[[Place], None]
    """Merges the parts of all hosts into one checkpoint, on host 0."""
    record: Callable[[str, str], None]
    """Given the name of the folder and the digest of its manifest: records that it is committed. Raises CommitError if that is
    not to be, and OSError if nobody can tell."""
    discard: Callable[[Place], None]
    """Deletes what was not committed. Raises OSError."""
    unclear: list[str] = field(default_factory=list)
    """Why nobody can tell whether it was recorded: then nothing of it may be deleted."""
    clock: Callable[[], float] = field(default=time.time)

    def run(self) -> None:
        """Writes and commits. All hosts must call this. Raises CommitError on all of them or on none; leaves nothing then."""
        exchange = self.exchange
        try:
            # Two exchanges: the digests are of merged files, which exist only when every host has written.
            names = exchange.all_or_none("written", self._write, self._describe, parts=True)
            exchange.all_or_none("digested", lambda: self._digests(names), self._finish)
        except CommitError:
            if exchange.host == 0 and not self.unclear:
                # No host writes any more: each has answered, or host 0 has waited long enough for it.
                with suppress(OSError):
                    self.discard(self.work)
            raise

    def _write(self) -> str:
        """Writes this host's part; returns the name of its folder, empty if it has none: replicated arrays are host 0's to
        write."""
        # Every host creates the folders, here: only this thread may wait for the storage. None creates their parent: if that is
        # gone, the storage is, and a new one would be on whatever disk is below the mount point.
        for folder in (self.work, self.work / manifest.STATE_FOLDER):
            folder.make()
        self.write(self.work / manifest.STATE_FOLDER)
        self.meta()  # on all hosts: each finds the same, and none waits for another that has found it
        part = f"{PART_OF_HOST}{self.exchange.host}"
        return part if (self.work / manifest.STATE_FOLDER / part / MANIFEST_OF_PART).exists() else ""

    def _describe(self, parts: list[str]) -> list[list[str]]:
        """Merges the parts, writes the meta, and returns for each host the names of the files to compute digests of."""
        num_hosts = self.exchange.num_hosts
        _await_parts(self.work / manifest.STATE_FOLDER, {*parts} - {""})
        self.merge(self.work / manifest.STATE_FOLDER)
        # Before the names are listed: the manifest covers the meta too.
        (self.work / manifest.META_FILE).put(seal_meta(self.meta()).encode(), makes_folder=False)
        if self.work.store.tags_last:
            return [[]] * num_hosts  # a bucket tells sizes and tags; to read all that was written would cost as much again
        names = manifest.names_below(self.work)
        # Every n-th file: the hosts share the reading. Host 0 alone would have to read the whole checkpoint.
        return [names[host::num_hosts] for host in range(num_hosts)]

    def _digests(self, names: list[str]) -> dict[str, tuple[int, str]]:
        # Of what is on the disk now, not of what was in memory: this notices a write that went wrong.
        entries = {name: manifest.digest(self.work / name) for name in names}
        return {name: (entry.size, entry.sha256) for name, entry in entries.items()}

    def _finish(self, parts: list[dict[str, tuple[int, str]]]) -> None:
        files = {name: manifest.Entry(*entry) for name, entry in sorted(item for part in parts for item in part.items())}
        digest = manifest.write(self.work, manifest.of_files(self.work, self.meta().get("step"), self.clock(), files))
        self.work.parent.settle()
        try:
            # This record is the commit: a reader finds no checkpoint, or a whole one. If a later driver has the run, it raises.
            self.record(self.work.name, digest)
        except OSError as error:
            self.unclear.append(str(error))
            raise


def _await_parts(state: Place, written: Collection[str], sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when the parts of all hosts are to be seen: all have said that they have written, but a listing may lag, and a part
    that is not listed would not be merged. Raises CommitError."""
    missing: set[str] = {*written}
    for _ in range(LISTINGS):
        if not (missing := {*written} - {*state.folders()}):
            return
        sleep(LISTING_PAUSE_S)
    raise CommitError(f"{state} does not list {', '.join(sorted(missing))}, which a host has written: the bucket lists late")


def begin(folder: Place, name: Callable[[str], str], obstacle: Callable[[], str]) -> Place:
    """Returns a new folder to write in, which `name` names, given a random part: two tries of one generation must not write to
    the same folder. Raises CommitError, on all hosts, if one of them finds an `obstacle`.

    All hosts must call this, in the thread that trains: it is the one agreement before a save.
    """
    try:
        # Not raised here: alone in raising, this host would leave the others in the exchange below.
        problem = obstacle()
    except (OSError, StorageError) as error:
        problem = layout.unwritable(folder, error)
    # The name is host 0's, for it is random. The others send None: equal answers are sent once.
    mine = name(uuid.uuid4().hex[:8]) if jax.process_index() == 0 else None
    answers = multihost.all_hosts("checkpoint", {"name": mine, "problem": problem})
    if problem := first_problem([answer["problem"] for answer in answers]):
        raise CommitError(problem)
    return folder / answers[0]["name"]


def _reply(answers: list[dict[str, Any]], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
    if problem := first_problem([answer.get("problem", "") for answer in answers]):
        return {"problem": problem, "final": any(answer.get("final", False) for answer in answers)}
    return _attempt(lambda: decide([answer["value"] for answer in answers]))


def _attempt(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except CommitError as error:
        return {"problem": str(error), "final": error.is_final}
    except UnsavableError as error:
        return {"problem": str(error), "final": True}
    except Exception as error:  # a thread's boundary, and Orbax raises whatever its layers raise: sent to all hosts
        return {"problem": one_line(error)}
