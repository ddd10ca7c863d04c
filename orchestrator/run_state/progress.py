"""How far a launch has come: what its next driver goes on from. A value; nothing here reads or writes a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gangway.storage import identity
from orchestrator.failures.history import PastFailure
from orchestrator.run_state.goodput import Goodput, share
from orchestrator.run_state.incident_log import KEPT_FAILURES, KEPT_INCIDENTS, LINE_KIND, NAME, Entry
from orchestrator.run_state.incidents import Incident
from orchestrator.run_state.stored import Moment, clock_step_s


class TimeUsed:
    """Counts from when the processes of a launch first joined each other, to the end of the launch.

    Restarts, waits and the time without a driver count; the time between two launches does not. Times are passed in, from one
    wall clock. If it is set back, no second is lost.
    """

    def __init__(self, seconds: float = 0.0, counted_to_s: float | None = None):
        """`counted_to_s`: the time up to which `seconds` are counted; None: nothing trains yet, and no second counts."""
        self._seconds, self._counted_to_s = seconds, counted_to_s

    def begin(self, at_s: float) -> None:
        """Counts from `at_s` on. Later calls change nothing."""
        if self._counted_to_s is None:
            self._counted_to_s = at_s

    def seconds(self, now_s: float) -> float:
        return self._seconds + (0.0 if self._counted_to_s is None else max(0.0, now_s - self._counted_to_s))

    def to_dict(self, now_s: float) -> dict[str, Any]:
        counting = self._counted_to_s is not None
        return {"seconds": self.seconds(now_s), "counted_to_s": now_s if counting else None}

    @classmethod
    def resume(cls, data: Mapping[str, Any], *, same_launch: bool, step_s: float = 0.0) -> TimeUsed:
        """Continues the count of another driver. Of an earlier launch only the seconds count that it had stored. `step_s`: by how
        much the wall clock was set forward since then."""
        counted_to_s = data["counted_to_s"] if same_launch else None
        return cls(data["seconds"], None if counted_to_s is None else counted_to_s + step_s)


@dataclass(frozen=True)
class Earlier:
    """The launches of a run before the present one; without an argument: there were none."""

    launches: int = 0
    generations: int = 0
    drivers: int = 0
    num_incidents: int = 0
    wall_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By category of the goodput ledger. They sum to `wall_s`, which leaves out the time between launches."""
    started_at_s: float | None = None
    """When the first launch began, in Unix time."""

    @classmethod
    def before(cls, state: Mapping[str, Any], num_incidents: int) -> Earlier:
        """Returns the sums with the launch that has stored `state` (the document `launch.json`) and met `num_incidents`."""
        known, ledger = cls.of(state), state["goodput"]
        seconds = {name: known.seconds.get(name, 0.0) + value for name, value in ledger["seconds"].items()}
        return cls(
            known.launches + 1,
            known.generations + state["generations"],
            known.drivers + state["drivers"],
            known.num_incidents + num_incidents,
            known.wall_s + sum(ledger["seconds"].values()),
            {**known.seconds, **seconds},
            ledger["started_at_s"] if known.started_at_s is None else known.started_at_s,
        )

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Earlier:
        """Returns the sums that are stored in `launch.json`. A document from before there were any has none."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in state.get("earlier", {}).items() if name in known})


TRAIN, EVAL = "train", "eval"
"""The kinds of what is published."""


def kind_of(metrics: Mapping[str, Any]) -> str | None:
    """Returns of which kind these published metrics are; None: of another one."""
    if any(name.startswith("eval_") for name in metrics):
        return EVAL
    return TRAIN if "loss" in metrics or "step_time_s" in metrics else None


@dataclass
class Progress:
    goodput: Goodput
    time_used: TimeUsed = field(default_factory=TimeUsed)
    """Of the `time_limit`, over all launches of the run."""
    generations: int = 0
    drivers: int = 1
    high_water_step: int = 0
    """The furthest step that was ever trained, over all launches."""
    trained_step: int = 0
    """How far this launch has trained, without the steps that a rollback took back."""
    step: int | None = None
    """The present step of the run; while steps are trained again it lies before `high_water_step`."""
    step_s: dict[int, float] = field(default_factory=dict)
    """The median seconds of a step, by number of hosts."""
    max_steps: int | None = None
    """For those who look at the run: `gangway status`."""

    saved_path: str | None = None
    checkpoint_step: int | None = None
    committed_step: int | None = None
    """The highest step that was ever committed, over all launches: the checkpoints' folder must show it."""
    save_problem: str | None = None
    """Why the last save failed; None if a later one has succeeded."""
    failed_requests: int = 0
    """How many requests to a bucket have failed, over all launches; those of arrays, which are tried again elsewhere, are not
    counted."""
    requests: dict[str, int] = field(default_factory=dict)
    """What was asked of buckets, over all launches: requests and bytes by kind (`gangway.storage.usage`). What a process asked
    in its last minute before it was killed is missing."""

    gang: dict[str, Any] | None = None
    """The record of the present generation: how another driver finds its agents, and their orders."""
    seen: dict[int, int] = field(default_factory=dict)
    """How many events of the present generation were handled, by host. Stored together with their effects."""

    entries: list[Entry] = field(default_factory=list)
    """The newest incidents of this launch, oldest first."""
    num_incidents: int = 0
    history: list[PastFailure] = field(default_factory=list)
    """The newest failures, oldest first."""
    earlier: Earlier = field(default_factory=Earlier)
    """The launches of the run before this one."""
    earlier_incidents: list[tuple[str, Incident]] = field(default_factory=list)
    """The newest incidents of earlier launches, oldest first, each with the id of its launch."""

    published: dict[str, int] = field(default_factory=lambda: {TRAIN: -1, EVAL: -1})
    """The newest step whose metrics were published, by kind."""
    newest: dict[str, dict[str, float]] = field(default_factory=dict)
    """The newest metrics that were published, by kind: for those who look at the run, `gangway status`."""
    course_of_points: str | None = None
    """The digest of the settings under which the published points were trained. It differs from that of the launch until training
    has begun: only then is it known which points a new course leaves."""
    stored_at_s: float = 0.0
    """When the previous driver last stored this."""

    @property
    def incidents(self) -> list[Incident]:
        """The newest ones, oldest first."""
        return [entry.incident for entry in self.entries]

    def add_incident(self, incident: Incident, past: PastFailure | None = None) -> Entry:
        """`past`: the failure, if the incident is one."""
        if past is not None:
            self.history = [*self.history[1 - KEPT_FAILURES :], past]
        entry = Entry(self.num_incidents, incident, past)
        self.entries = [*self.entries[1 - KEPT_INCIDENTS :], entry]
        self.num_incidents += 1
        return entry

    def open_incident(self) -> Incident | None:
        """Returns the incident from which the gang has not recovered yet."""
        return next((incident for incident in reversed(self.incidents) if incident.open), None)

    def goodput_of_run(self, now_s: float) -> float:
        """Returns the goodput of all launches."""
        earlier = self.earlier.seconds
        return share({name: value + earlier.get(name, 0.0) for name, value in self.goodput.totals(now_s).items()})

    def is_new(self, step: int, kind: str) -> bool:
        """Returns False for steps that were published before: replayed steps give the same metrics. `kind`: `train` or `eval`."""
        if step <= self.published[kind]:
            return False
        self.published[kind] = step
        return True

    def leave_course(self, step: int) -> bool:
        """Training has gone back to `step` and takes another course: what comes of later steps is new. Returns whether any was
        published."""
        if all(last <= step for last in self.published.values()):
            return False
        self.published = {kind: min(last, step) for kind, last in self.published.items()}
        return True

    # ------------------------------------------------------------------ as stored

    def to_document(self, now_s: float, run_dir: str) -> dict[str, Any]:
        """Returns the part of `launch.json` that `restore` reads."""
        return {
            "goodput": self.goodput.to_dict(now_s),
            "time_used": self.time_used.to_dict(now_s),
            "earlier": asdict(self.earlier),
            "generations": self.generations,
            "drivers": self.drivers,
            "num_incidents": self.num_incidents,
            "high_water_step": self.high_water_step,
            "step_s": {str(hosts): step_s for hosts, step_s in self.step_s.items()},
            "trained_step": self.trained_step,
            "step": self.step,
            "max_steps": self.max_steps,
            # Relative, if it is in the run's folder: the next driver may find that elsewhere, or in a copy.
            "saved_path": self.saved_path and identity.inside(self.saved_path, run_dir),
            "saved_at": self.saved_path,
            "checkpoint_step": self.checkpoint_step,
            "committed_step": self.committed_step,
            "failed_requests": self.failed_requests,
            "requests": dict(self.requests),
            "published": dict(self.published),
            "newest": dict(self.newest),
            "course": self.course_of_points,
            # With its generation: if only one of the two files was written, the numbers are not used.
            "seen": {
                "generation": self.gang["generation"] if self.gang else None,
                "events": [self.seen.get(host, 0) for host in range(max(self.seen, default=-1) + 1)],
            },
        }

    def restore(
        self,
        state: Mapping[str, Any],
        gang: Mapping[str, Any] | None,
        entries: Sequence[tuple[str, Entry]],
        launch_id: str,
        now: Moment,
    ) -> str | None:
        """Takes over what a driver before this one has stored: the documents `launch.json` and `gang.json`, and the incidents of
        all launches, each with the id of its launch. The progress of the run is restored whichever launch it is of; all else only
        for a driver that follows another one of this launch. Returns which incidents are missing, as a sentence."""
        is_same = state["launch_id"] == launch_id
        step_s = clock_step_s(state.get("stored"), now)
        self._restore_run(state, is_same, step_s)
        others = [(of, entry.incident) for of, entry in entries if of != launch_id]
        self.earlier_incidents = sorted(others, key=lambda item: item[1].failed_at_s)[-KEPT_INCIDENTS:]
        if not is_same:
            met = [entry.number + 1 for of, entry in entries if of == state["launch_id"]]
            self.earlier = Earlier.before(state, state.get("num_incidents", max(met, default=0)))
            return None
        self.earlier = Earlier.of(state)
        self.goodput = Goodput.resume(state["goodput"], step_s)
        self.stored_at_s = self.goodput.counted_to_s
        self.generations, self.drivers = state["generations"], state["drivers"] + 1
        self.step_s = {int(hosts): seconds for hosts, seconds in state.get("step_s", {}).items()}
        self.trained_step = state.get("trained_step", 0)
        self._restore_gang(state, gang, launch_id)
        return self._restore_incidents(state, [entry for of, entry in entries if of == launch_id], step_s)

    def _restore_run(self, state: Mapping[str, Any], is_same: bool, step_s: float) -> None:
        self.high_water_step, self.checkpoint_step = state["high_water_step"], state["checkpoint_step"]
        self.step = state.get("step")
        self.failed_requests = state.get("failed_requests", 0)
        self.requests = dict(state.get("requests", {}))
        self.committed_step = state["committed_step"]
        self.published, self.course_of_points = state["published"], state.get("course", self.course_of_points)
        self.newest = dict(state.get("newest", {}))
        self.time_used = TimeUsed.resume(state["time_used"], same_launch=is_same, step_s=step_s)

    def _restore_gang(self, state: Mapping[str, Any], gang: Mapping[str, Any] | None, launch_id: str) -> None:
        self.gang = gang["gang"] if gang is not None and gang["launch_id"] == launch_id else None
        if self.gang is not None:
            # `gang.json` may be newer than `launch.json`.
            self.generations = max(self.generations, self.gang["generation"] + 1)
            if state["seen"]["generation"] == self.gang["generation"]:
                self.seen = dict(enumerate(state["seen"]["events"]))

    def _restore_incidents(self, state: Mapping[str, Any], entries: Sequence[Entry], step_s: float) -> str | None:
        self.entries = list(entries[-KEPT_INCIDENTS:])
        past = [entry.past for entry in entries if entry.past is not None][-KEPT_FAILURES:]
        # By the clock as it is now: decisions ask how long ago a failure was.
        self.history = [replace(one, at_s=one.at_s + step_s) if one.at_s is not None else one for one in past]
        if (incident := self.open_incident()) is not None:
            incident.failed_at_s += step_s
        there, stored = entries[-1].number + 1 if entries else 0, state.get("num_incidents", 0)
        self.num_incidents = max(there, stored)
        return f"{NAME} has {there} of the {stored} incidents of this launch: {LINE_KIND.cost}" if there < stored else None
