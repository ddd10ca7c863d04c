"""Replays the lineage of another run: the same number of hosts at each batch, the same batches skipped. Pure except for
`read`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangway.storage import documents
from orchestrator.run_state.stored import SUMMARY_KIND


class ReplayError(Exception):
    """The file holds no lineage."""


@dataclass(frozen=True)
class Segment:
    """The part of a lineage that one generation trains."""

    num_hosts: int | None = None
    """None: as many hosts as are available."""
    stop_at: int | None = None
    """The batch index at which to save and stop, where the next segment begins; None: train to the end."""
    skip_batches: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReplayPlan:
    starts: tuple[tuple[int, int], ...]
    """(batch index, hosts from there on), in order; the first at 0."""
    skip_batches: tuple[int, ...] = ()

    def segment_at(self, batch_index: int) -> Segment:
        """Returns the segment of a generation that goes on from `batch_index`."""
        current = max(index for index, (start, _) in enumerate(self.starts) if start <= batch_index)
        following = self.starts[current + 1 :]
        return Segment(self.starts[current][1], following[0][0] if following else None, self.skip_batches)


def read(path: str) -> ReplayPlan:
    """Reads a JSON file with `lineage` and `skipped_batches`, such as a run's summary. Raises ReplayError."""
    try:
        document = SUMMARY_KIND.read(path)
    except documents.DamagedDocument as error:
        raise ReplayError(f"driver.replay: {path} holds no lineage ({error})") from error
    except documents.NewerDocument as error:
        raise ReplayError(f"driver.replay: {error}") from error
    if document is None:
        raise ReplayError(
            f"driver.replay: there is no file {path}; expected a JSON file with `lineage`, such as a run's summary.json"
        )
    try:
        return parse(document["lineage"] or (), document.get("skipped_batches") or ())
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayError(f"driver.replay: {path} holds no lineage ({type(error).__name__}: {error})") from error


def parse(lineage: Sequence[Mapping[str, Any]], skipped: Sequence[int]) -> ReplayPlan:
    starts = tuple((int(segment["batch_index"]), int(segment["num_hosts"])) for segment in lineage)
    if not starts or starts[0][0] != 0 or list(starts) != sorted(starts):
        raise ValueError(f"segments start at {[start for start, _ in starts]}: expected ascending batch indices from 0 on")
    return ReplayPlan(starts, tuple(sorted(int(batch) for batch in skipped)))
