"""The name by which a person has called a command, and its help."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

GANGWAY = "gangway"
_asked: ContextVar[bool] = ContextVar("asked", default=False)


def program(module: str) -> str:
    """Returns how the running command was called, for its usage: `gangway run`, or `python -m orchestrator.run`."""
    # `orchestrator.gangway` sets it before it calls the command.
    return sys.argv[0] if sys.argv[0].startswith(f"{GANGWAY} ") else f"python -m {module}"


class Parser(argparse.ArgumentParser):
    """The parser of a command. Its help ends with an example of a call: `example` is what follows the name of the command."""

    def __init__(self, module: str, about: str, *, example: str, details: str = ""):
        width = shutil.get_terminal_size().columns - 2
        parts = [*([details.strip("\n")] if details.strip("\n") else []), f"example:\n  {program(module)} {example}"]
        super().__init__(
            program(module),
            description=textwrap.fill(about, width),
            epilog="\n\n".join(parts),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.about, self.details, self.example = " ".join(about.split()), details.strip("\n"), example

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        if _asked.get():
            raise _Described(self)
        return super().parse_known_args(*given, **named)

    def parse_known_intermixed_args(self, *given: Any, **named: Any) -> Any:
        if _asked.get():
            raise _Described(self)
        return super().parse_known_intermixed_args(*given, **named)


class _Described(BaseException):
    """A command has made its parser."""

    def __init__(self, parser: Parser):
        self.parser = parser


def parser(module: str, doc: str | None, *, example: str) -> Parser:
    """Returns the parser of a command whose help is the docstring of its module: the first paragraph, and the others below the
    options."""
    about, _, details = str(doc).replace(f"python -m {module}", program(module)).partition("\n\n")
    return Parser(module, about, example=example, details=details)


def parser_of(main: Callable[[], int]) -> Parser:
    """Returns the parser that a command makes, and does no more of it. `sys.argv` must have its name."""
    token = _asked.set(True)
    try:
        main()
    except _Described as described:
        return described.parser
    finally:
        _asked.reset(token)
    raise ValueError(f"{sys.argv[0]} made no parser")
