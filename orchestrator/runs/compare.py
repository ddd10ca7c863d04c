"""`gangway compare RUN|STORAGE [RUN|STORAGE ...]`: the settings in which runs differ, and how they did, side by side.

Each RUN is a run's folder, or its URL. A STORAGE stands for all runs in it. Exit status: 0; 2 when one of them is no run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gangway.program import EXIT_FINE, Parser, command
from gangway.published import SYSTEM, number
from gangway.storage import documents, json_text
from gangway.storage.object_store import FOR_PEOPLE
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.config.locate import REFUSALS, NoRunError, is_run, run_of, runs_in
from orchestrator.run_state import lines
from orchestrator.runs import overview
from orchestrator.tracking.spool import entry
from trainers.config.evaluation import ScoreConfig, lower_is_better
from trainers.console.text import printable, seconds, table_console

OF_AMOUNT = ("wall_s", "num_incidents")
"""Results that are less in a run that has stopped earlier: they say something of runs of the same step alone."""
LOWER_IS_BETTER = ("loss", "perplexity", "step_time_s", *OF_AMOUNT)
HIGHER_IS_BETTER = ("accuracy", "tokens_per_s", "samples_per_s", "goodput", "mfu")
SCORES = ("score", "best_score")
BEST = "* "
NOT_COMPARED = frozenset({"name", "storage"})
"""Settings in which runs must differ."""


@command(*REFUSALS, is_read=True)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orchestrator.runs.compare", "Runs side by side.", example="runs/first runs/second")
    parser.add_argument("runs", nargs="+", metavar="RUN|STORAGE", help="the folders of runs, or of storages, or their URLs")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    found = {folder: settings for run in options.runs for folder, settings in named(run).items()}
    if len(found) < 2:
        parser.error(f"expected at least two runs (found {len(found)})")
    tell(found, as_json=options.json)
    return EXIT_FINE


def tell(found: Mapping[Place, Mapping[str, str]], *, as_json: bool = False) -> None:
    """Shows runs side by side, by their settings. Raises what REFUSALS names."""
    settings, results = differing([*found.values()]), [results_of(overview.read(folder)) for folder in found]
    best = best_of([*found.values()], results)
    if as_json:
        document = {"runs": [*map(str, found)], "settings": settings, "results": results, "best": best}
        print(json_text.dumps(document, indent=1))
    else:
        show(table_console(), [folder.name for folder in found], settings, results, best)


def named(name: str) -> dict[Place, dict[str, str]]:
    """Returns the settings of the run that is named, or of all in a storage, and tells what is no run there. Raises what REFUSALS
    names."""
    is_folder = documents.is_url(name) or Path(name).is_dir()
    if not is_folder or is_run(place := place_of(name, FOR_PEOPLE)):
        return {(run := run_of(name)): settings_of(run)}
    found, others = dict[Place, dict[str, str]](), list[str]()
    for run in sorted({*runs_in(place), *(place / folder for folder in place.folders())}, key=str):
        try:
            found[run] = settings_of(run)
        except NoRunError:
            others.append(run.name)
    if not found:
        return {(run := run_of(name)): settings_of(run)}  # which says what is wrong with it
    if others:
        print(f"left out of {name}, for they are no runs with settings: {len(others)} ({', '.join(others)})", file=sys.stderr)
    return found


def settings_of(run: documents.Where) -> dict[str, str]:
    """Returns the settings of the newest launch of a run, by their dotted names. Raises NoRunError if none is recorded."""
    found: dict[str, str] | None = None
    try:
        for line in lines.metrics(place_of(run)):
            # A cheap look first: most lines are metrics.
            if b'"params"' in line[:60]:
                found = entry(line).get("params", found)
    except (OSError, documents.DamagedDocument) as error:
        raise NoRunError(f"the settings of the run in {run} cannot be read: {error}") from error
    if found is None:
        raise NoRunError(f"the run in {run} has recorded no settings")
    return found


def differing(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Returns the settings in which the runs differ, with the value of each run."""
    names = dict.fromkeys(name for one in settings for name in one)
    values = {name: [one.get(name) for one in settings] for name in names if name not in NOT_COMPARED}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def results_of(run: overview.Overview) -> dict[str, Any]:
    """Returns the results of a run, by name; those that say which run was better last."""
    own = {name: value for name, value in run.metrics.items() if name not in SYSTEM}
    found = {
        "state": run.state,
        "step": run.step,
        "loss": run.metrics.get("loss"),
        **run.evaluation,
        **own,
        "tokens_per_s": run.metrics.get("tokens_per_s"),
        "step_time_s": run.metrics.get("step_time_s"),
        "mfu": run.metrics.get("mfu"),
        "goodput": run.goodput,
        "num_incidents": run.num_incidents,
        "wall_s": run.wall_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def best_of(settings: Sequence[Mapping[str, str]], results: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Returns the numbers of the runs that are best, by the results that say what is better. No run is better for having stopped
    earlier."""
    lower = {name: is_lower_better(name) for name in dict.fromkeys(name for one in results for name in one)}
    lower |= dict.fromkeys(SCORES, _is_lower_score_better(settings))
    if len({one.get("step") for one in results}) > 1:
        lower |= dict.fromkeys(OF_AMOUNT)
    found = {name: best([one.get(name) for one in results], each) for name, each in lower.items() if each is not None}
    return {name: numbers for name, numbers in found.items() if numbers}


def is_lower_better(name: str) -> bool | None:
    """Returns whether a lower value of a result is better; None if its name does not tell."""
    if name.endswith(HIGHER_IS_BETTER):
        return False
    return True if name.endswith(LOWER_IS_BETTER) else lower_is_better(name)


def _is_lower_score_better(settings: Sequence[Mapping[str, str]]) -> bool | None:
    """Returns whether a lower score is better; None if the runs score by other metrics, or none does."""
    rules = {tuple(one.get(f"evaluation.score.{name}") for name in ("metrics", "lower_better", "combine")) for one in settings}
    metrics, lower, _ = rules.pop()
    if rules or metrics is None:
        return None
    told = {"True": True, "False": False}.get(str(lower))
    return ScoreConfig(metrics=tuple(json.loads(metrics)), lower_better=told).lowest_is_best


def best(values: Sequence[Any], is_lower_better: bool) -> list[int]:
    """Returns the numbers of the runs that are best by a result: several if they are equal; none if all are. A result that is not
    finite is never the best."""
    finite = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not finite or len({value for value in values if isinstance(value, int | float)}) < 2:
        return []
    first = min(finite) if is_lower_better else max(finite)
    return [number for number, value in enumerate(values) if value == first]


def show(
    screen: Console,
    names: Sequence[str],
    settings: Mapping[str, Sequence[str | None]],
    results: Sequence[Mapping[str, Any]],
    best: Mapping[str, Sequence[int]],
) -> None:
    columns = (Column(printable(name), justify="right") for name in names)
    table = Table("", *columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row(Text("settings that differ", "bold"))
    for name, values in settings.items():
        table.add_row(f"  {name}", *("" if value is None else printable(value) for value in values))
    if not settings:
        table.add_row(Text("  none", "bright_black"))
    table.add_row(Text("results", "bold"))
    for name in dict.fromkeys(name for one in results for name in one):
        values, first = [one.get(name) for one in results], best.get(name, ())
        table.add_row(f"  {name}", *(_cell(shown(name, value), number in first) for number, value in enumerate(values)))
    screen.print(table)
    screen.print(f"{BEST.strip()} the best of its line", style="bright_black")


def _cell(text: str, is_best: bool) -> Text:
    # By a sign, too: colours are lost in a pipe.
    return Text(f"{BEST}{text}", "bold green") if is_best else Text(text)


def shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "goodput":
        return f"{value:.1%}"
    if name.endswith("_s") and not name.endswith("per_s"):
        return seconds(value)
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) >= 10):
        return f"{value:,.0f}"
    if isinstance(value, float) and name.endswith("_per_s"):
        return f"{value:,.0f}" if value >= 100 else number(value)
    return number(value) if isinstance(value, float) else printable(str(value))


if __name__ == "__main__":
    sys.exit(main())
