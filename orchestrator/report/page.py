"""The page: what a record says, as HTML. Everything is in the one file: pictures as SVG, the style sheet, no script, no font."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gangway.published import RATES, SYSTEM, counted, number
from gangway.storage.usage import REQUESTS
from orchestrator.report import charts, drawing, timeline
from orchestrator.report.record import Record
from orchestrator.reporting.text import CATEGORY_NAMES, action_of
from orchestrator.run_state.goodput import counted_s, share
from orchestrator.run_state.incidents import Incident
from orchestrator.runs import compare, overview
from orchestrator.runs.incidents import evidence, replayed
from orchestrator.tracking import tags
from trainers.console.text import count, sentence
from trainers.console.text import seconds as duration

MAX_INCIDENTS = 500
MAX_HEAT_COLUMNS = 60
MIN_LOST_SHARE = 0.002
"""Smaller shares of the wall clock are not worth a row."""

LESS = {
    "schedule": "hosts.spares, or hosts.min, with which the run goes on without them",
    "import": "the machines' disks: a process has to import JAX and your code",
    "compile": "model.remat and the number of unrolled layers; programs are kept on a machine and found again",
    "restore": "faster storage; of texts data.prepared: gangway prepare makes the tokens once",
    "data_wait": "data.prepared, or faster storage: the hosts waited for their batches",
    "checkpoint": "a longer checkpoint.save_steps",
    "evaluation": "a longer evaluation.every_steps, or fewer evaluation.max_batches",
    "detection": "driver.watchdog: shorter limits for the phases",
    "recovery": "hosts.spares: a machine that waits replaces one that is lost",
    "replay": "a shorter checkpoint.save_steps, or save_minutes",
    "idle": "driver.restart.backoff_max_s",
    "join": "the network between the hosts",
}
"""The setting that would make a category of the ledger less."""


WORDS = {"eval_loss": "held-out loss", "step_time_s": "step time", "num_incidents": "incidents", "wall_s": "wall clock"}
"""What some results of a comparison are called."""


def of_one(record: Record) -> str:
    """Returns the page about one run."""
    return _render(
        title=record.overview.name,
        head=head(record),
        problems=record.problems,
        curves=[drawing.svg(chart) for chart in curves({"": record})],
        goodput=_wide_and_narrow(partial(charts.goodput_bar, record.seconds)) if any(record.seconds.values()) else "",
        rolling=_wide_and_narrow(partial(rolling_goodput, record)),
        lost=lost(record.seconds),
        timeline=_wide_and_narrow(partial(charts.gantt, line)) if (line := timeline.of(record)) is not None and line.bars else "",
        incidents=[incident(index, one, record) for index, one in enumerate(record.incidents[-MAX_INCIDENTS:], 1)],
        num_hidden=max(0, len(record.incidents) - MAX_INCIDENTS),
        hosts=_wide_and_narrow(partial(host_heat, record)),
        samples=record.samples,
        settings=sorted(record.settings.items()),
        resumes=[(overview.when(one.at_s), sorted(one.changes.items())) for one in record.resumes],
        given=record.given,
        made_with=tags.made_with(record.tags),
        comparison=None,
    )


def figures(record: Record) -> dict[str, bytes]:
    """Returns the pictures of the page as PNG, by name."""
    found = {chart["title"]["text"].lower().replace(" ", "_"): chart for chart in curves({"": record})}
    if any(record.seconds.values()):
        found["goodput"] = charts.goodput_bar(record.seconds)
    if (line := timeline.of(record)) is not None and line.bars:
        found["time_line"] = charts.gantt(line)
    return {name: drawing.png(chart) for name, chart in found.items()}


def of_several(records: Sequence[Record]) -> str:
    """Returns the page that compares runs."""
    names = _names(records)
    results = [compare.results_of(record.overview) for record in records]
    best = compare.best_of([record.settings for record in records], results)
    rows = []
    for name in dict.fromkeys(name for one in results for name in one):
        values = [one.get(name) for one in results]
        rows.append((WORDS.get(name, name), [compare.shown(name, value) for value in values], best.get(name, ())))
    return _render(
        title=" · ".join(names),
        head=None,
        problems=[f"{name}: {problem}" for name, record in zip(names, records, strict=True) for problem in record.problems],
        curves=[drawing.svg(chart) for chart in curves(dict(zip(names, records, strict=True)))],
        comparison={
            "names": names,
            "settings": list(compare.differing([record.settings for record in records]).items()),
            "results": rows,
        },
    )


def _render(**found: Any) -> str:
    import jinja2

    folder = Path(__file__).parent
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {"light": drawing.style(drawing.LIGHT), "dark": drawing.style(drawing.DARK)}
    return made.get_template("page.html").render(**found)


def _names(records: Sequence[Record]) -> list[str]:
    """Returns a name for each run: that of its folder, or with so many of the folders above it that no two are the same."""
    folders = [record.overview.folder.split("/") for record in records]
    for depth in range(1, max(map(len, folders))):
        names = ["/".join(parts[-depth:]) for parts in folders]
        if len({*names}) == len({*map(tuple, folders)}):
            return names
    return [record.overview.folder for record in records]


def head(record: Record) -> dict[str, Any]:
    """Returns the state, and the numbers that a person looks at first."""
    run, metrics, summary = record.overview, record.overview.metrics, record.summary
    whole_s = sum(record.seconds.values())
    steps = "" if run.step is None else f"{run.step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "")
    asked = summary.get("requests")
    amount = counted(summary.get("tokens"), summary.get("samples"))
    rate = counted(metrics.get("tokens_per_s"), metrics.get("samples_per_s"))
    tiles = [
        ("steps", steps),
        ("loss", _number(metrics.get("loss"))),
        ("held-out loss", _number(run.evaluation.get("eval_loss"))),
        ("goodput", "" if not whole_s else f"{share(record.seconds):.1%}"),
        ("wall clock", duration(whole_s) if whole_s else ""),
        (amount[1], f"{amount[0]:,}") if amount else ("", ""),
        (f"{rate[1]}/s", f"{rate[0]:,.0f}") if rate else ("", ""),
        ("MFU", f"{metrics['mfu']:.1%}" if "mfu" in metrics else ""),
        ("hosts", "" if run.hosts is None else str(run.hosts)),
        ("incident" if run.num_incidents == 1 else "incidents", f"{run.num_incidents:,}"),
        ("requests to storage", f"{sum(asked.get(kind, 0) for kind in REQUESTS):,}" if asked else ""),
        ("sent to storage", f"{count(asked.get('bytes_out', 0))}B" if asked else ""),
    ]
    # What `final_error` has put below it is a traceback, or the end of a log.
    error, _, lines = (run.error or "").partition("\n\n")
    times = [overview.when(at_s) for at_s in (record.began_s, record.ended_s) if at_s is not None]
    return {
        "state": run.state,
        "kind": "bad" if run.error or run.kind == overview.LOST else "live" if run.kind == overview.LIVE else "good",
        "error": error,
        "lines": lines,
        "reason": run.stop_reason,
        "folder": run.folder,
        "times": " to ".join(times),
        "tiles": [(name, value) for name, value in tiles if value],
    }


def curves(records: Mapping[str, Record]) -> list[charts.Chart]:
    """Returns the charts of the metrics: of several runs each metric in one chart."""
    several = len(records) > 1
    rates = [(one.overview.metrics.get("tokens_per_s"), one.overview.metrics.get("samples_per_s")) for one in records.values()]
    of_examples = all((rate := counted(*both)) is not None and rate[1] == "examples" for both in rates)
    wanted = [
        ("Loss", "training" if several else "training and held-out data", ("loss",) if several else ("loss", "eval_loss")),
        *([("Held-out loss", "held-out data", ("eval_loss",))] if several else []),
        ("Learning rate", "of the newest step", ("learning_rate",)),
        ("Gradient norm", "before clipping", ("grad_norm",)),
        (
            ("Throughput", "examples a second", ("samples_per_s",))
            if of_examples
            else ("Throughput", "tokens a second", ("tokens_per_s",))
        ),
        ("Model FLOPs utilization", "share of the devices' peak", ("mfu",)),
        ("Model FLOPs by the peak of 8 bits", "share of the devices' peak of 8-bit products", ("mfu_of_fp8_peak",)),
        ("Step time", "seconds", ("step_time_s",)),
        ("Memory of a device", "bytes, at most", ("device_memory_peak_bytes",)),
        ("Memory of a host", "bytes, of the fullest", ("host_memory_bytes",)),
    ]
    published = {name for record in records.values() for one in record.published for name in one.metrics}
    others = sorted(published - SYSTEM - {"eval_loss"})
    wanted += [(*_words(name), (name,)) for name in others if "/" not in name and not name.endswith(("_s", *RATES))][:12]
    found = []
    for title, unit, names in wanted:
        drawn = {
            _label(run, name, several): _course(points, name)
            for run, record in records.items()
            for name in names
            if len(points := record.curve(name)) > (0 if name.startswith("eval_") else 1)
        }
        if drawn:
            found.append(charts.lines(title, unit, drawn, percent=title.startswith("Model FLOPs")))
    return found


def _words(name: str) -> tuple[str, str]:
    """Returns the title of a metric that has no chart of its own, and on which data it was taken."""
    held_out = name.startswith("eval_")
    return name.removeprefix("eval_").replace("_", " ").capitalize(), "held-out data" if held_out else "training"


def _label(run: str, name: str, several: bool) -> str:
    return run if several else {"loss": "training", "eval_loss": "held out"}.get(name, name)


def _course(points: Sequence[tuple[float, float]], name: str) -> list[tuple[float, float]]:
    finite = [point for point in points if math.isfinite(point[1])]
    return charts.smoothed(finite) if name in ("loss", "grad_norm") else finite


def rolling_goodput(record: Record, width: int = charts.WHOLE) -> charts.Chart | None:
    """The share of the time of each eighth of the run that was spent in steps that were not repeated."""
    times = [(one.at_s, one.step, one.metrics["step_time_s"]) for one in record.published if "step_time_s" in one.metrics]
    if len(times) < 4 or record.began_s is None or record.ended_s is None:
        return None
    began_s, length_s = record.began_s, record.ended_s - record.began_s
    unit_s, unit = charts.unit_of(length_s)
    window_s, reached, useful = length_s / 8, 0, []
    for at_s, step, step_s in times:
        new = max(0, step - reached)
        reached = max(reached, step)
        useful.append((at_s, new * step_s))
    points = []
    for number_of in range(1, 41):
        end_s = began_s + length_s * number_of / 40
        begin_s = max(began_s, end_s - window_s)
        inside = sum(worth for at_s, worth in useful if begin_s < at_s <= end_s)
        points.append(((end_s - began_s) / unit_s, min(1.0, inside / max(end_s - begin_s, 1e-9))))
    about = "rolling, over an eighth of the run"
    return charts.lines("Goodput", about, {"goodput": points}, x=unit, percent=True, width=width)


def lost(seconds: Mapping[str, float]) -> list[dict[str, str]]:
    """Returns what took the time that was not goodput, most first, and the setting that would change it."""
    whole_s = counted_s(seconds)
    rows = sorted(((value, name) for name, value in seconds.items() if name != "step"), reverse=True)
    return [
        {
            "what": CATEGORY_NAMES.get(name, name),
            "took": duration(value),
            "share": "" if name == "finish" else f"{value / whole_s:.1%}",
            "less": LESS.get(name, ""),
        }
        for value, name in rows
        if whole_s and value / whole_s >= MIN_LOST_SHARE
    ]


def incident(index: int, one: Incident, record: Record) -> dict[str, Any]:
    place = str(one.evidence.get("stacks", ""))
    return {
        "number": index,
        "when": overview.when(one.failed_at_s),
        "what": one.kind.replace("_", " "),
        "host": "" if one.host is None else one.host,
        "step": "" if one.step is None else f"{one.step:,}",
        "recovery": "not over yet" if one.open else duration(one.total_s),
        "replayed": replayed(one),
        "then": sentence(action_of(one.to_dict())),
        "summary": one.evidence.get("summary", ""),
        "detail": one.detail,
        "resumed": "" if one.resumed_step is None else f"{one.resumed_step:,}",
        "phases": drawing.svg(charts.phases(one.recovery_s)) if one.recovery_s and index <= 50 else "",
        "evidence": [(name, text[:4000]) for name, text in evidence(one.evidence) if name != "stacks"][:12],
        "stacks": [(path, text) for path, text in record.stacks.items() if place and path.startswith(f"{place}/")],
    }


def host_heat(record: Record, width: int = charts.WHOLE) -> charts.Chart | None:
    """How long each host worked on a step, in so many parts of the run."""
    marks = [mark for mark in record.marks if mark.ev == "busy" and mark.about.get("busy_s")]
    if not marks or max(len(mark.about["busy_s"]) for mark in marks) < 2:
        return None
    every = max(1, math.ceil(len(marks) / MAX_HEAT_COLUMNS))
    cells = [
        (host, int(mark.about.get("step", 0)), float(busy_s))
        for mark in marks[::every]
        for host, busy_s in enumerate(mark.about["busy_s"])
        if busy_s is not None
    ]
    return charts.heat("Work of each host", cells, "of a step; a row that stands out is a slow host", width)


def _wide_and_narrow(draw: Callable[..., charts.Chart | None]) -> str:
    """Returns a chart in two widths, of which the style sheet shows the one that fits; nothing if there is no chart."""
    made = {name: draw(width=width) for name, width in (("broad", charts.WHOLE), ("narrow", charts.NARROW))}
    return "".join(f'<div class="{name}">{drawing.svg(chart)}</div>' for name, chart in made.items() if chart is not None)


def _number(value: float | None) -> str:
    return "" if value is None else number(value)
