"""Training along another run's lineage: on as many hosts at each batch, the same batches skipped. Pure but for reading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.storage import documents


class ReplayError(Exception):
    """The file is no lineage."""


@dataclass(frozen=True)
class Segment:
    """What one generation is to do."""

    num_hosts: int | None = None
    """None: as many as there are."""
    stop_at: int | None = None
    """The batch index at which to save and stop, for the next stretch; None: none."""
    skip_batches: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReplayPlan:
    starts: tuple[tuple[int, int], ...]
    """(batch index, hosts from there on), in order; the first at 0."""
    skip_batches: tuple[int, ...] = ()

    def segment_at(self, batch_index: int) -> Segment:
        """Of a generation that goes on from `batch_index`."""
        current = max(index for index, (start, _) in enumerate(self.starts) if start <= batch_index)
        following = self.starts[current + 1 :]
        return Segment(self.starts[current][1], following[0][0] if following else None, self.skip_batches)


def read(path: str) -> ReplayPlan:
    """From a JSON file with `lineage` and `skipped_batches`, such as a run's summary. Raises ReplayError."""
    document = documents.read_json(path)
    if document is None:
        raise ReplayError(
            f"driver.replay: there is no file {path}; expected a JSON file with `lineage`, such as a run's summary.json"
        )
    try:
        return parse(document["lineage"], document.get("skipped_batches") or ())
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayError(f"driver.replay: {path} holds no lineage ({type(error).__name__}: {error})") from error


def parse(stretches: Sequence[Mapping[str, Any]], skipped: Sequence[int]) -> ReplayPlan:
    starts = tuple((int(stretch["batch_index"]), int(stretch["num_hosts"])) for stretch in stretches)
    if not starts or starts[0][0] != 0 or list(starts) != sorted(starts):
        raise ValueError(f"stretches start at {[start for start, _ in starts]}: expected ascending batch indices from 0 on")
    return ReplayPlan(starts, tuple(sorted(int(batch) for batch in skipped)))
