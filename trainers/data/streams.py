"""A stream: an iterable that is read forward, and is set to a position by a state of its own if it has one, else by counting."""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from gangway.errors import DataError, UsageError

MAX_STATE_BYTES = 1 << 20
"""A larger state is not kept: each checkpoint has that of every host."""
NAMES = (("get_state", "set_state"), ("state", "set_state"), ("state_dict", "load_state_dict"))
"""The names of the methods that return a state, and take it."""
READ_AGAIN = "a resumed run reads the data again up to its position"
REACHED, BEFORE, LENGTH = "reached", "before", "length"
"""Keys in the text of a state: of the number of items before it, at an end amid a batch; of that before its pass over the
iterable, and of a pass."""


class Kept(NamedTuple):
    reached: int
    """The number of items before the state. It differs from the position for which it is kept at the end, where a last part of
    `every` items is not full."""
    before: int
    """The number of items before the pass that it is of."""
    state: str


class Stream:
    """Reads `iterable` item by item. `position` is the number of items before the next one.

    If its iterator, or itself, has the methods of a pair of NAMES, the states before each `every`-th item are kept, the newest
    `num_states` of them, and the first. The stream is set to the nearest of them, and read on from there. Without states it
    begins anew, which an iterator cannot: UsageError(`no_way_back`).

    At its end it is begun anew, until there were `passes` over it. Positions count on. All passes must have as many items:
    DataError. An iterator without a state has one pass. Not thread-safe.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        every: int,
        num_states: int,
        no_way_back: str,
        note: Callable[[str], None],
        passes: int = 1,
    ):
        self.iterable, self.every, self.num_states, self.passes = iterable, every, num_states, passes
        self.no_way_back, self.note = no_way_back, note
        self.position, self.ended = 0, False
        self.length: int | None = None
        """The number of items of a pass; None until the end of the first."""
        self._before = 0
        self._rewound = False
        self._iterator: Iterator[Any] = iter(iterable)
        self._states: dict[int, Kept] = {}
        self.has_state = self._holder() is not None
        self._keep(0)

    @property
    def can_go_back(self) -> bool:
        """Whether it can be read again from its beginning."""
        return self.has_state or iter(self.iterable) is not self.iterable

    def read(self) -> Any:
        """Returns the next item. Raises StopIteration at the end."""
        if self.position % self.every == 0:
            self._keep(self.position)
        while True:
            try:
                item = next(self._iterator)
            except StopIteration:
                if self._begun_anew():
                    continue
                self.ended = True
                # Also where the last items are fewer: whoever goes on from there must find the end, and not count to it.
                self._keep(-(-self.position // self.every) * self.every)
                raise
            self.position, self._rewound = self.position + 1, False
            return item

    def _begun_anew(self) -> bool:
        """Begins the next pass. Returns False if there is none."""
        found = self.position - self._before
        if not found and self._before and self.has_state and not self._rewound:
            # Its `__iter__` goes on where it has ended: only the state of its beginning leads back.
            self._rewound = True
            self._set_state(self._states[0].state)
            return True
        if not found or self.passes == 1 or not self.can_go_back:
            return False
        if self.length not in (None, found):
            raise DataError(
                f"{type(self.iterable).__name__} ended after {found} batches, and after {self.length} in the pass before: "
                "expected as many in every pass, or an iterable that never ends, with max_num_steps"
            )
        self.length = found
        if self.position // found >= self.passes:
            return False
        self._before, self._iterator = self.position, iter(self.iterable)
        return True

    def go_to(self, index: int, oldest: int) -> bool:
        """Goes where item `index` can be read from: to the nearest kept state before it, or to the beginning. Stays if the item
        is ahead, or if the caller still has it, as it has all from `oldest` on. Returns whether it has moved: then nothing that
        the caller has kept comes before the next item."""
        nearest = max((position for position in self._states if position <= index), default=0)
        if index >= oldest and (nearest not in self._states or self._states[nearest].reached <= self.position):
            return False
        self._set(nearest)
        return True

    def read_to(self, stop: int, kept: deque[Any], checked: Callable[[Any, int], Any]) -> int:
        """Reads until `stop` items were read, or there are no more, and returns how many it has read. `kept` has the last items
        before the position, as `checked(item, index)` returns them; goes back if `stop` comes before them."""
        if self.go_to(stop - 1, self.position - len(kept)):
            kept.clear()
        first = self.position
        while self.position < stop and not self.ended:
            try:
                item = self.read()
            except StopIteration:
                break
            kept.append(checked(item, self.position - 1))
        return self.position - first

    def state_at(self, position: int) -> str | None:
        """Returns the state before item `position`, as text; None if it is not known."""
        if position == self.position and not self.ended:
            self._keep(position)
        if position not in self._states:
            return None
        reached, before, state = self._states[position]
        about = {REACHED: reached} if reached != position else {}
        about |= {BEFORE: before} if before else {}
        about |= {LENGTH: self.length} if self.length else {}
        return json.dumps({**json.loads(state), **about}) if about else state

    def remember(self, position: int, state: str) -> None:
        """Takes a state that `state_at(position)` has returned, in this process or another."""
        about = json.loads(state)
        self.length = about.get(LENGTH, self.length)
        self._states[position] = Kept(about.get(REACHED, position), about.get(BEFORE, 0), state)

    def _set(self, position: int) -> None:
        kept = self._states.get(position)
        if kept is None and iter(self.iterable) is self.iterable:
            raise UsageError(self.no_way_back)
        # First: the state may be that of a new iterator, or of the iterable, which its next iterator begins with.
        self._iterator = iter(self.iterable)
        if kept is not None:
            self._set_state(kept.state)
        self.position, self._before = (position, 0) if kept is None else kept[:2]
        self.ended = self._rewound = False

    def _set_state(self, state: str) -> None:
        holder = self._holder()
        assert holder is not None
        getattr(holder[0], holder[2])(decoded(state))
        if holder[0] is not self._iterator:
            self._iterator = iter(self.iterable)

    def _holder(self) -> tuple[Any, str, str] | None:
        """Returns the object that has the state, and the names of the methods that return it and take it; None: there is none."""
        for target in (self._iterator, self.iterable):
            # Those of `datasets` lose the examples in the buffer of a shuffle, and some of interleaved ones.
            if type(target).__module__.partition(".")[0] != "datasets":
                for names in NAMES:
                    if all(callable(getattr(target, name, None)) for name in names):
                        return target, *names
        return None

    def _keep(self, position: int) -> None:
        if not self.has_state or position in self._states:
            return
        holder = self._holder()
        assert holder is not None
        problem = ""
        try:
            state = encoded(getattr(holder[0], holder[1])(), type(holder[0]).__name__)
            if len(state) > MAX_STATE_BYTES:
                problem = f"the state of the data has {len(state)} bytes as text, more than {MAX_STATE_BYTES}, and is not saved"
        except UsageError as error:
            if holder[1] != "state_dict":
                raise
            problem = str(error)  # that of a loader of torchdata may have tensors
        if problem:
            self.has_state, self._states = False, {}
            self.note(f"{problem}: {READ_AGAIN}")
            return
        self._states[position] = Kept(self.position, self._before, state)
        for old in sorted(self._states)[1 : -self.num_states]:  # the first stays: it is the way back to the beginning
            del self._states[old]


def encoded(state: Any, owner: str) -> str:
    """Returns a state as text. Raises UsageError if it is neither bytes nor a value that JSON keeps as it is."""
    if isinstance(state, bytes):
        return json.dumps({"bytes": base64.b64encode(state).decode()})
    try:
        text = json.dumps({"value": state}, allow_nan=False)
        if json.loads(text)["value"] == state:
            return text
        problem = "JSON would change it (it makes lists of tuples, and text of the keys of a dict)"
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise UsageError(
        f"the state of the data, which {owner} returned, cannot be saved: {problem}; expected bytes, or dicts with text keys, "
        "lists, text, numbers, booleans and None"
    )


def decoded(text: str) -> Any:
    document = json.loads(text)
    return base64.b64decode(document["bytes"]) if "bytes" in document else document["value"]
