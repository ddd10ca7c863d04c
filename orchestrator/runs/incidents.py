"""`gangway incidents RUN|CONFIG [NUMBER]`: the incidents of a run, or one with all that is known of it.

Exit status: 0; 2 when there is no such run or incident.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gangway.program import EXIT_FINE, command
from gangway.storage import json_text
from gangway.storage.documents import Where
from gangway.storage.opening import place_of
from orchestrator.config.locate import REFUSALS, NoRunError, parser_of_run, run_of
from orchestrator.reporting.text import action_of, again, recovery
from orchestrator.run_state import incident_log
from orchestrator.run_state.incidents import Incident
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.runs import overview
from trainers.console.text import plain_console, printable, seconds, sentence, table_console

SHOWN_CAUSES = 5
"""So many of the newest, below the table of a terminal."""


@command(*REFUSALS, is_read=True)
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of_run("orchestrator.runs.incidents", "The incidents of a run.", example="runs/spirals --number 1")
    parser.add_argument("--number", type=int, metavar="N", help="one of them, with its evidence")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_intermixed_args(argv)
    found = of_run(run_of(options.run, options.overrides))
    if options.number is not None and not 1 <= options.number <= len(found):
        raise NoRunError(f"--number {options.number}: the run has {len(found)} incidents")
    chosen = found if options.number is None else [found[options.number - 1]]
    if options.json:
        print(json_text.dumps([incident.to_dict() for incident in chosen], indent=1))
    elif options.number is not None:
        show_one(plain_console(), options.number, chosen[0])
    else:
        show(table_console(), chosen)
    return EXIT_FINE


def of_run(run: Where) -> list[Incident]:
    """Returns the incidents of all launches of a run, oldest first. Raises NewerDocument or OSError."""
    return [entry.incident for entry in incident_log.of_all_launches(RunFolder(place_of(run).url).last_lines(incident_log.NAME))]


def show(screen: Console, incidents: Sequence[Incident]) -> None:
    if not incidents:
        screen.print("no incident")
        return
    columns = (
        Column(name, justify="left" if name in ("when", "what") else "right", no_wrap=True)
        for name in ("", "when", "what", "host", "step", "recovery", "again")
    )
    why = [] if screen.is_terminal else [Column("why", no_wrap=True)]
    table = Table(*columns, "then", *why, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    causes = [sentence(str(incident.evidence.get("summary", ""))) for incident in incidents]
    for number, incident in enumerate(incidents, 1):
        table.add_row(
            str(number),
            overview.when(incident.failed_at_s),
            incident.kind.replace("_", " "),
            "" if incident.host is None else str(incident.host),
            "" if incident.step is None else f"{incident.step:,}",
            "" if incident.open else seconds(incident.total_s),
            replayed(incident),
            # What came after another failure is not told of the first.
            Text("not over yet", "yellow")
            if incident.open and number == len(incidents)
            else sentence(action_of(incident.to_dict())),
            *([] if screen.is_terminal else [causes[number - 1]]),
        )
    screen.print(table)
    if screen.is_terminal:
        screen.print()
        for number in range(max(1, len(causes) - SHOWN_CAUSES + 1), len(causes) + 1):
            screen.print(Text.assemble((f"{number}  ", "bold"), causes[number - 1]), soft_wrap=True)


def replayed(incident: Incident) -> str:
    """Returns what is trained again because of it, in words."""
    return "" if incident.resumed_step is None else again(incident.to_dict()) or "0 steps"


def show_one(screen: Console, number: int, incident: Incident) -> None:
    """Prints one incident with its evidence."""
    document = incident.to_dict()
    head = sentence(str(incident.evidence.get("summary", incident.kind)))
    screen.print(Text.assemble((f"incident {number}  ", "bold"), head), soft_wrap=True)
    rows = {
        "when": overview.when(incident.failed_at_s),
        "step": incident.step,
        "generation": incident.generation,
        "then": action_of(document),
        "recovery": f"{seconds(incident.total_s)}: {recovery(incident.recovery_s)}" if incident.recovery_s else "",
        "went on at": incident.resumed_step,
        "again": again(document),
    }
    for name, value in rows.items():
        if value not in (None, ""):
            screen.print(Text.assemble((f"  {name:<12}", "bright_black"), printable(str(value))), soft_wrap=True)
    for name, text in evidence(incident.evidence):
        screen.print(Text(f"\n  {name}", "bold"))
        for line in text.splitlines():
            screen.print(Text(f"    {printable(line)}"), soft_wrap=True)


def evidence(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, text) of all evidence but the summary, what is said in it, and the step that an incident has itself."""
    return [
        (name.replace("_", " "), _text(value))
        for name, value in found.items()
        if name not in ("summary", "origin", "step") and value not in (None, "", [], {})
    ]


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else json_text.dumps(value, indent=1)


if __name__ == "__main__":
    sys.exit(main())
