"""The base of the sections that are checked as they are built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gangway.config.conversion import convert_sections
from gangway.config.section import Section, require_none


class CheckedSection(Section):
    """A section that raises ValueError with a line for each of its problems, and of those of the sections in it."""

    def __post_init__(self):
        require_none([*convert_sections(self), *self._problems()])

    def _problems(self) -> Iterator[str]:
        """Yields what is wrong with the values, a line each."""
        raise NotImplementedError


def not_positive(config: Any, *names: str) -> Iterator[str]:
    """Yields the problems of the fields that are not more than 0 (null passes)."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            yield f"{name} = {value}: expected a positive number"
