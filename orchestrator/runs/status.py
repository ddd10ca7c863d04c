"""`gangway status [STORAGE|RUN|CONFIG]`: how all runs of a storage are, one a line, or one run in detail.

It reads files only, and disturbs no run. It works on any machine that sees the storage.
Exit status: 0; 2 when there is no such storage or run.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from gangway.program import EXIT_FINE, Parser, command
from gangway.published import counted, of_evaluation, own, shown
from gangway.storage import documents, json_text, several
from gangway.storage.object_store import FOR_PEOPLE
from gangway.storage.opening import place_of
from gangway.storage.row import CHECKPOINTS
from gangway.terminal import nobody_looks
from orchestrator.config.locate import REFUSALS, NoRunError, is_run, run_of, runs_in
from orchestrator.reporting.text import action_of
from orchestrator.runs import incidents, overview
from orchestrator.runs.overview import Overview
from trainers.checkpoint import layout
from trainers.console.text import clock_time, count, printable, seconds, sentence, table_console
from trainers.console.view import measures_of

STORAGE = "runs"
"""The storage of a configuration that names none."""
EVERY_S, IN_BUCKET_EVERY_S = 2.0, 10.0
"""How often it looks again; in a bucket each look is paid for."""
GAP = 2
"""Between two columns."""
STYLES = {overview.LIVE: "green", overview.LOST: "bold red", overview.UNKNOWN: "yellow"}
STYLES_OF_ENDS = {"finished": "bright_black", "stopped": "yellow", "failed": "red"}
ORDER = (overview.LIVE, overview.LOST, overview.UNKNOWN, overview.ENDED)


@command(*REFUSALS, is_read=True)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orchestrator.runs.status", "How runs are, by their files alone.", example="runs --watch")
    parser.add_argument(
        "place",
        nargs="?",
        default=STORAGE,
        metavar="STORAGE|RUN|CONFIG",
        help=f"a folder of runs, a run's folder, a URL of these, or the YAML file it was started with (default: {STORAGE})",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="those that the run was started with")
    parser.add_argument("--watch", action="store_true", help="show it again every two seconds (of a bucket: ten), until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_intermixed_args(argv)
    found = look(options.place, options.overrides)
    if options.json:
        print(json_text.dumps([dataclasses.asdict(one) | {"left_s": one.left_s} for one in found], indent=1))
        return EXIT_FINE
    screen = table_console()
    if options.watch and screen.is_terminal:
        watch(screen, options.place, options.overrides)
    else:
        screen.print(page(found, options.place, time.time(), screen.width))
    return EXIT_FINE


def watch(screen: Console, place: str, overrides: Sequence[str]) -> None:
    try:
        with Live(console=screen, auto_refresh=False, screen=True) as live:
            while not nobody_looks():
                live.update(page(look(place, overrides), place, time.time(), screen.width), refresh=True)
                time.sleep(IN_BUCKET_EVERY_S if documents.is_url(place) else EVERY_S)
    except KeyboardInterrupt:
        pass
    screen.print(page(look(place, overrides), place, time.time(), screen.width))


def look(place: str, overrides: Sequence[str] = ()) -> list[Overview]:
    """Returns how the runs of a storage are, those that go on first; of a run's folder or a configuration, that of the run.
    Raises what REFUSALS names."""
    folder = place_of(place, FOR_PEOPLE)
    if folder.is_dir() and not is_run(folder):
        found = [run for run in several.each(overview.read, runs_in(folder)) if run.launch_id or is_run(place_of(run.folder))]
        if not found:
            raise NoRunError(f"{place} has no runs: expected folders of runs in it, or a run's own folder")
        return sorted(found, key=lambda one: (ORDER.index(one.kind), -(one.changed_s or 0.0)))
    if not documents.is_url(place) and not folder.exists() and place == STORAGE:
        raise NoRunError(f"there is no folder {STORAGE} here: name the storage, or a run's folder")
    return [overview.read(run_of(place, overrides))]


def page(runs: Sequence[Overview], place: str, now_s: float, width: int) -> Group:
    only_one = len(runs) == 1 and runs[0].folder != (place_of(place) / runs[0].name).url
    return Group(*details(runs[0], now_s)) if only_one else Group(table(runs, now_s, width))


COLUMNS = ("run", "state", "step", "loss", "speed", "left", "goodput", "hosts", "saved", "incidents", "last seen")
DISPENSABLE = ("hosts", "saved", "speed", "goodput", "left", "incidents")
"""Columns that a narrow terminal does not show, the first ones first."""


def table(runs: Sequence[Overview], now_s: float, width: int) -> Table:
    """Returns a line for each run, as wide as `width` at most if a name is not longer."""
    rows = [dict(zip(COLUMNS, _cells(run, now_s), strict=True)) for run in runs]
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in COLUMNS}
    left_out: set[str] = set()
    for name in DISPENSABLE:
        if sum(widths[other] + GAP for other in COLUMNS if other not in left_out) - GAP <= width:
            break
        left_out.add(name)
    names = [name for name in COLUMNS if name not in left_out]
    columns = (Column(name, justify="left" if name in ("run", "state") else "right", no_wrap=True) for name in names)
    result = Table(*columns, box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for row in rows:
        result.add_row(*(row[name] for name in names))
    return result


def _cells(run: Overview, now_s: float) -> list[str | Text]:
    return [printable(run.name), Text(run.state, style_of(run)), *_numbers(run), age(run.changed_s, now_s)]


def _numbers(run: Overview) -> list[str]:
    metrics = run.metrics
    rate = counted(metrics.get("tokens_per_s"), metrics.get("samples_per_s"))
    return [
        _step(run),
        "" if "loss" not in metrics else f"{metrics['loss']:.4f}",
        "" if rate is None else f"{count(rate[0])} {rate[1]}/s",
        "" if run.left_s is None else clock_time(run.left_s),
        "" if run.goodput is None else f"{run.goodput:.0%}",
        "" if run.hosts is None else str(run.hosts),
        "" if run.checkpoint_step is None else f"{run.checkpoint_step:,}",
        str(run.num_incidents or ""),
    ]


def details(run: Overview, now_s: float) -> list[Text | Table]:
    """Returns what is shown of one run."""
    head = Text.assemble((printable(run.name), "bold"), "  ", (run.state, style_of(run)))
    if run.stop_reason and run.stop_reason != run.state:
        head.append(f" ({run.stop_reason})", "bright_black")
    rows = {
        "step": _step(run),
        "training": "  ".join(_measures(run)),
        "held out": "  ".join(shown(of_evaluation(run.evaluation))),
        "left": "" if run.left_s is None else clock_time(run.left_s),
        "goodput": "" if run.goodput is None else f"{run.goodput:.1%}",
        "hosts": "" if run.hosts is None else str(run.hosts),
        "checkpoint": _lost(run) or ("none yet" if run.checkpoint_step is None else f"step {run.checkpoint_step:,}"),
        "incidents": _incidents(run),
        "started": "" if run.started_s is None else f"{overview.when(run.started_s)}, {age(run.started_s, now_s)} ago",
        "last seen": "" if run.changed_s is None else f"{overview.when(run.changed_s)}, {age(run.changed_s, now_s)} ago",
        "folder": run.folder,
        "error": printable(run.error or "").strip(),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            grid.add_row(Text(f"  {name}", "bright_black"), value)
    return [head, grid, *(Text(f"! {problem}", "yellow") for problem in run.problems)]


def _lost(run: Overview) -> str:
    """Returns that a checkpoint of the run is no longer where it was committed, and the way out; empty if it is there."""
    with suppress(OSError, documents.StorageError):  # what its files say is shown
        return layout.lost(place_of(run.folder, FOR_PEOPLE) / CHECKPOINTS)
    return ""


def _incidents(run: Overview) -> str:
    """Returns how many there were, why the newest one came, and what was done about it."""
    newest = None
    with suppress(OSError, documents.StorageError):  # the number is known all the same
        newest = next(reversed(incidents.of_run(run.folder)), None) if run.num_incidents else None
    if newest is None:
        return str(run.num_incidents)
    why, then = str(newest.evidence.get("summary", newest.kind)), action_of(newest.to_dict())
    return f"{run.num_incidents}; the newest: {sentence(why)} → {sentence(then)}"


def _step(run: Overview) -> str:
    if run.step is None:
        return ""
    return f"{run.step:,}" + (f"/{run.max_steps:,}" if run.max_steps else "")


def _measures(run: Overview) -> list[str]:
    metrics = run.metrics
    rate = counted(metrics.get("tokens_per_s"), metrics.get("samples_per_s"))
    step = [f"{seconds(metrics['step_time_s'])} a step"] if "step_time_s" in metrics else []
    return [*measures_of(metrics, rate, *step), *(printable(part) for part in shown(own(metrics)))]


def style_of(run: Overview) -> str:
    return STYLES_OF_ENDS.get(run.state, "") if run.kind == overview.ENDED else STYLES[run.kind]


def age(unix_s: float | None, now_s: float) -> str:
    """12 s · 5 min · 3 h · 2 d"""
    if unix_s is None:
        return ""
    passed_s = max(0.0, now_s - unix_s)
    for limit_s, divisor_s, unit in ((120, 1, "s"), (7200, 60, "min"), (2 * 86400, 3600, "h")):
        if passed_s < limit_s:
            return f"{passed_s / divisor_s:.0f} {unit}"
    return f"{passed_s / 86400:.0f} d"


if __name__ == "__main__":
    sys.exit(main())
