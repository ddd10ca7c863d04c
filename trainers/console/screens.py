"""The two consoles. Both print the same lines for events. Between them, a terminal shows two live lines at the bottom, and a log
gets a line with the same numbers from time to time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from gangway.first_line import CLOCK_WIDTH, TERMINAL_CLOCK_WIDTH
from gangway.storage import durable
from gangway.terminal import Shown, shown
from trainers.console.text import clock_time, printable
from trainers.console.view import STATES, Event, Line, View, facts, lines_of, measures, metrics_line, own_metrics, progress

PLAIN_EVERY_S = 5.0
"""The least time between two lines of metrics in a log. Evaluations and the last step are always shown."""
WITH_BAR = 110
"""Columns of a terminal that has room for a bar beside the numbers."""
BAR = 20

CONSOLE_LOG = "console.log"
"""The file in a run's folder with the lines of its console, of all launches."""

LinesOf = Callable[[Event, View], list[Line]]
Page = Callable[[Any, Any], None]
"""(rich console, summary) -> None: prints the page at the end of a run."""


class Console(Protocol):
    def show(self, event: Event) -> None: ...

    def close(self) -> None: ...


class PlainConsole:
    """Lines of text, each with the time since the start."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float],
        began_s: float | None = None,
        lines_of: LinesOf = lines_of,
        page: Page | None = None,
        view: View | None = None,
    ):
        self._stream, self._clock, self._lines_of, self._page = stream, clock, lines_of, page
        self._view = view or View(started_s=clock() if began_s is None else began_s)
        self._last_metrics_s = float("-inf")

    def show(self, event: Event) -> None:
        self._view.update(event)
        if event["ev"] == "summary" and self._page is not None:
            from rich.console import Console as Screen

            self._page(Screen(file=self._stream, highlight=False, width=110, color_system=None), event["summary"])
            return
        for line in self._lines_of(event, self._view):
            self._print("".join(text for text, _ in line))
        if event["ev"] == "metrics" and "loss" in event["metrics"] and self._is_time(event["step"]):
            self._print(metrics_line(self._view))
        if event["ev"] == "evaluating" and self._is_time(None):
            self._print(f"evaluating {progress(event)}")

    def close(self) -> None:
        self._stream.flush()

    def _is_time(self, step: int | None) -> bool:
        now_s = self._clock()
        if now_s - self._last_metrics_s < PLAIN_EVERY_S and (step is None or step != self._view.max_steps):
            return False
        self._last_metrics_s = now_s
        return True

    def _print(self, line: str) -> None:
        elapsed = clock_time(self._clock() - self._view.started_s)
        print(f"{elapsed:>{CLOCK_WIDTH}}  {line}" if line else "", file=self._stream, flush=True)


class TerminalConsole:
    """Log lines scroll; the two lines of the live view stay below them."""

    def __init__(
        self,
        screen: Any,
        clock: Callable[[], float],
        began_s: float | None = None,
        lines_of: LinesOf = lines_of,
        page: Page | None = None,
    ):
        """`screen`: a `rich.console.Console`."""
        from rich.live import Live
        from rich.spinner import Spinner

        self._screen, self._clock, self._log_lines, self._page = screen, clock, lines_of, page
        self._view = View(started_s=clock() if began_s is None else began_s)
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(get_renderable=self._lines, console=screen, refresh_per_second=5, transient=True)
        self._live.start()

    def show(self, event: Event) -> None:
        self._view.update(event)
        if event["ev"] == "summary" and self._page is not None:
            # First: the live line would be drawn into the page.
            self.close()
            self._page(self._screen, event["summary"])
            return
        for line in self._log_lines(event, self._view):
            self._print(line)

    def close(self) -> None:
        self._live.stop()

    def _print(self, line: Line) -> None:
        from rich.table import Table
        from rich.text import Text

        elapsed = clock_time(self._clock() - self._view.started_s)
        row = Table.grid(padding=(0, 2))
        row.add_column(width=TERMINAL_CLOCK_WIDTH, justify="right")
        row.add_column()
        row.add_row(Text(elapsed if line else "", "dim"), Text.assemble(*line))
        self._screen.print(row)

    def _lines(self) -> Any:
        """Two lines: how the training goes, and how the run is. They fit into 80 columns. A user's own metrics are another."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        view = self._view
        rows = Table.grid(padding=(0, 2), expand=False)
        rows.add_column(width=TERMINAL_CLOCK_WIDTH, justify="right", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        state = Text(
            printable(f"{STATES.get(view.state, view.state)} {view.evaluation}".strip()),
            "" if view.state == "training" else "yellow",
        )
        elapsed = Text(clock_time(self._clock() - view.started_s), "dim")
        if view.step is None:
            self._spinner.update(text=state)
            rows.add_row(elapsed, self._spinner)
            return rows
        of = Text(f"/{view.max_steps}" if view.max_steps else "", "dim")
        numbers = Text.assemble("step ", (str(view.step), "bold"), of, "  ", "  ".join(measures(view)))
        if view.max_steps and self._screen.width >= WITH_BAR:
            bar = ProgressBar(view.max_steps, view.step, width=BAR, complete_style="cyan", finished_style="green")
            first = Table.grid(padding=(0, 2))
            first.add_row(bar, numbers)
            rows.add_row(elapsed, first)
        else:
            rows.add_row(elapsed, numbers)
        if own := own_metrics(view):
            rows.add_row("", Text("  ".join(own)))
        rows.add_row("", Text.assemble(state, ("".join(f"  {fact}" for fact in facts(view)), "dim")))
        return rows


class SteadyConsole:
    """A console that never fails what it shows. When nothing more can be written to `stream`, the lines go to the file `log`
    instead: of a run, CONSOLE_LOG in its folder. An event that cannot be shown is named in a line, and left out."""

    def __init__(
        self, console: Any, stream: Shown, log: str | None, plain: Callable[[TextIO, View], PlainConsole], logged: bool = False
    ):
        """`logged`: whether somebody else writes the lines to `log`, from the beginning on."""
        self._console, self._stream, self._log, self._plain, self._logged = console, stream, log, plain, logged
        self._is_elsewhere = False

    def show(self, event: Event) -> None:
        self._look(event, self._shown(event))

    def close(self) -> None:
        self._tried(self._console.close)
        self._look(None, True)

    def _shown(self, event: Event) -> bool:
        problem = self._tried(lambda: self._console.show(event))
        if problem:
            note = {"ev": "note", "message": f"an event {event.get('ev')!r} cannot be shown: {problem}", "level": "warning"}
            self._tried(lambda: self._console.show(note))
        return not problem

    def _look(self, event: Event | None, could_be_shown: bool) -> None:
        """Goes on in the file, if the stream was lost just now: with the event of which nobody has seen all."""
        if self._stream.lost is None or self._is_elsewhere:
            return
        self._is_elsewhere = True
        self._tried(self._console.close)
        view, why = self._console._view, self._stream.lost
        self._console = self._plain(cast(TextIO, _log_file(self._log)), view)
        note = {"ev": "note", "message": f"standard output is lost ({why}): what follows is shown here alone", "level": "warning"}
        self._tried(lambda: self._console.show(note))
        if self._logged:
            self._console = self._plain(cast(TextIO, shown(None)), view)
        elif event is not None and could_be_shown:
            self._tried(lambda: self._console.show(event))

    def _tried(self, work: Callable[[], None]) -> str | None:
        """Returns what went wrong; None if nothing did."""
        try:
            work()
        except Exception as error:  # a view is never worth a run
            return f"{type(error).__name__}: {error}"
        return None


def _log_file(path: str | None) -> Shown:
    """Returns a stream that appends to a file; one that writes nothing if it cannot be opened, or there is no path."""
    try:
        opened = path is not None and "://" not in path
        return shown(open(str(path), "a", encoding="utf-8", opener=durable.no_link) if opened else None)
    except OSError:  # as when one disk has both, and is full
        return shown(None)


def make_console(
    stream: TextIO | None = sys.stdout,
    began_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    lines_of: LinesOf = lines_of,
    page: Page | None = None,
    log: str | None = None,
    *,
    logged: bool = False,
) -> Console:
    """Makes a console for a terminal or for a log, depending on `stream`. Its times count from `began_s` (default: now).
    `lines_of` returns the lines that an event adds, and `page` prints the end of a run. `log`: the file that gets the lines when
    nothing more can be written to `stream`; `logged`: it has them in any case, and gets a line that says so. No method of the
    console raises an error of showing."""
    from rich.console import Console as Screen

    out = shown(stream)
    text = cast(TextIO, out)
    screen = Screen(file=text, highlight=False)
    console: Any = PlainConsole(text, clock, began_s, lines_of, page)
    if out.isatty() and not screen.is_dumb_terminal:
        console = TerminalConsole(screen, clock, began_s, lines_of, page)
    return SteadyConsole(console, out, log, lambda file, view: PlainConsole(file, clock, None, lines_of, page, view), logged)


def added_to(log: Path, text: str) -> bool:
    """Writes text to the end of the log of a run. Returns whether that could be done."""
    try:
        with open(log, "a", encoding="utf-8", errors="replace", opener=durable.no_link) as file:
            return bool(file.write(text))
    except OSError:
        return False


class LoggedConsole:
    """A console whose lines are written to a file, too. What is wrong with the file stops nothing."""

    def __init__(self, console: Console, path: Path, began_s: float):
        """Times count from `began_s`, by the monotonic clock. Raises OSError if the file cannot be opened."""
        self._console = console
        self._file = open(path, "a", 1, "utf-8", "replace", opener=durable.no_link)  # noqa: SIM115 - until `close`
        self._log = PlainConsole(self._file, time.monotonic, began_s)
        began_at = datetime.fromtimestamp(time.time() - (time.monotonic() - began_s), UTC)
        with suppress(OSError):
            self._file.write(f"{began_at.isoformat(timespec='seconds')}  a launch begins\n")

    def show(self, event: Event) -> None:
        self._console.show(event)
        with suppress(Exception):  # a full disk, or an event that cannot be shown: no line is worth the run
            self._log.show(event)

    def close(self) -> None:
        self._console.close()
        with suppress(OSError):
            self._file.close()
