"""How a run is, by the files in its folder alone: whether it goes on, how far it is, how well it does. It disturbs nothing.

Several machines may see the folder. Whether a driver of another machine lives is judged by the age of its lease, as the storage
tells it: clocks of two machines are never compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gangway.storage import documents
from gangway.storage.opening import place_of
from gangway.storage.store import Place, StorageProblem
from orchestrator.run_state import lease, lines
from orchestrator.run_state.goodput import CATEGORIES, counted_s, share
from orchestrator.run_state.progress import EVAL, TRAIN, kind_of
from orchestrator.run_state.stored import GANG_KIND, OUTCOME_KIND, STATE_KIND, SUMMARY_KIND
from orchestrator.tracking.spool import entry

TAIL_BYTES = 1 << 16
"""How much is read from the end of the file of metrics: its newest lines."""
SILENT_S = 3 * lease.TTL_S
"""A driver of another machine whose lease is older is silent."""
STATES = {
    "start": "starting",
    "schedule": "waiting for machines",
    "import": "starting processes",
    "join": "joining",
    "compile": "compiling",
    "restore": "restoring",
    "step": "training",
    "data_wait": "training",
    "checkpoint": "saving",
    "evaluation": "evaluating",
    "detection": "recovering",
    "recovery": "recovering",
    "replay": "replaying steps",
    "idle": "waiting to restart",
    "finish": "finishing",
}
"""What a run does, by the category of its goodput ledger."""
LIVE, ENDED, LOST, UNKNOWN = "live", "ended", "lost", "unknown"


@dataclass(frozen=True, kw_only=True)
class Overview:
    """How a run is. What its files do not say is None."""

    name: str
    folder: str
    kind: str
    """`live`; `ended`; `lost`: its driver is gone and has recorded no end; `unknown`: its files do not say."""
    state: str
    """In words: `training`, `finished`, `driver gone`."""
    launch_id: str | None = None
    step: int | None = None
    max_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest ones of the training, by name."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    hosts: int | None = None
    checkpoint_step: int | None = None
    num_incidents: int = 0
    goodput: float | None = None
    """Of all launches, as the two numbers around it."""
    wall_s: float | None = None
    started_s: float | None = None
    """Unix time of the newest launch."""
    changed_s: float | None = None
    """Unix time of its last sign of life, or of its end."""
    stop_reason: str | None = None
    error: str | None = None
    problems: tuple[str, ...] = ()
    """What cannot be read."""

    @property
    def left_s(self) -> float | None:
        step_s = self.metrics.get("step_time_s")
        if self.kind != LIVE or self.max_steps is None or self.step is None or step_s is None:
            return None
        return max(0, self.max_steps - self.step) * step_s


def read(run: documents.Where, now_s: float | None = None) -> Overview:
    """Returns how the run in this folder is. Never raises for what is damaged: `problems` says it. Raises StorageProblem of a
    bucket that does not answer."""
    folder = place_of(run)
    files = Files(folder)
    state, ended = files.document(STATE_KIND), files.document(OUTCOME_KIND)
    launch_id = state.get("launch_id")
    is_over = bool(ended) and ended.get("launch_id") == launch_id
    about = files.document(SUMMARY_KIND) if is_over else {}
    about = about if about.get("launch_id") == launch_id else {}
    kind, words, changed_s = _life(files, state, ended if is_over else {}, time.time() if now_s is None else now_s)
    train, evaluation = files.last_metrics(state)
    earlier, started_s = state.get("earlier") or {}, state.get("goodput", {}).get("started_at_s")
    seconds = about.get("goodput") or seconds_of(state)
    this_s = None if started_s is None or changed_s is None else changed_s - started_s
    steps = (about.get("steps"), state.get("step"), state.get("checkpoint_step"))
    return Overview(
        name=folder.name,
        folder=folder.url,
        kind=kind,
        state=words,
        launch_id=launch_id,
        step=next((number for number in steps if number is not None), None),
        max_steps=state.get("max_steps"),
        metrics=train,
        evaluation=about.get("evaluation") or evaluation,
        hosts=about.get("hosts") or _num_hosts(files.document(GANG_KIND)),
        checkpoint_step=state.get("checkpoint_step"),
        num_incidents=about.get("num_incidents", state.get("num_incidents", 0) + earlier.get("num_incidents", 0)),
        goodput=share(seconds) if counted_s(seconds) else None,
        wall_s=about.get("wall_s", None if this_s is None else this_s + earlier.get("wall_s", 0.0)),
        started_s=started_s,
        changed_s=changed_s,
        stop_reason=ended.get("stop_reason") if is_over else None,
        error=ended.get("error") if is_over else None,
        problems=tuple(files.problems),
    )


def seconds_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Returns the goodput ledger of all launches, by what the newest one has stored."""
    now, earlier = state.get("goodput", {}).get("seconds", {}), (state.get("earlier") or {}).get("seconds", {})
    return {name: now.get(name, 0.0) + earlier.get(name, 0.0) for name in CATEGORIES}


def _life(files: Files, state: Mapping[str, Any], ended: Mapping[str, Any], now_s: float) -> tuple[str, str, float | None]:
    """Returns (kind, state in words, Unix time of the last sign of life)."""
    counted_s = state.get("goodput", {}).get("counted_to_s")
    if ended:
        return ENDED, str(ended["status"]), counted_s
    holder = files.holder()
    if holder is None:
        return UNKNOWN, "never started" if not state else "no driver known", counted_s
    renewed_s = files.changed_s("lease.json")
    if holder.released:
        return LOST, "ended without telling how", renewed_s
    if holder.dead:
        return LOST, "driver gone", holder.renewed_at_s
    if renewed_s is not None and now_s - renewed_s > SILENT_S and not holder.surely_lives(time.monotonic(), lease.TTL_S):
        return LOST, "driver silent", renewed_s
    return LIVE, STATES.get(str(state.get("goodput", {}).get("category")), "starting"), renewed_s


def _num_hosts(gang: Mapping[str, Any]) -> int | None:
    record = (gang.get("gang") or {}).get("gang") or {}
    return len(record["members"]) or None if "members" in record else None


class Files:
    """The files of a run's folder. What cannot be read is a problem, and counts as absent."""

    def __init__(self, folder: Place):
        self.folder = folder
        self.problems: list[str] = []

    def document(self, kind: documents.DocumentKind) -> dict[str, Any]:
        try:
            return kind.read(self.folder / kind.name) or {}
        except (documents.StorageError, OSError) as error:
            if isinstance(error, StorageProblem) and not self.folder.store.is_local:
                raise  # so would all others be: nothing is known of the run
            self.problems.append(f"{kind.name} cannot be read: {error}")
            return {}

    def holder(self) -> lease.Holder | None:
        return lease.holder_in(self.document(lease.LEASE_KIND) or None)

    def changed_s(self, name: str) -> float | None:
        place = self.folder / name
        try:
            found = place.store.entry(place.key)
        except OSError:
            return None
        return None if found is None else found.changed_s

    def last_metrics(self, state: Mapping[str, Any]) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Returns the newest metrics of the training, and those of the newest evaluation."""
        found: dict[str, Mapping[str, float]] = dict(state.get("newest") or {})
        # Where `launch.json` is damaged, they are at the end of what was tracked.
        if TRAIN not in found and (not state or max((state.get("published") or {}).values(), default=-1) >= 0):
            for line in self._newest_lines():
                metrics = line.get("metrics") or {}
                if (kind := kind_of(metrics)) is not None:
                    found.setdefault(kind, metrics)
                if {TRAIN, EVAL} <= found.keys():
                    break
        return found.get(TRAIN, {}), found.get(EVAL, {})

    def _newest_lines(self) -> Iterator[dict[str, Any]]:
        try:
            found = lines.newest_metrics(self.folder, TAIL_BYTES)
        except OSError:
            return
        for line in reversed(found):
            try:
                yield entry(line)
            except documents.DamagedDocument:  # the last one may be half written
                continue


def when(unix_s: float) -> str:
    """2026-11-26 01:02"""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")
