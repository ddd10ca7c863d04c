"""Numbers, durations and texts, for people."""

from __future__ import annotations

import re
import unicodedata
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 2000
"""Of a file or a pipe: the letters of a line."""


def count(number: float) -> str:
    """1,234 · 41.2 k · 3.21 M · 1.50 G."""
    for limit, divisor, unit in ((1e4, 1, ""), (999.5e3, 1e3, " k"), (999.5e6, 1e6, " M")):
        if abs(number) < limit:
            return _three_digits(number / divisor) + unit if unit else f"{number:,.0f}"
    return _three_digits(number / 1e9) + " G"


def seconds(duration_s: float) -> str:
    """0.43 s · 12.3 s · 1 min 43 s · 2 h 05 min."""
    if duration_s < 9.995:
        return f"{duration_s:.2f} s"
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    minutes, rest_s = divmod(round(duration_s), 60)
    return f"{minutes} min {rest_s:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def clock_time(elapsed_s: float) -> str:
    """0:07 · 12:34 · 1:02:03."""
    minutes, rest_s = divmod(int(max(0.0, elapsed_s)), 60)
    return f"{minutes}:{rest_s:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest_s:02}"


def printable(text: str) -> str:
    """Replaces control characters: texts of a model or a program must not control the terminal."""
    # Of spaces Python counts as printable the plain one alone; there are those of Chinese texts, and before a unit.
    return "".join(c if c.isprintable() or c == "\n" or unicodedata.category(c) == "Zs" else "·" for c in text.expandtabs(4))


def plain_console(**how: Any) -> Console:
    """Returns a console for tables and lines of any text: nothing of it is taken for markup, for a picture or for an order to
    the terminal. `how`: as `rich.console.Console` takes it."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **about: Any) -> Text:
            return super().render_str(printable(text), **{**about, "markup": False, "emoji": False, "highlight": False})

        def print(self, *objects: Any, **about: Any) -> None:
            with nullcontext() if self.is_terminal else self.capture() as captured:
                super().print(*objects, **about)
            if captured is not None:  # the last column is filled up to the length of its longest cell
                self.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))

    return Plain(**{"highlight": False, **how})


def table_console() -> Console:
    """Returns a console for tables. Of a file or a pipe a row is one line, whatever its length."""
    screen = plain_console()
    return screen if screen.is_terminal else plain_console(width=WIDE)


def sentence(text: str) -> str:
    """Returns the first line of a message."""
    lines = printable(text).strip().splitlines()
    return lines[0].rstrip() if lines else ""


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
