"""What a console shows of the events of a training process. Free of JAX."""

from __future__ import annotations

from typing import Any

from gangway.wire.events import Event
from gangway.wire.phases import PHASES

WARNINGS = ("save_failed", "anomaly")


def for_console(event: Event) -> list[dict[str, Any]]:
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


def lines(event: Event) -> list[str]:
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
            found = [f"the checkpoint of step {event['step']} failed, training goes on and tries again: {event['error']}"]
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
