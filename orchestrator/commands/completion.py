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
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gangway.config import near_keys
from gangway.program import GANGWAY, parser, parser_of
from gangway.terminal import command
from orchestrator.config.job import SECTIONS
from orchestrator.gangway import COMMANDS
from trainers import settings
from trainers.config.arguments import TrainingArguments

OVERRIDES = "key=value"
"""What a command that takes settings calls them."""


class Option(NamedTuple):
    names: tuple[str, ...]
    about: str
    choices: tuple[str, ...]
    """The values that it may have, if they are few."""


class Described(NamedTuple):
    """What may follow the name of a command."""

    name: str
    about: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    """The values of an argument that has no other ones."""
    takes_keys: bool
    """Whether settings may follow."""

    @property
    def flags(self) -> list[str]:
        return [name for option in self.options for name in option.names]


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = parser("orchestrator.commands.completion", __doc__, example="bash > gangway.bash")
    options.add_argument("shell", choices=tuple(SHELLS))
    shell = options.parse_args(argv).shell
    for line in SHELLS[shell]([described(name) for name in COMMANDS], keys()):
        print(line)
    return 0


def described(name: str) -> Described:
    """Returns what may follow the name of a command, by its own parser."""
    about, before = COMMANDS[name].about, sys.argv
    sys.argv = [f"{GANGWAY} {name}"]
    try:
        made = parser_of(importlib.import_module(COMMANDS[name].module).main)
    finally:
        sys.argv = before
    actions = [action for action in made._actions if action.help != argparse.SUPPRESS]
    options = (
        Option(tuple(action.option_strings), " ".join((action.help or "").split()), tuple(action.choices or ()))
        for action in actions
        if action.option_strings
    )
    words = (str(word) for action in actions if not action.option_strings for word in action.choices or ())
    return Described(name, about, tuple(options), tuple(words), any(OVERRIDES in str(action.metavar) for action in actions))


def keys() -> list[str]:
    """Returns the keys that may be given as `key=value`, by their names."""
    schema: Any = settings.schema_of(TrainingArguments, SECTIONS)
    every = {".".join(key) for key in near_keys.all_keys(schema)}
    return sorted(key for key in every if not any(other.startswith(f"{key}.") for other in every))


# ---------------------------------------------------------------------- the shells


def bash(commands: Sequence[Described], known: Sequence[str]) -> Iterator[str]:
    yield f"# {GANGWAY} completion bash"
    yield f"_{GANGWAY}_keys='{' '.join(f'{key}=' for key in known)}'"
    yield f"_{GANGWAY}() {{"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words= keys="
    yield "    COMPREPLY=()"
    yield "    if [[ $COMP_CWORD -eq 1 ]]; then"
    yield f"        COMPREPLY=($(compgen -W '{' '.join(each.name for each in commands)}' -- \"$word\")); return"
    yield "    fi"
    yield "    case ${COMP_WORDS[1]} in"
    for each in commands:
        words = " ".join((*each.flags, *each.words))
        yield f"        {each.name}) words='{words}'{f' keys=$_{GANGWAY}_keys' if each.takes_keys else ''}"
        for option in (option for option in each.options if option.choices):
            yield f"            case $before in {'|'.join(option.names)}) words='{' '.join(option.choices)}' keys=;; esac"
        yield "            ;;"
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "    if [[ -n $word && $word != -* && -n $keys ]]; then"
    yield "        compopt -o nospace 2>/dev/null"
    yield '        COMPREPLY+=($(compgen -W "$keys" -- "$word"))'
    yield "    fi"
    yield "}"
    # Where nothing of ours fits: files.
    yield f"complete -o default -o bashdefault -F _{GANGWAY} {GANGWAY}"


def zsh(commands: Sequence[Described], known: Sequence[str]) -> Iterator[str]:
    yield f"#compdef {GANGWAY}"
    yield f"# {GANGWAY} completion zsh"
    yield f"_{GANGWAY}() {{"
    yield "    local -a names flags keys  # others, such as `words` and `commands`, are those of zsh itself"
    yield f"    names=({' '.join(_zsh_row(each.name, each.about) for each in commands)})"
    yield "    if (( CURRENT == 2 )); then _describe -t commands command names; return; fi"
    yield "    case $words[2] in"
    for each in commands:
        rows = (_zsh_row(name, option.about) for option in each.options for name in option.names)
        yield f"        {each.name}) flags=({' '.join(rows)})"
        if each.words:
            yield f"            compadd -- {' '.join(each.words)}"
        for option in (option for option in each.options if option.choices):
            choices = " ".join(option.choices)
            yield f"            case $words[CURRENT-1] in {'|'.join(option.names)}) compadd -- {choices}; return;; esac"
        if each.takes_keys:
            yield f"            keys=({' '.join(known)})"
        yield "            ;;"
    yield "    esac"
    yield "    if [[ $words[CURRENT] == -* ]]; then _describe -t options option flags; return; fi"
    yield "    if [[ -n $words[CURRENT] ]]; then compadd -S '=' -q -- $keys; fi"
    yield "    _files"
    yield "}"
    yield f'if [[ $funcstack[1] == _{GANGWAY} ]]; then _{GANGWAY} "$@"; else compdef _{GANGWAY} {GANGWAY}; fi'


def _zsh_row(name: str, about: str) -> str:
    return shlex.quote(f"{name}:{about}")


def fish(commands: Sequence[Described], known: Sequence[str]) -> Iterator[str]:
    yield f"# {GANGWAY} completion fish"
    for each in commands:
        about = _fish_text(each.about)
        yield f"complete -c {GANGWAY} -n __fish_use_subcommand -f -a {each.name} -d {about}"
        here = f"complete -c {GANGWAY} -n '__fish_seen_subcommand_from {each.name}'"
        if each.words:
            yield f"{here} -f -a '{' '.join(each.words)}'"
        for option in each.options:
            flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            choices = f" -x -a '{' '.join(option.choices)}'" if option.choices else ""
            yield f"{here} {flags}{choices} -d {_fish_text(option.about)}"
    takers = " ".join(each.name for each in commands if each.takes_keys)
    given = 'string match -q -r "^[a-z]" -- (commandline -ct)'
    keys_given = " ".join(f"{key}=" for key in known)
    yield f"complete -c {GANGWAY} -n '__fish_seen_subcommand_from {takers}; and {given}' -a '{keys_given}'"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Sequence[Described], Sequence[str]], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}

if __name__ == "__main__":
    sys.exit(main())
