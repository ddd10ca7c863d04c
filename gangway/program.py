"""A command of a person: the name by which it was called, its help, and how it ends."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, ParamSpec

from gangway.surroundings import ensure_home
from gangway.terminal import arrived, ignores, streams

Given = ParamSpec("Given")
GANGWAY = "gangway"
PACKAGES = ("orchestrator", "trainers", "cluster", "gangway")
EXIT_FINE, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2
_asked: ContextVar[bool] = ContextVar("asked", default=False)


def program(module: str) -> str:
    """Returns how the running command was called, for its usage: `gangway run`, or `python -m orchestrator.run`."""
    # `orchestrator.gangway` sets it before it calls the command.
    return sys.argv[0] if sys.argv[0].startswith(f"{GANGWAY} ") else f"python -m {module}"


def command(
    *refusals: type[Exception],
    failures: tuple[type[Exception], ...] = (),
    interrupted: str = "interrupted",
    is_read: bool = False,
) -> Callable[[Callable[Given, int]], Callable[Given, int]]:
    """Makes a function the `main` of a command, whose exit status it returns. The command may write to its standard streams,
    whatever becomes of them, also the text of `--help`. An error of `refusals`, about which its user can do something, ends it
    with a line and EXIT_REFUSED, as does a working folder that hides a package of ours; one of `failures` with a line and
    EXIT_FAILED; a signal, Ctrl-C or another, with the line `interrupted` and 128 more than its number. `is_read`: what it
    writes is what it was called for, and where that did not arrive, as on a full disk, it ends with EXIT_FAILED."""

    def decorated(main: Callable[Given, int]) -> Callable[Given, int]:
        @functools.wraps(main)
        def guarded(*args: Given.args, **named: Given.kwargs) -> int:
            with streams():
                if home := ensure_home(os.environ):
                    print(f"this user has no home folder: {home} is taken for one", file=sys.stderr)
                if (problem := hidden(Path(sys.path[0]))) is not None:
                    print(f"error: {problem}", file=sys.stderr)
                    return EXIT_REFUSED
                try:
                    with interruptible():
                        status = main(*args, **named)
                    return EXIT_FAILED if is_read and status == EXIT_FINE and not arrived() else status
                except (*refusals, *failures) as error:
                    from gangway.config.masking import masked  # the first line needs no package of ours

                    print(f"error: {masked(str(error))}", file=sys.stderr)
                    return EXIT_FAILED if isinstance(error, failures) else EXIT_REFUSED
                except KeyboardInterrupt as error:
                    print(interrupted, file=sys.stderr)
                    return 128 + getattr(error, "number", signal.SIGINT)

        return guarded

    return decorated


def leave(status: int) -> NoReturn:
    """Ends a program with the exit status of its command. A signal that comes from now on, while libraries end, changes nothing
    of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


class Signalled(KeyboardInterrupt):
    """A signal has asked this process to end, as Ctrl-C does."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets SIGTERM, and SIGHUP where a terminal is closed, interrupt what runs as Ctrl-C does, where nobody handles them. Python
    would end the process at once, and what it has started would stay."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Signalled(number)

    in_main, taken = threading.current_thread() is threading.main_thread(), (signal.SIGTERM, signal.SIGHUP)
    mine = [number for number in taken if in_main and signal.getsignal(number) == signal.SIG_DFL and not ignores(number)]
    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in (number for number in mine if signal.getsignal(number) is interrupt):
            signal.signal(number, signal.SIG_DFL)


def hidden(here: Path) -> str | None:
    """Returns why gangway cannot run where the modules of this folder are imported first: they have the names of its packages."""
    if has_source(here) or here.resolve() == Path(__file__).resolve().parents[1]:
        return None
    # A folder without `__init__.py` hides nothing.
    paths = (path for name in PACKAGES for path in (here / f"{name}.py", here / name / "__init__.py") if path.is_file())
    if (path := next(paths, None)) is None:
        return None
    name = path.stem if path.parent == here else path.parent.name
    return (
        f"{path} hides the package {name!r} of gangway: modules of the working folder are imported first, in every process; "
        "rename it, or start in another folder"
    )


def has_source(here: Path) -> bool:
    """Whether a folder has a source of gangway other than the one that runs."""
    source = here / "gangway" / "program.py"
    return source.is_file() and not source.samefile(__file__)


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
