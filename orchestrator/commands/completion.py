"""Writes what lets a shell complete the commands of gangway, their options, and the keys of a configuration.

    python -m orchestrator.commands.completion bash

It is written once, into a file that the shell reads:

    bash   ~/.local/share/bash-completion/completions/gangway
    zsh    a file `_gangway` in a folder of $fpath, such as ~/.zfunc
    fish   ~/.config/fish/completions/gangway.fish

Write it anew after an update of gangway.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import shtab

from gangway.config import near_keys
from gangway.program import GANGWAY, Parser, command, parser, parser_of
from orchestrator.config.job import SECTIONS
from orchestrator.gangway import COMMANDS
from trainers import settings
from trainers.config.arguments import TrainingArguments

OVERRIDES = "key=value"
"""What a command that takes settings calls them."""
KEYS = f"_{GANGWAY}_keys"
COMPLETE = {"bash": KEYS, "zsh": KEYS, "fish": f"({KEYS})"}
"""What a shell calls for a setting: the function of `preamble`."""


@command(is_read=True)
def main(argv: Sequence[str] | None = None) -> int:
    options = parser("orchestrator.commands.completion", __doc__, example="bash > gangway.bash")
    options.add_argument("shell", choices=tuple(COMPLETE))
    shell: Any = options.parse_args(argv).shell
    print(shtab.complete(whole(), shell=shell, preamble=preamble(" ".join(f"{key}=" for key in keys()))[shell]))
    return 0


def whole() -> argparse.ArgumentParser:
    """Returns the parser of all commands, each by its own."""
    made = argparse.ArgumentParser(GANGWAY)
    commands = made.add_subparsers()
    for name, about in COMMANDS.items():
        own = own_parser(name)
        for action in own._actions:
            if OVERRIDES in str(action.metavar):
                action.complete = COMPLETE  # type: ignore[attr-defined]
        commands.add_parser(name, help=about.about, description=about.about, parents=[own], add_help=False)
    return made


def own_parser(name: str) -> Parser:
    before = sys.argv
    sys.argv = [f"{GANGWAY} {name}"]
    try:
        return parser_of(importlib.import_module(COMMANDS[name].module).main)
    finally:
        sys.argv = before


def keys() -> list[str]:
    """Returns the keys that may be given as `key=value`, by their names."""
    schema: Any = settings.schema_of(TrainingArguments, SECTIONS)
    every = {".".join(key) for key in near_keys.all_keys(schema)}
    return sorted(key for key in every if not any(other.startswith(f"{key}.") for other in every))


def preamble(words: str) -> dict[str, str]:
    """Returns, for each shell, the function that offers keys once the word has begun, and files."""
    return {
        "bash": f"{KEYS}() {{\n"
        f"  compgen -f -- $1\n  [[ -n $1 ]] || return\n  compopt -o nospace 2>/dev/null\n  compgen -W '{words}' -- $1\n}}",
        "zsh": f"{KEYS}() {{\n  [[ -n $words[CURRENT] ]] && compadd -S '' -- {words}\n  _files\n}}",
        "fish": f"function {KEYS}\n"
        f"  string match -q -r '^[a-z]' -- (commandline -ct); and string split ' ' '{words}'\n"
        "  __fish_complete_path (commandline -ct)\nend",
    }


if __name__ == "__main__":
    sys.exit(main())
