"""How a run is, by the files in its folder alone: whether it goes on, how far it is, how well it does. It disturbs nothing.

Several machines may see the folder. Whether a driver of another machine lives is judged by the age of its lease, as the storage
tells it: clocks of two machines are never compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.run_state import lease
from orchestrator.run_state.goodput import CATEGORIES
from orchestrator.run_state.stored import GANG_KIND, OUTCOME_KIND, STATE_KIND, SUMMARY_KIND
from orchestrator.tracking.spool import FOLDER as TRACKING
from orchestrator.tracking.spool import SPOOL, entry
from trainers.storage import documents
from trainers.storage.document_kind import DocumentKind

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
    started_s: float | None = None
    """Unix time."""
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


def read(folder: Path, now_s: float | None = None) -> Overview:
    """Returns how a run is. Never raises for what is damaged: `problems` says it."""
    files = _Files(folder)
    state, ended = files.document(STATE_KIND), files.document(OUTCOME_KIND)
    launch_id = state.get("launch_id")
    is_over = bool(ended) and ended.get("launch_id") == launch_id
    about = files.document(SUMMARY_KIND)
    about = about if about.get("launch_id") == launch_id and is_over else {}
    kind, words, changed_s = _life(files, state, ended if is_over else {}, time.time() if now_s is None else now_s)
    train, evaluation = files.last_metrics()
    seconds = state.get("goodput", {}).get("seconds", {})
    whole_s = sum(seconds.get(name, 0.0) for name in CATEGORIES)
    published = [number for number in (state.get("published") or {}).values() if isinstance(number, int) and number >= 0]
    steps = [number for number in (about.get("steps"), state.get("checkpoint_step"), *published) if number is not None]
    return Overview(
        name=folder.name,
        folder=str(folder),
        kind=kind,
        state=words,
        launch_id=launch_id,
        step=max(steps, default=None),
        max_steps=state.get("max_steps"),
        metrics=train,
        evaluation=about.get("evaluation") or evaluation,
        hosts=about.get("hosts") or _num_hosts(files.document(GANG_KIND)),
        checkpoint_step=state.get("checkpoint_step"),
        num_incidents=about.get("num_incidents", state.get("num_incidents", 0)),
        goodput=seconds.get("step", 0.0) / whole_s if whole_s else None,
        started_s=state.get("goodput", {}).get("started_at_s"),
        changed_s=changed_s,
        stop_reason=ended.get("stop_reason") if is_over else None,
        error=ended.get("error") if is_over else None,
        problems=tuple(files.problems),
    )


def _life(files: _Files, state: Mapping[str, Any], ended: Mapping[str, Any], now_s: float) -> tuple[str, str, float | None]:
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


class _Files:
    """The files of a run's folder. What cannot be read is a problem, and counts as absent."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.problems: list[str] = []

    def document(self, kind: DocumentKind) -> dict[str, Any]:
        try:
            return kind.read(self.folder / kind.name) or {}
        except (documents.StorageError, OSError) as error:
            self.problems.append(f"{kind.name} cannot be read: {error}")
            return {}

    def holder(self) -> lease.Holder | None:
        # Its problem is reported, and `holder_of` passes over it.
        return lease.holder_of(str(self.folder)) if self.document(lease.LEASE_KIND) else None

    def changed_s(self, name: str) -> float | None:
        try:
            return (self.folder / name).stat().st_mtime
        except OSError:
            return None

    def last_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the newest metrics of the training, and those of the newest evaluation."""
        train: dict[str, float] = {}
        evaluation: dict[str, float] = {}
        for line in self._newest_lines():
            metrics = line.get("metrics") or {}
            if any(name.startswith("eval_") for name in metrics):
                evaluation = evaluation or metrics
            elif "loss" in metrics or "step_time_s" in metrics:
                train = train or metrics
            if train and evaluation:
                break
        return train, evaluation

    def _newest_lines(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self.folder / TRACKING / SPOOL, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return
        for line in reversed(lines):
            try:
                yield entry(line)
            except documents.DamagedDocument:  # the first one is cut, and the last one may be half written
                continue


def when(unix_s: float) -> str:
    """2026-11-26 01:02"""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")
