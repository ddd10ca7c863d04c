"""What was done about incidents, and the closing page of a run, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console as Screen
from rich.table import Column, Table
from rich.text import Text

from gangway.published import counted, of_evaluation, shown
from gangway.stop_reason import StopReason
from gangway.storage.usage import REQUESTS
from orchestrator.run_state.goodput import CATEGORIES, counted_s, share
from trainers.console.text import count, printable, seconds, sentence
from trainers.console.view import plural

BAR_WIDTH = 30
ENDED_BY: Mapping[str | None, str] = {
    StopReason.EARLY_STOPPED: "early, by evaluation.score",
    StopReason.END_OF_DATA: "the data has ended",
    StopReason.MAX_EPOCHS: "max_num_data_epochs",
}
"""What ended a run before `max_num_steps`."""
SHOWN_INCIDENTS = 12
SHOWN_SAMPLE_LINES = 16
CATEGORY_NAMES = {
    "start": "starting the command",
    "schedule": "waiting for machines",
    "import": "starting processes",
    "join": "joining the hosts",
    "compile": "compiling",
    "restore": "opening data and checkpoint",
    "step": "training steps",
    "data_wait": "waiting for data",
    "checkpoint": "checkpoint stalls",
    "detection": "noticing failures",
    "recovery": "restarting",
    "evaluation": "evaluating",
    "replay": "training steps again",
    "idle": "restart back-off",
    "finish": "after the last step",
}
"""What a category of the goodput ledger is in words."""
ACTIONS = {
    "restart": "restarting",
    "replace": "restarting with another host in its place",
    "shrink": "going on with {after}",
    "grow": "going on with {after}",
    "adopt": "taken over",
    "skip": "skipped",
    "rollback": "rolled back",
    "reported": "watched",
}
PHASE_FLOOR_S = 0.005
"""Shorter phases of a recovery are not worth their place on the line."""


def recovery(phases: Mapping[str, float]) -> str:
    """detect 0.02 · restore 0.11 s"""
    shown = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in phases.items() if value >= PHASE_FLOOR_S]
    return " · ".join(shown) + ("\u00a0s" if shown else "")  # The unit stays with its number.


def again(incident: Mapping[str, Any]) -> str:
    """36 steps, 41.2 s: what is trained again because of an incident, which comes on top of its recovery; empty if nothing is."""
    steps, step_s = incident.get("replayed_steps", 0), incident.get("step_s", 0.0)
    return f"{plural(steps, 'step')}" + (f", {seconds(steps * step_s)}" if step_s else "") if steps else ""


def price(incident: Mapping[str, Any]) -> str:
    """0.42 s; 36 steps, 41.2 s again, from storage: what an incident that is over has cost."""
    source = f", from {incident['source']}" if incident.get("source") else ""
    repeated = again(incident) or ("0 steps" if source else "")
    return seconds(incident["total_s"]) + (f"; {repeated} again{source}" if repeated else "")


def action_of(incident: Mapping[str, Any]) -> str:
    """Returns what was done about an incident, in words."""
    action, detail = str(incident["action"]), incident.get("detail", "")
    after = incident.get("hosts_after")
    words = ACTIONS.get(action, action)
    if action == "give up":
        return sentence(f"give up: {detail}")
    words = words.format(after=f"{after} host" + ("" if after == 1 else "s")) if after is not None else words.partition(" {")[0]
    return sentence(f"{words}; {detail}") if detail else words


def storage_usage(requests: Mapping[str, int]) -> str:
    """8,250 requests (2,900 writes and lists), 1.2 GB sent, 80 MB read; an empty text if a bucket was asked for nothing."""
    asked = {kind: requests.get(kind, 0) for kind in REQUESTS}
    if not any(asked.values()):
        return ""
    sent, read = (f"{count(requests.get(name, 0))}B {word}" for name, word in (("bytes_out", "sent"), ("bytes_in", "read")))
    return f"{sum(asked.values()):,} requests ({asked['put'] + asked['list']:,} writes and lists), {sent}, {read}"


def waiting(delay_s: float, left_s: float | None, what: str) -> str:
    """Returns the message of a back-off: what failed, when the next try is, and for how long it will be retried."""
    until = f", for {seconds(left_s)} at most" if left_s is not None else ""
    return sentence(f"trying again in {seconds(delay_s)}{until}: {what}")


def summary_page(screen: Screen, summary: Mapping[str, Any]) -> None:
    """Prints the result, the incidents, the goodput ledger, a sample of the model, and the paths of the run's files."""
    _headline(screen, summary)
    _facts(screen, summary)
    _incidents(screen, summary.get("incidents") or [])
    _goodput(screen, summary.get("goodput") or {})
    if summary.get("sample"):
        _sample(screen, summary.get("prompt") or "", summary["sample"])
    _locations(screen, summary)


def _headline(screen: Screen, summary: Mapping[str, Any]) -> None:
    status = summary["status"]
    style = {"finished": "bold green", "failed": "bold red"}.get(status, "bold yellow")
    mark = {"finished": "✓", "failed": "✗"}.get(status, "■")
    amount = counted(summary.get("tokens") or None, summary.get("samples") or None)
    trained_on = "" if amount is None else f", {count(amount[0])} {amount[1]}"
    reason = summary.get("stop_reason")
    ended = ENDED_BY.get(reason, "") if status == "finished" else reason
    why = f" ({ended})" if ended else ""
    took = f" in {seconds(summary['wall_s'])}" if summary.get("wall_s") else ""
    headline = f"{mark} {summary.get('name', 'run')} {status}{why}"
    course = f"{count(summary.get('steps') or 0)} steps{trained_on}{took}"
    screen.print()
    screen.print(Text.assemble("  ", (headline, style), f"  {course}"), soft_wrap=True)
    screen.print()


def _facts(screen: Screen, summary: Mapping[str, Any]) -> None:
    losses = [("training", summary.get("train_loss")), ("held-out", summary.get("eval_loss"))]
    evaluated = {name: value for name, value in (summary.get("evaluation") or {}).items() if name != "eval_loss"}
    launches, of_launch = summary.get("launches") or 1, summary.get("launch")
    failed = summary.get("failed_requests")
    rows = [
        ("loss", "  ".join(f"{name} {value:.4f}" for name, value in losses if value is not None)),
        ("training", "  ".join(shown(summary.get("train_metrics") or {}))),
        ("held-out", "  ".join(shown(of_evaluation(evaluated)))),
        # Each launch begins with a generation that is no restart.
        ("restarts", str(max(0, (summary.get("generations") or 1) - launches))),
        ("storage", storage_usage(summary.get("requests") or {})),
        ("storage", f"{failed} requests to it failed and were made again" if failed else ""),
    ]
    if launches > 1 and of_launch:
        about = f"{seconds(of_launch['wall_s'])}, {plural(of_launch['num_incidents'], 'incident')}"
        rows.append(("launches", f"{launches}; all numbers are of all of them. This one: {about}"))
    for name, value in rows:
        if value:
            _line(screen, name, value)


def _incidents(screen: Screen, incidents: list[Mapping[str, Any]]) -> None:
    if not incidents:
        return
    _title(screen, "Incidents")
    columns = [Column(justify=justify, no_wrap=True) for justify in ("left", "left", "left", "right", "right")]  # type: ignore[arg-type]
    table = Table.grid(*columns, "", padding=(0, 2))  # The last: the phases of the recovery, on two lines if they must.
    for incident in incidents[-SHOWN_INCIDENTS:]:
        recovered = not str(incident["action"]).startswith("give up")
        table.add_row(
            Text("    ✓" if recovered else "    ✗", "green" if recovered else "red"),
            str(incident["kind"]).replace("_", " "),
            f"host {incident['host']}" if incident.get("host") is not None else "",
            f"step {incident['step']}" if incident.get("step") is not None else "",
            price(incident) if recovered else "",
            _what_was_done(incident) if recovered else Text(action_of(incident), "red"),
        )
    screen.print(table)
    if len(incidents) > SHOWN_INCIDENTS:
        screen.print(Text(f"    and {len(incidents) - SHOWN_INCIDENTS} before these: all are in incidents.jsonl", "dim"))


def _what_was_done(incident: Mapping[str, Any]) -> Text:
    done = "" if incident["action"] == "restart" else f"{action_of(incident)}  "
    return Text.assemble(done, (recovery(incident["recovery_s"]), "dim"))


def _goodput(screen: Screen, goodput: Mapping[str, float]) -> None:
    whole_s = counted_s(goodput)
    if whole_s <= 0:
        return
    _title(screen, f"Where the time went: goodput {100 * share(goodput):.1f} %")
    columns = (Column(justify=justify, no_wrap=True) for justify in ("left", "right", "right", "left"))  # type: ignore[arg-type]
    table = Table.grid(*columns, padding=(0, 2))
    # The order of a run's life, as the ledger has it; what cannot be seen at this scale is left out.
    for name in (name for name in CATEGORIES if goodput.get(name, 0.0) / whole_s >= 0.0005):
        part = goodput[name] / whole_s
        of_all = (
            () if name == "finish" else (f"{100 * part:.1f} %", Text(_bar(part), "green" if name == "step" else "bright_black"))
        )
        table.add_row("    " + CATEGORY_NAMES.get(name, name.replace("_", " ")), seconds(goodput[name]), *of_all)
    screen.print(table)


def _sample(screen: Screen, prompt: str, sample: str) -> None:
    _title(screen, "The model, now")
    text = printable(sample if sample.startswith(prompt) else prompt + sample)
    lines = text.splitlines()[:SHOWN_SAMPLE_LINES]
    for index, line in enumerate(lines):
        shown = Text(line)
        if index == 0:
            shown.stylize("bold", 0, len(prompt))
        screen.print(Text.assemble(("    │ ", "bright_black"), shown), soft_wrap=True)


def _locations(screen: Screen, summary: Mapping[str, Any]) -> None:
    screen.print()
    mlflow = summary.get("mlflow") or {}
    locations = (
        ("summary", f"{summary['storage']}/summary.json" if summary.get("storage") else None),
        ("report", summary.get("report")),
        ("checkpoints", summary.get("checkpoints")),
        ("printed", summary.get("logs")),
        ("metrics", mlflow.get("command") or mlflow.get("uri")),
    )
    for name, location in locations:
        if location:
            _line(screen, name, location)
    screen.print()


def _title(screen: Screen, title: str) -> None:
    screen.print()
    screen.print(Text("  " + title, "bold"))


def _line(screen: Screen, name: str, value: str) -> None:
    """Prints a line that is never cut or wrapped: paths and commands are copied by people."""
    screen.print(Text.assemble("  ", (f"{name:<13}", "bright_black"), printable(value)), soft_wrap=True)


def _bar(share: float) -> str:
    """In eighths of a character."""
    eighths = max(1, round(share * BAR_WIDTH * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
