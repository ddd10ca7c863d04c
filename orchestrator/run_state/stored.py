"""The documents that a driver keeps in the folder of its run: what must be in each, and what a damaged one costs."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from gangway.storage.documents import DocumentKind

STATE, GANG = "launch.json", "gang.json"
CHECKPOINTS = "checkpoints"


class _Goodput(TypedDict):
    started_at_s: float
    counted_to_s: float
    category: str
    seconds: dict[str, float]


class _TimeUsed(TypedDict):
    seconds: float
    counted_to_s: float | None


class _Seen(TypedDict):
    generation: int | None
    events: list[int]


class Moment(TypedDict):
    """A moment by both clocks of a machine."""

    machine: str
    wall_s: float
    passed_s: float
    """By the monotonic clock."""


class _State(TypedDict):
    """`Launch._document`."""

    launch_id: str
    stored: NotRequired[Moment]
    driver_term: NotRequired[int]
    goodput: _Goodput
    time_used: _TimeUsed
    generations: int
    drivers: int
    num_incidents: NotRequired[int]
    high_water_step: int
    earlier: NotRequired[dict[str, Any]]
    course: NotRequired[str | None]
    step_s: NotRequired[dict[str, float]]
    saved_path: str | None
    saved_at: NotRequired[str | None]
    checkpoint_step: int | None
    max_steps: NotRequired[int | None]
    trained_step: NotRequired[int]
    step: NotRequired[int | None]
    committed_step: int | None
    failed_requests: NotRequired[int]
    requests: NotRequired[dict[str, int]]
    published: dict[str, int]
    newest: NotRequired[dict[str, dict[str, Any]]]
    seen: _Seen


class _Gang(TypedDict):
    """`Driver._record`."""

    address: NotRequired[str | None]
    gang: NotRequired[dict[str, Any]]
    generation: int
    high_water_step: NotRequired[int]
    began_at_s: NotRequired[float]


class _GangOfLaunch(TypedDict):
    launch_id: str
    driver_term: int
    gang: _Gang | None


class _Previews(TypedDict):
    step: int
    previews: list[dict[str, Any]]


class _Outcome(TypedDict):
    launch_id: str
    status: str
    stop_reason: NotRequired[str | None]
    error: NotRequired[str | None]


class _Segment(TypedDict):
    batch_index: int
    num_hosts: int


class _Summary(TypedDict):
    """What `driver.replay` and `gangway status` read; `summary.build` has all of it."""

    lineage: NotRequired[list[_Segment] | None]
    skipped_batches: NotRequired[list[int] | None]
    launch_id: NotRequired[str]
    steps: NotRequired[int | None]
    hosts: NotRequired[int | None]
    num_incidents: NotRequired[int]
    training_digest: NotRequired[str]
    evaluation: NotRequired[dict[str, Any] | None]


def clock_step_s(then: Moment | None, now: Moment) -> float:
    """Returns by how much the wall clock of this machine was set forward since `then`. 0.0 for a moment of another machine, whose
    clock tells nothing about this one."""
    if then is None or then["machine"] != now["machine"]:
        return 0.0
    return (now["wall_s"] - now["passed_s"]) - (then["wall_s"] - then["passed_s"])


STATE_KIND = DocumentKind(STATE, _State, "ledgers and budgets begin anew, and a gang of an earlier driver is not taken over")
# A gang of a program without formats obeys other orders: its agents give up by themselves.
GANG_KIND = DocumentKind(
    GANG, _GangOfLaunch, "a gang that still trains cannot be taken over, and starts anew", without_format=False
)
SUMMARY_KIND = DocumentKind("summary.json", _Summary, "its lineage cannot be replayed")
PREVIEWS_KIND = DocumentKind("previews/STEP.json", _Previews, "the texts of that step are lost")
OUTCOME_KIND = DocumentKind("outcome.json", _Outcome, "whether an earlier driver had finished is not known")
