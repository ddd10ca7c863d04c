"""Problems of a run, each in a line for its user."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from gangway.errors import DataMissingError, UsageError, may_pass, notes_of, user_frame


def attempt(problems: list[str], what: str, make: Callable[[], Any], doubts: list[str] | None = None) -> Any:
    """Returns what `make` returns. If it raises, returns None and records the problem: in `doubts`, if given, when it may go
    away by itself."""
    try:
        return make()
    except Exception as error:  # the user's code, at the boundary of this process: recorded, with where it happened
        if doubts is not None and may_pass(error):
            doubts.append(f"{what}: {type(error).__name__}: {error}")
            return None
        # The optimizer repeats those of the schedule.
        problems.extend(line for line in described(what, error) if line not in problems)
    return None


def described(what: str, error: Exception) -> list[str]:
    """Returns the lines for an error of `what`, with where it arose in the user's code."""
    frame = user_frame(error)
    where = (f" ({frame})" if frame else "") + "".join(f"; {note}" for note in notes_of(error))
    if isinstance(error, UsageError | DataMissingError):
        *lines, last = str(error).splitlines() or [""]
        return [*lines, last + where]
    if isinstance(error, ValueError) and not frame:  # a check's own words
        return [f"{what}: {error}"]
    traceback.print_exc()
    inside = traceback.extract_tb(error.__traceback__)[-1]
    inside_of = "" if frame else f" ({inside.filename}, line {inside.lineno})"
    return [f"{what}: {type(error).__name__}: {error}{inside_of}{where}"]
