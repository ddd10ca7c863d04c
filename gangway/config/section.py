"""The base of the configuration's sections, and the checks of their values. Free of JAX."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:Name`"""


class Section:
    """A part of the configuration. Its fields are its keys; `gangway.config.conversion` makes it of plain data."""

    shorthand: ClassVar[str | None] = None
    """The key that a text in the place of the section stands for. None: there must be a section."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message): what is wrong, the value found, what is allowed."""
    if not condition:
        raise ValueError(message)


def require_none(problems: Iterable[str]) -> None:
    """Raises ValueError with a line for each problem, so that a user sees all of them at once."""
    if lines := list(problems):
        raise ValueError("\n".join(lines))


def too_small(config: Any, minimum: float, *names: str) -> Iterator[str]:
    """Yields the problems of the fields that are less than `minimum` (null passes)."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            yield f"{name} = {value}: expected at least {minimum}"


def not_paths(config: Any, *names: str) -> Iterator[str]:
    """Yields the problems of the fields that do not have the form `package.module:Name`."""
    for name in names:
        value = getattr(config, name)
        if not PATH.fullmatch(value):
            yield f"{name} = {value!r}: expected package.module:Name"


def not_patterns(config: Any, *names: str) -> Iterator[str]:
    """Yields the problems of the fields that are no regular expressions (null passes)."""
    for name in names:
        try:
            re.compile(getattr(config, name) or "")
        except re.error as error:
            yield f"{name} = {getattr(config, name)!r}: expected a regular expression ({error})"


def default_of(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def parse_duration_s(text: str | int | float) -> float:
    """Returns `90`, `45s`, `30m`, `2h30m`, `1d12h` in seconds. Every character must belong to a number with a unit."""
    if isinstance(text, int | float):
        return float(text)
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    if text.strip().isdigit():
        return float(text)
    if not parts or "".join(n + u for n, u in parts) != text.replace(" ", ""):
        raise ValueError(f"duration {text!r}: expected seconds or numbers with units d, h, m, s, such as 45s, 30m or 2h30m")
    return sum(float(n) * units[u] for n, u in parts)


def repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that are there more than once, in their order."""
    return [name for name, number in Counter(names).items() if number > 1]


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", at_most: int = 1, cutoff: float = 0.6) -> str:
    """Returns the end of an error about an unknown name: `; did you mean cosine?`, or nothing if none of `known` is near.
    `prefix` is shown before each name. `cutoff`: the least similarity, from 0 to 1 (`difflib`)."""
    near = difflib.get_close_matches(name, list(known), n=at_most, cutoff=cutoff)
    return f"; did you mean {', '.join(prefix + match for match in near)}?" if near else ""


def not_positive(config: Any, *names: str) -> Iterator[str]:
    """Yields the problems of the fields that are not more than 0 (null passes)."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            yield f"{name} = {value}: expected a positive number"
