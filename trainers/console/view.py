"""What a console shows of a run: its state from the events so far, and the lines that an event adds. Pure text, with styles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gangway.published import of_evaluation, own, shown
from gangway.wire import events
from gangway.wire.limits import PHASES
from trainers.console.text import clock_time, count, printable, sentence

Event = Mapping[str, Any]
"""An event for the console (`gangway/wire/console.py` has the schemas): `ev` is its kind."""
Line = tuple[tuple[str, str], ...]
"""Parts of a line: text, and its style as `rich` names it."""
SHOWN_PREVIEW = 70
"""Characters of each text that the model generates; all of it is in the run's folder."""
STATES = {
    "checking": "checking the model and the data, while Ray starts",
    "reserving": "reserving machines",
    "starting": "starting",
    "importing": "starting processes",
    "joining": "joining the hosts",
    "restoring": "opening data and checkpoint",
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
SHOWN_ONCE = ("checking", "reserving", "importing", "compiling")
"""States of the start that are logged, once each."""
PLANNED = ("resize", "preemption", "straggler")
"""Kinds of incident in which nothing broke."""


def line(*parts: str | tuple[str, str]) -> Line:
    return tuple((part, "") if isinstance(part, str) else part for part in parts)


@dataclass
class View:
    """The state of the run, from the events so far."""

    started_s: float
    name: str = ""
    state: str = "starting"
    max_steps: int | None = None
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    """The metrics of the last publish of the training."""
    saved_step: int | None = None
    hosts: int | None = None
    unit: str = "tokens"
    num_incidents: int = 0
    goodput: float | None = None
    evaluation: str = ""
    """How far the present evaluation is."""
    shown_once: set[str] = field(default_factory=set)

    def update(self, event: Event) -> None:
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
                if event.get("kind") != "eval":
                    self.own = dict(event["metrics"])
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


def lines_of(event: Event, view: View) -> list[Line]:
    """Returns the lines that this event adds to the log of a run; `view` is the state after it."""
    lines: list[Line] = []
    match event["ev"]:
        case "run" if view.first(f"run {event['name']}"):
            lines = [_header(event)]
        case "status" if event.get("message"):
            lines = [line(sentence(event["message"]))]
        case "status" if event["state"] in SHOWN_ONCE and view.first(event["state"]):
            lines = [line((STATES[event["state"]], "dim"))]
        case "metrics" if event.get("kind") == "eval":
            lines = [_evaluation(event)]
        case "preview":
            lines = [_preview(event["step"], shown) for shown in event["previews"]]
        case "note":
            lines = [_note(event)]
    return lines


def progress(event: Event) -> str:
    return f"{event['unit']} {event['done']}" + (f"/{event['total']}" if event["total"] else "") + " batches"


def metrics_line(view: View) -> str:
    of = f"/{view.max_steps}" if view.max_steps else ""
    return "  ".join([f"step {view.step}{of}", *measures(view), *own_metrics(view), *facts(view)])


def own_metrics(view: View) -> list[str]:
    """Returns the user's own metrics of the training."""
    return [printable(part) for part in shown(own(view.own))]


def measures(view: View) -> list[str]:
    """Returns how the training goes."""
    rate = view.metrics.get("samples_per_s" if view.unit == "examples" else "tokens_per_s")
    return measures_of(view.metrics, None if rate is None else (rate, view.unit))


def measures_of(metrics: Mapping[str, float], rate: tuple[float, str] | None, *more: str) -> list[str]:
    """Returns the measures of a training that everybody looks at. `rate`: how many a second, and of what; `more` stands behind
    it."""
    parts = []
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    if "learning_rate" in metrics:
        parts.append(f"lr {metrics['learning_rate']:.1e}")
    if rate is not None:
        parts.append(f"{count(rate[0])} {rate[1]}/s")
    parts += more
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.0%}")
    return parts


def facts(view: View) -> list[str]:
    """Returns how the run is."""
    parts = [f"{clock_time(view.remaining_s)} left"] if view.remaining_s else []
    if view.hosts:
        parts.append(plural(view.hosts, "host"))
    if view.saved_step is not None:
        parts.append(f"saved {view.saved_step}")
    if view.num_incidents:
        parts.append(plural(view.num_incidents, "incident"))
    if view.goodput is not None:
        parts.append(f"goodput {view.goodput:.0%}")
    return parts


def _header(event: Event) -> Line:
    parts = [plural(event["hosts"], "host")]
    parts += [plural(event["devices"], "device")] if event["devices"] else []
    parts += [f"{count(event['parameters'])} parameters"] if event["parameters"] else []
    unit = event.get("unit", "tokens")
    parts += [f"{count(event['tokens_per_step'])} {unit} a step"] if event["tokens_per_step"] else []
    parts += [f"{count(event['max_steps'])} steps"] if event["max_steps"] else []
    return line((event["name"], "bold"), ("  " + " · ".join(parts), "dim"))


def _evaluation(event: Event) -> Line:
    parts = shown(of_evaluation(event["metrics"]))
    return line(("◆ ", "cyan"), f"step {event['step']}  held-out ", printable("  ".join(parts)))


def _preview(step: int, shown: Mapping[str, str]) -> Line:
    text = printable(shown["text"].replace("\n", "↵"))
    more = "…" if len(text) > SHOWN_PREVIEW else ""
    prompt = printable(shown["prompt"].replace("\n", "↵"))
    return line(("◇ ", "cyan"), f"step {step}  ", (prompt, "bold"), text[:SHOWN_PREVIEW] + more)


def _note(event: Event) -> Line:
    style = {"warning": "yellow", "error": "bold red"}.get(event.get("level", "info"), "")
    mark = {"warning": "! ", "error": "✗ "}.get(event.get("level", "info"), "")
    return line((mark + sentence(event["message"]), style))


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


WARNINGS = ("save_failed", "anomaly")


def for_console(event: events.Event) -> list[dict[str, Any]]:
    """Returns what the console of a job would get of this event of a training process."""
    match event["ev"]:
        case "phase":
            return [{"ev": "status", "state": label_of(event["phase"])}]
        case "metrics":
            kind = event.get("kind") or ("eval" if any(name.startswith("eval_") for name in event["metrics"]) else "train")
            return [{"ev": "metrics", "step": event["step"], "metrics": event["metrics"], "kind": kind}]
        case "evaluating" | "preview":
            return [dict(event)]
        case "saved":
            return [{"ev": "checkpoint", "step": event["step"], "path": event["path"]}]
        case _:
            level = "warning" if event["ev"] in WARNINGS else "info"
            return [{"ev": "note", "message": text, "level": level} for text in lines(event)]


def label_of(phase: str) -> str:
    """Returns the state that is shown in a phase of a process; a phase of a user's own is shown as it is."""
    return PHASES[phase].label if phase in PHASES else phase


def lines(event: events.Event) -> list[str]:
    """Returns what a user reads of an event, without its numbers."""
    found: list[str] = []
    match event["ev"]:
        case "note":
            found = [event["message"]]
        case "preview":
            found = [f"step {event['step']}  {shown['prompt']!r} -> {shown['text']!r}" for shown in event["previews"]]
        case "saved":
            found = [f"saved step {event['step']} in {event['path']}"]
        case "save_failed":
            found = [f"the checkpoint of step {event['step']} failed, and is tried again: {event['error']}"]
        case "restored":
            found = [f"checkpoint {bad['step']} was not used: {bad['why']}" for bad in event["skipped"]]
            found.append(f"the state of step {event['step']} is restored")
        case "anomaly":
            back = "" if event["restored_step"] is None else f", back to step {event['restored_step']}"
            found = [f"{event['kind']} in batch {event['batch_index']} (loss {event['loss']}): {event['action']}{back}"]
        case "profile":
            found = [f"no profile: {event['problem']}" if event["problem"] else f"a profile is in {event['path']}"]
        case "evaluating" if event["done"] == event["total"]:
            found = [f"evaluated {event['unit']}: {event['total']} batches"]
    return found
