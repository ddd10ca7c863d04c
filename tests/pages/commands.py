"""The page of the commands: what each one does, its arguments and options, and an example, all as its `--help` says."""

from __future__ import annotations

import argparse
import importlib
import re
import sys

from gangway.program import GANGWAY, Parser, parser_of
from orchestrator.gangway import COMMANDS

HEAD = """# Commands

`gangway COMMAND --help` shows the same. `gangway completion bash` writes what lets your shell complete all of it
([how](#gangway-completion)). `make files` writes this page from the code.

| command | does |
|---|---|
"""


def page() -> str:
    rows = (f"| [`{GANGWAY} {name}`](#{GANGWAY}-{name}) | {command.about} |\n" for name, command in COMMANDS.items())
    return HEAD + "".join(rows) + "".join(f"\n{section(name)}" for name in COMMANDS)


def section(name: str) -> str:
    made = parser_named(name)
    actions = [action for action in made._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    parts = [
        f"## `{GANGWAY} {name}`",
        made.about,
        "```\n" + f"{GANGWAY} {name} {made.example}" + "\n```",
        "\n".join(row(action) for action in actions),
        details(made),
        f"As a module: `python -m {COMMANDS[name].module.removesuffix('.__main__')}`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def parser_named(name: str) -> Parser:
    """Returns the parser of a command, as it is called by `gangway`."""
    before, sys.argv = sys.argv, [f"{GANGWAY} {name}"]
    try:
        return parser_of(importlib.import_module(COMMANDS[name].module).main)
    finally:
        sys.argv = before


def row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = value_of(action)
    shown = " ".join(part for part in (names, f"`{value}`" if value else "") if part)
    said = (action.help or "").replace("%%", "%")
    must = "must be given" if action.option_strings and action.required else ""
    return f"- {shown}" + "".join(f": {text}" for text in ["; ".join(filter(None, (must, " ".join(said.split()))))] if text)


def value_of(action: argparse.Action) -> str:
    """Returns what stands for the value in the usage; nothing if there is none."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return "|".join(str(choice) for choice in action.choices)
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return metavar if action.nargs not in ("*", "+") or "..." in metavar else f"{metavar} ..."


def details(made: Parser) -> str:
    """Returns what the help says below the options: text, and a list of its lines `name  meaning`. Its usage is left out: that
    is the list of the arguments."""
    lines: list[str] = []
    for line in made.details.splitlines():
        name, _, meaning = line.strip().partition("  ")
        if not line.startswith("  "):
            lines += [*([""] if is_item(lines) else []), line]
        elif not name.startswith((GANGWAY, "python -m")):
            lines += [*([] if is_item(lines) else [""]), f"- `{name}`: {meaning.strip()}"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def is_item(lines: list[str]) -> bool:
    return bool(lines) and lines[-1].startswith("- ")
