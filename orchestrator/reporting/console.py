"""The console: a live view on a terminal, plain lines elsewhere, and a summary page at the end.

Both consoles print the same lines for events (`log_lines`). Between them, a terminal shows two live lines at the bottom, and a
log gets a line with the same numbers from time to time.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from rich.console import Console as Screen
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from orchestrator.board import BoardLike
from orchestrator.events import ConsoleEvent, Evaluating, Metrics, Note, RunStarted, Unit
from orchestrator.reporting.text import (
    PLANNED,
    action_of,
    clock_time,
    count,
    printable,
    recovery,
    seconds,
    sentence,
    summary_page,
)
from trainers.first_line import CLOCK_WIDTH, TERMINAL_CLOCK_WIDTH

PLAIN_EVERY_S = 5.0
"""The least time between two lines of metrics in a log. Evaluations and the last step are always shown."""
READ_TIMEOUT_S = 0.2
SHOWN_PREVIEW = 70
"""Characters of each text that the model generates; all of it is in the run's folder."""
STATES = {
    "checking": "checking the model and the data, while Ray starts",
    "reserving": "reserving machines",
    "starting": "starting",
    "importing": "starting processes",
    "joining": "joining the hosts",
    "restoring": "restoring the state",
    "compiling": "compiling",
    "training": "training",
    "evaluating": "evaluating",
    "generating previews": "generating previews",
    "diagnosing": "looking for the cause",
    "saving": "saving",
    "recovering": "recovering",
    "waiting": "waiting",
    "finishing": "finishing",
}
WITH_BAR = 110
"""Columns of a terminal that has room for a bar beside the numbers."""
BAR = 20
SHOWN_ONCE = ("checking", "reserving", "importing", "compiling")
"""States of the start that are logged, once each."""


class Console(Protocol):
    def show(self, event: ConsoleEvent) -> None: ...

    def close(self) -> None: ...


@dataclass
class View:
    """The state of the run, from the events so far."""

    started_s: float
    name: str = ""
    state: str = "starting"
    max_steps: int | None = None
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    saved_step: int | None = None
    hosts: int | None = None
    unit: Unit = "tokens"
    num_incidents: int = 0
    goodput: float | None = None
    evaluation: str = ""
    """How far the present evaluation is."""
    shown_once: set[str] = field(default_factory=set)

    def update(self, event: ConsoleEvent) -> None:
        match event["ev"]:
            case "run":
                self.name, self.max_steps = event["name"], event["max_steps"]
                self.hosts, self.unit = event["hosts"], event.get("unit", "tokens")
            case "generation":
                self.hosts = event["hosts"]
            case "incident" if event["incident"]["kind"] not in PLANNED:
                self.num_incidents += 1
            case "status":
                self.state, self.evaluation = event["state"], ""
            case "evaluating":
                self.evaluation = progress(event)
            case "metrics":
                self.step = event["step"]
                self.metrics |= event["metrics"]
                self.goodput = event.get("goodput", self.goodput)
            case "checkpoint":
                self.saved_step = event["step"]
            case "checkpoint_gone":
                self.saved_step = None
            case "recovered":
                self.step = event["incident"].get("resumed_step", self.step)

    def first(self, what: str) -> bool:
        """Returns True at the first call with this `what`."""
        is_first = what not in self.shown_once
        self.shown_once.add(what)
        return is_first

    @property
    def remaining_s(self) -> float | None:
        if self.max_steps is None or self.step is None or "step_time_s" not in self.metrics:
            return None
        return max(0, self.max_steps - self.step) * self.metrics["step_time_s"]


def make_console(
    stream: TextIO = sys.stdout, began_s: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Console:
    """Makes a console for a terminal or for a log, depending on `stream`. Its times count from `began_s` (default: now)."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # A terminal that knows no `·` shows `?`, and the run goes on.
    screen = Screen(file=stream, highlight=False)
    if stream.isatty() and not screen.is_dumb_terminal:
        return TerminalConsole(screen, clock, began_s)
    return PlainConsole(stream, clock, began_s)


def watch(board: BoardLike, console: Console, finished: Callable[[], bool]) -> None:
    """Shows what is posted until `finished`, and then what is left."""
    cursor = 0
    try:
        while True:
            over = finished()  # Before the read: events that were posted before the end are still shown.
            cursor, events = board.read(cursor, 0.0 if over else READ_TIMEOUT_S)
            for event in events:
                console.show(event)
            if over and not events:
                return
    finally:
        console.close()


def log_lines(event: ConsoleEvent, view: View) -> list[Text]:
    """The lines that this event adds to the log of the run; `view` is the state after it."""
    lines: list[Text] = []
    match event["ev"]:
        case "run" if view.first(f"run {event['name']}"):
            lines = [_header(event)]
        case "status" if event.get("message"):
            lines = [Text(sentence(event["message"]))]
        case "status" if event["state"] in SHOWN_ONCE and view.first(event["state"]):
            lines = [Text(STATES[event["state"]], "dim")]
        case "generation" if event["generation"] == 0:
            lines = [Text(f"gang of {_plural(event['hosts'], 'host')} is ready", "dim")]
        case "metrics" if event.get("kind") == "eval":
            lines = [_evaluation(event)]
        case "preview":
            lines = [_preview(event["step"], shown) for shown in event["previews"]]
        case "incident":
            lines = [_incident(event["incident"])]
        case "recovered":
            lines = [_recovered(event["incident"])]
        case "note":
            lines = [_note(event)]
    return lines


class PlainConsole:
    """Lines of text, each with the time since the start."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], began_s: float | None = None):
        self._stream, self._clock = stream, clock
        self._view = View(started_s=clock() if began_s is None else began_s)
        self._last_metrics_s = float("-inf")

    def show(self, event: ConsoleEvent) -> None:
        self._view.update(event)
        if event["ev"] == "summary":
            summary_page(Screen(file=self._stream, highlight=False, width=110, color_system=None), event["summary"])
            return
        for line in log_lines(event, self._view):
            self._print(line.plain)
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

    def __init__(self, screen: Screen, clock: Callable[[], float], began_s: float | None = None):
        self._screen, self._clock = screen, clock
        self._view = View(started_s=clock() if began_s is None else began_s)
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(get_renderable=self._lines, console=screen, refresh_per_second=5, transient=True)
        self._live.start()

    def show(self, event: ConsoleEvent) -> None:
        self._view.update(event)
        if event["ev"] == "summary":
            # First: the live line would be drawn into the page.
            self.close()
            summary_page(self._screen, event["summary"])
            return
        for line in log_lines(event, self._view):
            self._print(line)

    def close(self) -> None:
        self._live.stop()

    def _print(self, line: Text) -> None:
        elapsed = clock_time(self._clock() - self._view.started_s)
        row = Table.grid(padding=(0, 2))
        row.add_column(width=TERMINAL_CLOCK_WIDTH, justify="right")
        row.add_column()
        row.add_row(Text(elapsed if line.plain else "", "dim"), line)
        self._screen.print(row)

    def _lines(self) -> Table:
        """Two lines: how the training goes, and how the run is. They fit into 80 columns."""
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
        rows.add_row("", Text.assemble(state, ("".join(f"  {fact}" for fact in facts(view)), "dim")))
        return rows


def progress(event: Evaluating) -> str:
    return f"{event['unit']} {event['done']}" + (f"/{event['total']}" if event["total"] else "") + " batches"


def metrics_line(view: View) -> str:
    of = f"/{view.max_steps}" if view.max_steps else ""
    return "  ".join([f"step {view.step}{of}", *measures(view), *facts(view)])


def measures(view: View) -> list[str]:
    """Returns how the training goes."""
    metrics, parts = view.metrics, []
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    if "learning_rate" in metrics:
        parts.append(f"lr {metrics['learning_rate']:.1e}")
    rate = metrics.get("samples_per_s" if view.unit == "examples" else "tokens_per_s")
    if rate is not None:
        parts.append(f"{count(rate)} {view.unit}/s")
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.0%}")
    return parts


def facts(view: View) -> list[str]:
    """Returns how the run is."""
    parts = [f"{clock_time(view.remaining_s)} left"] if view.remaining_s else []
    if view.hosts:
        parts.append(_plural(view.hosts, "host"))
    if view.saved_step is not None:
        parts.append(f"saved {view.saved_step}")
    if view.num_incidents:
        parts.append(_plural(view.num_incidents, "incident"))
    if view.goodput is not None:
        parts.append(f"goodput {view.goodput:.0%}")
    return parts


def _header(event: RunStarted) -> Text:
    parts = [_plural(event["hosts"], "host")]
    parts += [_plural(event["devices"], "device")] if event["devices"] else []
    parts += [f"{count(event['parameters'])} parameters"] if event["parameters"] else []
    unit = event.get("unit", "tokens")
    parts += [f"{count(event['tokens_per_step'])} {unit} a step"] if event["tokens_per_step"] else []
    parts += [f"{count(event['max_steps'])} steps"] if event["max_steps"] else []
    return Text.assemble((event["name"], "bold"), ("  " + " · ".join(parts), "dim"))


def _evaluation(event: Metrics) -> Text:
    values = event["metrics"]
    shown = [f"{name} {values[f'eval_{name}']:.4f}" for name in ("loss", "accuracy", "perplexity") if f"eval_{name}" in values]
    # Of further units the losses alone: a line has room for no more.
    shown += [f"{name} {value:.4f}" for name, value in values.items() if name.endswith("_loss") and name != "eval_loss"]
    return Text.assemble(("◆ ", "cyan"), f"step {event['step']}  held-out ", "  ".join(shown))


def _preview(step: int, shown: Mapping[str, str]) -> Text:
    text = printable(shown["text"].replace("\n", "↵"))
    more = "…" if len(text) > SHOWN_PREVIEW else ""
    prompt = printable(shown["prompt"].replace("\n", "↵"))
    return Text.assemble(("◇ ", "cyan"), f"step {step}  ", (prompt, "bold"), text[:SHOWN_PREVIEW] + more)


def _incident(incident: Mapping[str, Any]) -> Text:
    what = incident["evidence"].get("summary", incident["kind"])
    planned = incident["kind"] in PLANNED
    mark, style = ("↻ ", "bold cyan") if planned else ("✗ ", "bold red")
    return Text.assemble((mark, style), f"{sentence(what)} ", (f"→ {action_of(incident)}", "yellow"))


def _recovered(incident: Mapping[str, Any]) -> Text:
    resumed = incident.get("resumed_step")
    where = f" at step {resumed}" if resumed is not None else ""
    phases = (f"  {recovery(incident['recovery_s'])}", "dim")
    return Text.assemble(("✓ ", "bold green"), f"training again{where} after {seconds(incident['total_s'])}", phases)


def _note(event: Note) -> Text:
    style = {"warning": "yellow", "error": "bold red"}.get(event.get("level", "info"), "")
    mark = {"warning": "! ", "error": "✗ "}.get(event.get("level", "info"), "")
    return Text(mark + sentence(event["message"]), style)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
