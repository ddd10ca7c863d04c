"""A stream: an iterable that is read forward, and is set to a position by a state of its own if it has one, else by counting."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trainers.errors import UsageError

MAX_STATE_BYTES = 1 << 20
"""A larger state is not kept: each checkpoint has that of every host."""
NAMES = ("get_state", "state")
"""The names of the method that returns a state; `set_state` takes it."""
REACHED = "reached"
"""The key, in the text of a state of the end, of the number of items before it."""


class Stream:
    """Reads `iterable` item by item. `position` is the number of items before the next one.

    If its iterator, or itself, has `get_state()` or `state()`, and `set_state(state)`, the states before each `every`-th item are
    kept, the newest `num_states` of them, and the first. The stream is set to the nearest of them, and read on from there.
    Without states it begins anew, which an iterator cannot: UsageError(`no_way_back`). Not thread-safe.
    """

    def __init__(self, iterable: Iterable[Any], *, every: int, num_states: int, no_way_back: str, note: Callable[[str], None]):
        self.iterable, self.every, self.num_states = iterable, every, num_states
        self.no_way_back, self.note = no_way_back, note
        self.position, self.ended = 0, False
        self._iterator: Iterator[Any] = iter(iterable)
        self._states: dict[int, tuple[int, str]] = {}
        """(the number of items before it, the state) by the position for which it is kept. They differ at the end, where a last
        part of `every` items is not full."""
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
        try:
            item = next(self._iterator)
        except StopIteration:
            self.ended = True
            # Also where the last items are fewer: whoever goes on from there must find the end, and not count to it.
            self._keep(-(-self.position // self.every) * self.every)
            raise
        self.position += 1
        return item

    def go_to(self, index: int, oldest: int) -> bool:
        """Goes where item `index` can be read from: to the nearest kept state before it, or to the beginning. Stays if the item
        is ahead, or if the caller still has it, as it has all from `oldest` on. Returns whether it has moved: then nothing that
        the caller has kept comes before the next item."""
        nearest = max((position for position in self._states if position <= index), default=0)
        if index >= oldest and self._states.get(nearest, (nearest, ""))[0] <= self.position:
            return False
        self._set(nearest)
        return True

    def state_at(self, position: int) -> str | None:
        """Returns the state before item `position`, as text; None if it is not known."""
        if position == self.position and not self.ended:
            self._keep(position)
        if position not in self._states:
            return None
        reached, state = self._states[position]
        return state if reached == position else json.dumps({**json.loads(state), REACHED: reached})

    def remember(self, position: int, state: str) -> None:
        """Takes a state that `state_at(position)` has returned, in this process or another."""
        self._states[position] = (json.loads(state).get(REACHED, position), state)

    def _set(self, position: int) -> None:
        reached, state = self._states.get(position, (position, None))
        if state is None and iter(self.iterable) is self.iterable:
            raise UsageError(self.no_way_back)
        # First: the state may be that of a new iterator, or of the iterable, which its next iterator begins with.
        self._iterator = iter(self.iterable)
        if state is not None:
            holder = self._holder()
            assert holder is not None
            holder[0].set_state(decoded(state))
            if holder[0] is not self._iterator:
                self._iterator = iter(self.iterable)
        self.position, self.ended = reached, False

    def _holder(self) -> tuple[Any, str] | None:
        """Returns the object that has the state, and the name of the method that returns it; None: there is no state."""
        for target in (self._iterator, self.iterable):
            for name in NAMES:
                if callable(getattr(target, name, None)) and callable(getattr(target, "set_state", None)):
                    return target, name
        return None

    def _keep(self, position: int) -> None:
        if not self.has_state or position in self._states:
            return
        holder = self._holder()
        assert holder is not None
        state = encoded(getattr(*holder)(), type(holder[0]).__name__)
        if len(state) > MAX_STATE_BYTES:
            self.has_state, self._states = False, {}
            self.note(
                f"the state of the data has {len(state)} bytes as text, more than {MAX_STATE_BYTES}, and is not saved: a resumed "
                "run reads the data again up to its position"
            )
            return
        self._states[position] = (self.position, state)
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
