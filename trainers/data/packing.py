"""Which parts of which documents share a row. A plan is made once, from the lengths alone; each row of an epoch is then a pure
function of (seed, epoch, its number).

A row has `sequence_length` + 1 places: its first `sequence_length` tokens each predict their successor. The first token of a part
of a document has no predecessor in its row, and is no target.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from trainers.data.epoch_order import order, shuffled

Packing = Literal["concat", "fit"]
Overlong = Literal["cut", "split", "drop"]
Truncation = Literal["keep_start", "keep_end"]

SHORTEST = 2
"""Tokens of the shortest document that has a target."""
KEPT_EPOCHS = 2
"""How many epochs' orders of the documents are kept: the loader reads ahead past the end of one."""


class Piece(NamedTuple):
    """A part of a document: its tokens from `start` to before `stop`."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Counts:
    """What a plan makes of the documents of a source."""

    num_documents: int
    num_rows: int
    row_places: int
    """The tokens that a row has room for."""
    filled_places: int
    """Of all rows of an epoch."""
    num_short: int
    """Documents of less than two tokens, which have no target: they are left out."""
    num_overlong: int = 0
    """Documents that are longer than a row."""
    lost_tokens: int = 0
    """The tokens of overlong documents that are in no row."""

    @property
    def efficiency(self) -> float:
        """The fraction of all places that hold a token."""
        return self.filled_places / max(1, self.num_rows * self.row_places)


class Concat:
    """Rows are windows over the stream of all documents, one after the other, in an order of each epoch's own.

    Windows overlap by one token, so each token of the stream but the first is the successor of another exactly once: the last
    target of one window is the first input of the next. A document that a border cuts goes on in the next window, without what
    came before.
    """

    def __init__(self, lengths: np.ndarray, sequence_length: int, seed: tuple[int, ...], *, shuffle: bool = True):
        self.sequence_length, self.seed, self.shuffle = sequence_length, seed, shuffle
        self._documents = np.flatnonzero(lengths >= SHORTEST)
        self._lengths = lengths[self._documents].astype(np.int64)
        self._streams: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.num_tokens = int(self._lengths.sum())
        num_windows = -(-max(0, self.num_tokens - 1) // sequence_length)
        self.counts = Counts(
            num_documents=len(lengths),
            num_rows=num_windows,
            row_places=sequence_length + 1,
            filled_places=self.num_tokens + max(0, num_windows - 1),
            num_short=len(lengths) - len(self._documents),
            num_overlong=int(np.count_nonzero(self._lengths > sequence_length + 1)),
        )

    def __len__(self) -> int:
        return self.counts.num_rows

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        documents, offsets = self._stream(epoch)
        start = row * self.sequence_length
        stop = min(start + self.sequence_length + 1, self.num_tokens)
        first, end = np.searchsorted(offsets, start, "right") - 1, np.searchsorted(offsets, stop, "left")
        return [
            Piece(
                int(documents[place]),
                max(0, start - int(offsets[place])),
                min(stop, int(offsets[place + 1])) - int(offsets[place]),
            )
            for place in range(first, end)
        ]

    def _stream(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the documents in their order, the offset of each in the stream and the end)."""
        if (kept := self._streams.get(epoch)) is not None:
            return kept
        places = order(len(self._documents), *self.seed, epoch) if self.shuffle else np.arange(len(self._documents))
        offsets = np.concatenate([[0], np.cumsum(self._lengths[places])])
        stream = self._documents[places], offsets
        # Two threads may both compute it: it is the same stream.
        self._streams = {**dict(list(self._streams.items())[1 - KEPT_EPOCHS :]), epoch: stream}
        return stream


class Pieces:
    """The pieces that whole rows are made of: each document once, or the parts of one that is longer than a row."""

    def __init__(
        self,
        lengths: np.ndarray,
        places: int,
        overlong: Overlong,
        truncation: Truncation = "keep_start",
        *,
        shortest: int = SHORTEST,
        teaches: Callable[[Piece], bool] | None = None,
    ):
        """`places`: the tokens that a row has room for. Documents with less than `shortest` tokens are left out. `teaches`:
        whether a part of a document that is split has a target; one that has none is left out. None: each has."""
        kept = lengths >= shortest
        is_overlong = lengths > places
        if overlong == "drop":
            kept &= ~is_overlong
        self.documents = np.flatnonzero(kept).astype(np.int32)
        whole = lengths[self.documents].astype(np.int64)
        self.starts = np.zeros(len(whole), np.int64)
        if overlong == "split":
            # Overlapping by one token, as windows do: no target is lost.
            parts = -(-(whole - 1) // (places - 1))
            self.documents, whole = np.repeat(self.documents, parts), np.repeat(whole, parts)
            of_first = np.repeat(np.cumsum(parts) - parts, parts)
            self.starts = (np.arange(len(whole)) - of_first) * (places - 1)
        elif truncation == "keep_end":
            self.starts = np.maximum(0, whole - places)
        self.lengths = np.minimum(whole - self.starts, places)
        self.num_short, self.num_overlong = int(np.count_nonzero(lengths < shortest)), int(np.count_nonzero(is_overlong))
        over = lengths[is_overlong].astype(np.int64)
        self.lost_tokens = {"cut": int((over - places).sum()), "drop": int(over.sum()), "split": 0}[overlong]
        if overlong == "split" and teaches is not None:
            self._leave_out(is_overlong, teaches)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Piece:
        start = int(self.starts[index])
        return Piece(int(self.documents[index]), start, start + int(self.lengths[index]))

    def _leave_out(self, is_overlong: np.ndarray, teaches: Callable[[Piece], bool]) -> None:
        """Leaves out the parts of documents that do not teach."""
        parts = np.flatnonzero(is_overlong[self.documents])
        kept = np.ones(len(self.documents), bool)
        kept[parts] = [teaches(self[index]) for index in parts.tolist()]
        # Parts of one document overlap by a token: it is lost with the last of those that have it.
        follows = np.append(self.starts[1:] > 0, False)
        shared = int(np.count_nonzero(follows[:-1])) - int(np.count_nonzero(follows[:-1] & kept[:-1] & kept[1:]))
        self.lost_tokens = int(self.lengths[~kept].sum()) - shared
        self.documents, self.starts, self.lengths = self.documents[kept], self.starts[kept], self.lengths[kept]

    def counts(self, num_documents: int, num_rows: int, row_places: int) -> Counts:
        filled = int(self.lengths.sum())
        return Counts(num_documents, num_rows, row_places, filled, self.num_short, self.num_overlong, self.lost_tokens)


class OnePerRow:
    """Each piece has a row of its own."""

    def __init__(self, lengths: np.ndarray, pieces: Pieces, places: int):
        self._pieces = pieces
        self.counts = pieces.counts(len(lengths), len(pieces), places)

    def __len__(self) -> int:
        return len(self._pieces)

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        return [self._pieces[row]]


class Part(NamedTuple):
    """What each bin of a group holds of one length."""

    length: int
    num_pieces: int
    first: int = 0
    """The number, among all pieces of this length, of the first one of the first bin."""


class Group(NamedTuple):
    """Bins that hold the same lengths."""

    num_bins: int
    parts: tuple[Part, ...]


class Fit:
    """Rows hold whole pieces, by best-fit decreasing (Johnson, 1973): the longest first, each into the fullest bin with room.

    Which lengths share a bin depends only on how many pieces have each length. So the plan is made of groups of equal bins, and
    does not grow with the number of documents. Each epoch deals out the pieces of a length anew.
    """

    def __init__(self, lengths: np.ndarray, pieces: Pieces, places: int, seed: tuple[int, ...], *, shuffle: bool = True):
        self._pieces, self.seed, self.shuffle = pieces, seed, shuffle
        # Stable: the same on every machine.
        self._by_length = np.argsort(pieces.lengths, kind="stable").astype(np.int32)
        num_of_length = np.bincount(pieces.lengths, minlength=places + 1)
        self._first_of_length = np.cumsum(num_of_length) - num_of_length
        self._num_of_length = num_of_length
        self._groups = list(_numbered(best_fit_decreasing(num_of_length, places)))
        self._ends = np.cumsum([group.num_bins for group in self._groups], dtype=np.int64)
        num_bins = int(self._ends[-1]) if self._groups else 0
        self.counts = pieces.counts(len(lengths), num_bins, places)

    def __len__(self) -> int:
        return self.counts.num_rows

    @property
    def most_pieces(self) -> int:
        """The largest number of pieces in a row, the same in each epoch."""
        return max((sum(part.num_pieces for part in group.parts) for group in self._groups), default=0)

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        place = int(np.searchsorted(self._ends, row, "right"))
        group = self._groups[place]
        bin_in_group = row - (int(self._ends[place]) - group.num_bins)
        return [
            self._piece(epoch, part.length, part.first + bin_in_group * part.num_pieces + number)
            for part in group.parts
            for number in range(part.num_pieces)
        ]

    def _piece(self, epoch: int, length: int, number: int) -> Piece:
        if self.shuffle:
            number = shuffled(number, int(self._num_of_length[length]), *self.seed, epoch, length)
        return self._pieces[int(self._by_length[int(self._first_of_length[length]) + number])]


def best_fit_decreasing(num_of_length: np.ndarray, places: int) -> list[Group]:
    """Returns the bins of `places` places for `num_of_length[n]` pieces of each length n from 1 to `places`."""
    groups: dict[int, list[Group]] = {}
    rooms: list[int] = []  # the keys of `groups`, in order

    def add(room: int, group: Group) -> None:
        if group.num_bins:
            if room not in groups:
                bisect.insort(rooms, room)
            groups.setdefault(room, []).append(group)

    def take(length: int) -> tuple[int, Group | None]:
        """Returns the fullest bins with room for a piece, and how much room each has; without a group: new bins."""
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            return places, None
        room = rooms[at]
        group = groups[room].pop()
        if not groups[room]:
            del groups[room], rooms[at]
        return room, group

    for length in np.flatnonzero(num_of_length)[::-1].tolist():
        left = int(num_of_length[length])
        while left:
            room, group = take(length)
            each = min(room // length, left)
            num_bins = left // each if group is None else min(group.num_bins, left // each)
            before = () if group is None else group.parts
            add(room - each * length, Group(num_bins, (*before, Part(length, each))))
            if group is not None:
                add(room, Group(group.num_bins - num_bins, before))
            left -= num_bins * each
    return [group for room in rooms for group in groups[room]]


def _numbered(groups: list[Group]) -> Iterator[Group]:
    """Yields the groups, with pieces dealt out to each."""
    dealt: dict[int, int] = {}
    for group in groups:
        parts = []
        for part in group.parts:
            parts.append(part._replace(first=dealt.get(part.length, 0)))
            dealt[part.length] = parts[-1].first + group.num_bins * part.num_pieces
        yield Group(group.num_bins, tuple(parts))


Plan = Concat | OnePerRow | Fit
"""The rows of any epoch, by index, as many in each: `pieces(epoch, row)` is what is in one, in its order."""


def plan(
    lengths: np.ndarray,
    packing: Packing | None,
    sequence_length: int,
    seed: tuple[int, ...],
    *,
    overlong: Overlong = "cut",
    truncation: Truncation = "keep_start",
    shuffle: bool = True,
    teaches: Callable[[Piece], bool] | None = None,
) -> Plan:
    """Returns the rows that documents of these lengths make. `packing` None: each document has a row of its own. `seed`: the
    numbers that the shuffling depends on, beside the epoch. `teaches`: as for `Pieces`."""
    lengths = np.asarray(lengths)
    if packing == "concat":
        return Concat(lengths, sequence_length, seed, shuffle=shuffle)
    places = sequence_length + 1
    pieces = Pieces(lengths, places, overlong, truncation, teaches=teaches)
    if packing == "fit":
        return Fit(lengths, pieces, places, seed, shuffle=shuffle)
    return OnePerRow(lengths, pieces, places)
