"""Ceilings hold figures of the project where they are: a figure may not rise above its ceiling, nor fall far below it.

`ceilings.toml` has the figures of the product. A ceiling is raised by an entry, which says why, and never by another number. What
decides here knows rows and numbers alone.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests import ROOT

FILE = ROOT / "tests" / "ceilings.toml"
MIN_WORDS = 5
"""A reason of fewer words says nothing."""

Rows = Mapping[str, float]


@dataclass(frozen=True)
class Raise:
    """An entry: a part of the work raises one ceiling."""

    row: str
    old: float
    new: float
    part: str
    why: str


@dataclass(frozen=True)
class Limit:
    """What holds for a ceiling."""

    lag: float
    """How far the figure may lie below it."""
    growth: float
    """By how much one part of the work may raise it."""
    growth_of_large_part: float

    def of(self, base: float) -> Limit:
        """Returns the limit of a row whose limits are shares of its base."""
        return Limit(self.lag * base, self.growth * base, self.growth_of_large_part * base)


# ------------------------------------------------------------------ for any table


def in_force(base: Rows, raises: Iterable[Raise]) -> dict[str, float]:
    """Returns the ceilings: the figures that a table began with, and what its entries, in their order, have made of them."""
    return {**base, **{entry.row: entry.new for entry in raises}}


def broken_chains(base: Rows, raises: Iterable[Raise]) -> list[str]:
    """Returns what is wrong with entries by themselves."""
    complaints = []
    now = dict(base)
    for entry in raises:
        what = f"the raise of {entry.row!r} by part {entry.part!r}"
        if entry.row not in now:
            complaints.append(f"{what}: there is no such row; expected one of {', '.join(map(repr, now))}")
            continue
        if entry.old != now[entry.row]:
            complaints.append(
                f"{what}: old is {entry.old}, but the ceiling before it is {now[entry.row]}: give that as old; "
                "where a ceiling was lowered, lower or remove its last entries"
            )
        if entry.new <= entry.old:
            complaints.append(f"{what}: new is {entry.new}, expected more than {entry.old}: to lower a ceiling needs no entry")
        if len(entry.why.split()) < MIN_WORDS:
            complaints.append(f"{what}: why is {entry.why!r}, expected a reason of {MIN_WORDS} words or more")
        now[entry.row] = entry.new
    return complaints


def overdrawn(raises: Iterable[Raise], allowed: Callable[[str, str], float]) -> list[str]:
    """Returns the rows that a part of the work has raised by more than `allowed(row, part)`, all its entries together."""
    total: dict[tuple[str, str], float] = defaultdict(int)
    for entry in raises:
        total[entry.row, entry.part] += entry.new - entry.old
    return [
        f"part {part!r} raises {row!r} by {number}, allowed are {allowed(row, part):g}: make something go"
        for (row, part), number in total.items()
        if number > allowed(row, part)
    ]


def raised_silently(old: Rows, new: Rows, raises: Iterable[Raise]) -> list[str]:
    """Returns the ceilings that are higher in `new` than in `old`, and that no entries lead to from there. Both tables have
    ceilings in force; `raises` are those of the new one. A row that only one of them has is no raise."""
    entries = [*raises]
    complaints = []
    for row in [row for row in new if row in old and new[row] > old[row]]:
        reached = new[row]
        for entry in reversed(entries):
            if entry.row == row and entry.new == reached > old[row]:
                reached = entry.old
        if reached > old[row]:
            complaints.append(
                f"the ceiling of {row!r} is {new[row]} and was {old[row]}: put back the number, and add an entry "
                f"(row, old, new, part, why) from {old[row]} to {new[row]}, or make something go"
            )
    return complaints


def entries_changed(old: Iterable[Raise], new: Iterable[Raise]) -> list[str]:
    """Returns the entries of `new` that end higher than they did in `old`. An entry is known by its row, part and reason."""
    ended: dict[tuple[str, str, str], float] = {}
    for entry in old:
        key = (entry.row, entry.part, entry.why)
        ended[key] = min(entry.new, ended.get(key, entry.new))
    complaints = []
    for entry in new:
        before = ended.get((entry.row, entry.part, entry.why), entry.new)
        if entry.new > before:
            complaints.append(
                f"the raise of {entry.row!r} by part {entry.part!r} ends at {entry.new} and ended at {before}: put that back, "
                "and add another entry with its own reason"
            )
    return complaints


def off_ceiling(ceilings: Rows, figures: Rows, lag: Callable[[str], float], places: Mapping[str, str] | None = None) -> list[str]:
    """Returns the figures above their ceilings, and the ceilings more than `lag(row)` above their figures. `places` says where
    the figure of a row was found."""
    complaints = []
    for row in [*ceilings, *(row for row in figures if row not in ceilings)]:
        what = f"{row} ({places[row]})" if places and row in places else row
        if row not in ceilings:
            complaints.append(f"{what}: found {figures[row]}, but there is no ceiling: add the row")
        elif row not in figures:
            complaints.append(f"{what}: the ceiling is {ceilings[row]}, but nothing was found: remove the row")
        elif figures[row] > ceilings[row]:
            complaints.append(
                f"{what}: found {figures[row]}, the ceiling is {ceilings[row]}: make something go, or add an entry that says why"
            )
        elif figures[row] < ceilings[row] - lag(row):
            complaints.append(
                f"{what}: found {figures[row]}, the ceiling is {ceilings[row]}: lower the ceiling to keep what was gained"
            )
    return complaints


def assert_none(complaints: Collection[str]) -> None:
    """Fails with all complaints: an assertion of pytest would cut the list short."""
    assert not complaints, "\n".join(["", *complaints])


def lowest(tables: Iterable[Rows]) -> dict[str, float]:
    """Returns the lowest figure that each row has had."""
    found: dict[str, float] = {}
    for table in tables:
        found.update({row: min(figure, found.get(row, figure)) for row, figure in table.items()})
    return found


# ------------------------------------------------------------------ the product's

SHARE_OF_SIZE = Limit(lag=0.02, growth=0.03, growth_of_large_part=0.08)
OF_IMPORTS = Limit(lag=1, growth=2, growth_of_large_part=4)
OF_JOURNEYS = {
    "files": Limit(lag=1, growth=2, growth_of_large_part=4),
    "functions": Limit(lag=3, growth=8, growth_of_large_part=20),
}
SIZE, IMPORTS = ("statements", "files"), "imports"


@dataclass(frozen=True)
class Ceilings:
    """What `ceilings.toml` says. Rows are named `statements`, `imports 1` and `steady step: files`."""

    base: Rows
    raises: Sequence[Raise]
    large_parts: Collection[str]

    @property
    def rows(self) -> dict[str, float]:
        return in_force(self.base, self.raises)

    @property
    def of_journeys(self) -> dict[str, float]:
        return {row: ceiling for row, ceiling in self.rows.items() if ": " in row}

    @property
    def of_sources(self) -> dict[str, float]:
        return {row: ceiling for row, ceiling in self.rows.items() if ": " not in row}

    def lag(self, row: str) -> float:
        return self._limit(row).lag

    def allowed(self, row: str, part: str) -> float:
        limit = self._limit(row)
        return limit.growth_of_large_part if part in self.large_parts else limit.growth

    def _limit(self, row: str) -> Limit:
        if row in SIZE:
            return SHARE_OF_SIZE.of(self.base[row])
        return OF_IMPORTS if row.startswith(IMPORTS) else OF_JOURNEYS[row.rpartition(": ")[2]]


def parse(text: str) -> Ceilings:
    """Returns what such a file says."""
    table = tomllib.loads(text)
    base: dict[str, float] = dict(table["size"])
    base |= import_rows(table["imports"]["most"])
    base |= journey_rows(table["journeys"])
    return Ceilings(base, [Raise(**entry) for entry in table.get("raise", ())], table["large_parts"])


def import_rows(numbers: Iterable[int]) -> dict[str, int]:
    """Returns a row for each of these numbers of imports, the highest first."""
    return {f"{IMPORTS} {rank}": number for rank, number in enumerate(numbers, 1)}


def journey_rows(journeys: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Returns a row for each number of each journey."""
    return {f"{journey}: {what}": number for journey, numbers in journeys.items() for what, number in numbers.items()}
