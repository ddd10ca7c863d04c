"""Which source each row of a mixture is of: a pure function of the row's index, with exact proportions."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from gangway.errors import UsageError


@dataclass(frozen=True)
class Share:
    """One source of a mixture."""

    name: str
    weights: tuple[tuple[int, float], ...]
    """(row of the mixture, weight from there on), in their order; the first row is 0."""
    max_rows: int | None = None
    """After so many of its rows the source leaves; None: it is repeated."""


class Place(NamedTuple):
    """Where a row of the mixture comes from."""

    source: int
    row: int
    """How many rows of the source come before it: it goes on over the source's epochs."""


class _Span(NamedTuple):
    """Rows with the same weights."""

    first: int
    before: tuple[int, ...]
    """The rows of each source before the span."""
    weights: tuple[int, ...]
    """In the proportions of those of the settings; 0: a source that has left."""


class Mixture:
    """The rows of several sources, in the proportions of their weights.

    Of any n rows one after the other, while no weight changes, the number of each source differs from its share of n by no more
    than log2(number of sources) + 1. When all sources have left, all begin anew.
    """

    def __init__(self, shares: Sequence[Share]):
        """Raises UsageError if the sources that are left have no weight."""
        self.shares = tuple(shares)
        self.num_rows: int | None = None
        """The rows until all sources have left; None: one is repeated."""
        self._spans: list[_Span] = []
        self._plan()
        self._firsts = [span.first for span in self._spans]
        self._of_all: tuple[int, ...] = () if self.num_rows is None else self._counts(self.num_rows)

    def at(self, index: int) -> Place:
        before, after = self.counts(index), self.counts(index + 1)
        source = next(number for number, count in enumerate(after) if count != before[number])
        return Place(source, before[source])

    def counts(self, num_rows: int) -> tuple[int, ...]:
        """Returns how many of the first `num_rows` rows each source has."""
        if self.num_rows is None:
            return self._counts(num_rows)
        times, rest = divmod(num_rows, self.num_rows)
        return tuple(times * whole + part for whole, part in zip(self._of_all, self._counts(rest), strict=True))

    def _counts(self, num_rows: int) -> tuple[int, ...]:
        return _counts_in(self._spans[bisect.bisect_right(self._firsts, num_rows) - 1], num_rows)

    def _plan(self) -> None:
        first, before = 0, (0,) * len(self.shares)
        starts = sorted({start for share in self.shares for start, _ in share.weights})
        while True:
            left = [share.max_rows is None or count < share.max_rows for share, count in zip(self.shares, before, strict=True)]
            if not any(left):
                self.num_rows = first
                return
            span = _Span(first, before, self._weights(first, left))
            self._spans.append(span)
            next_start = next((start for start in starts if start > first), None)
            end = self._end(span, next_start)
            if end is None:
                return
            first, before = end, _counts_in(span, end)

    def _weights(self, row: int, left: Sequence[bool]) -> tuple[int, ...]:
        """Returns the weights of the sources from a row on, as integers."""
        weights = [
            Fraction(str([weight for start, weight in share.weights if start <= row][-1])) if there else Fraction(0)
            for share, there in zip(self.shares, left, strict=True)
        ]
        if not any(weights):
            names = ", ".join(share.name for share, there in zip(self.shares, left, strict=True) if there)
            raise UsageError(
                f"data.mixture: from row {row:,} on only {names} are left, with weight 0: give one a weight, or the others more "
                "epochs"
            )
        scale = math.lcm(*(weight.denominator for weight in weights))
        return tuple(int(weight * scale) for weight in weights)

    def _end(self, span: _Span, next_start: int | None) -> int | None:
        """Returns the row before which a weight changes, or a source leaves; None: neither ever happens."""
        ends = [] if next_start is None else [next_start]
        for number, share in enumerate(self.shares):
            if share.max_rows is not None and span.weights[number]:
                # About as many rows as its share says, and certainly so after a few more.
                missing = share.max_rows - span.before[number]
                bound = span.first + -(-(missing + len(self.shares)) * sum(span.weights) // span.weights[number])
                ends.append(_row_with(span, number, share.max_rows, bound))
        return min(ends, default=None)


def _counts_in(span: _Span, num_rows: int) -> tuple[int, ...]:
    added = _shared_out(num_rows - span.first, span.weights)
    return tuple(before + more for before, more in zip(span.before, added, strict=True))


def _row_with(span: _Span, source: int, count: int, bound: int) -> int:
    """Returns the smallest number of rows, up to `bound`, among which the source has `count`."""
    rows = range(span.first, bound + 1)
    return rows[bisect.bisect_left(rows, count, key=lambda row: _counts_in(span, row)[source])]


def _shared_out(num_rows: int, weights: Sequence[int]) -> list[int]:
    """Returns how many of the first `num_rows` rows each source has. With one row more, exactly one source has one more.

    By halves: what one half of the sources has is rounded, the other half has the rest, and so on within each. The numbers of
    each half therefore never fall; rounding the share of each source by itself would not give that.
    """
    if len(weights) == 1:
        return [num_rows]
    half, total = len(weights) // 2, sum(weights)
    of_first = sum(weights[:half])
    # Rounded to the nearest, in integers: exact for any number of rows.
    rows = (2 * num_rows * of_first + total) // (2 * total) if total else 0
    return _shared_out(rows, weights[:half]) + _shared_out(num_rows - rows, weights[half:])
