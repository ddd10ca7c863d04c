"""The one place that writes to a terminal, a pipe or a log of a command. Showing can never fail what is shown.

A terminal is closed, the reader of a pipe goes away (`| head`), a disk fills under `> log`, or there is no standard output.
Then a stream is *lost*: what is written to it from there on is dropped, and `lost` says why. `streams` gives a command such
ones. Needs nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2


class Shown:
    """A text stream whose `write` and `flush` never raise. All else is that of `stream`.

    With `is_ours`, a stream that is lost is led to /dev/null, for its buffer and for child processes. With `tries_again`, no
    failure is lasting: of a log on a disk that was full, only what was written meanwhile is missing.
    """

    def __init__(self, stream: TextIO, *, is_ours: bool = False, tries_again: bool = False):
        self._stream, self._is_ours, self._tries_again = stream, is_ours, tries_again
        self.lost: str | None = None
        """Why nothing more is written; None as long as all was."""
        self.reader_is_gone = False
        """Whether that is so because nobody reads any more, which is nothing to tell anybody about."""
        with suppress(Exception):  # a stream of another kind: `write` replaces what it does not know
            cast(Any, stream).reconfigure(errors="replace")

    def write(self, text: str) -> int:
        self._try(self._write, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        try:
            return self.lost is None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def lose(self, why: str) -> None:
        """From here on, nothing is written."""
        if self.lost is None:
            self.lost = why
            if self._is_ours:
                _lead_nowhere(self._stream)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode("ascii", errors="replace").decode())

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        if self.lost is not None:
            return
        try:
            work(*arguments)
        except Exception as error:  # whatever a stream raises: a notebook and a test have streams of their own
            if self._tries_again:
                return
            self.reader_is_gone = isinstance(error, BrokenPipeError)
            self.lose((isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def shown(stream: TextIO | None, *, is_ours: bool = False, tries_again: bool = False) -> Shown:
    """Returns a stream whose writing never fails, which writes to `stream`; None is a stream that is lost."""
    if isinstance(stream, Shown):
        return stream
    if stream is not None:
        return Shown(stream, is_ours=is_ours, tries_again=tries_again)
    nowhere = Shown(open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    nowhere.lost, nowhere.reader_is_gone = "there is none", True
    return nowhere


def nobody_looks() -> bool:
    """Returns whether standard output is lost: the end of a command that only shows how something goes on."""
    return isinstance(sys.stdout, Shown) and sys.stdout.lost is not None


def arrived() -> bool:
    """Returns whether standard output has taken all that was written. A reader that is gone wanted no more of it."""
    sys.stdout.flush()
    return not isinstance(sys.stdout, Shown) or sys.stdout.lost is None or sys.stdout.reader_is_gone


@contextmanager
def streams() -> Iterator[None]:
    """Puts streams whose writing never fails in the place of standard output and standard error, for a while."""
    fill_descriptors()
    before = sys.stdout, sys.stderr
    out, err = shown(sys.stdout, is_ours=True), shown(sys.stderr, is_ours=True)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield
    finally:
        # Here: what is left in a buffer would fail as Python ends, and change the exit status.
        out.flush()
        if out.lost and not out.reader_is_gone and before[0] is not None and before[0] is not out:
            err.write(f"not all could be shown: standard output cannot be written: {out.lost}\n")
        err.flush()
        sys.stdout, sys.stderr = before


def fill_descriptors() -> None:
    """Opens /dev/null as each standard descriptor that is closed. Else the next file that is opened becomes standard output."""
    for descriptor in (STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number, and those below it are in use.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _lead_nowhere(stream: TextIO) -> None:
    """Lets the descriptor of a standard stream lead to /dev/null: for what is in its buffer, and for child processes."""
    with suppress(Exception):  # it has none, or it is closed
        descriptor = stream.fileno()
        if descriptor in (STANDARD_OUTPUT, STANDARD_ERROR):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


# ---------------------------------------------------------------------- a terminal that is closed


def ignores(number: int) -> bool:
    """Returns whether this process goes on at a signal that asks others to end: at SIGINT where it was started with that ignored,
    as by `&` in a script, so that Ctrl-C is for what the terminal shows; at SIGHUP under `nohup`, which ignores it, or as the
    leader of a session that has no terminal (`setsid`, a service)."""
    if signal.getsignal(number) == signal.SIG_IGN:
        return True
    return number == signal.SIGHUP and os.getsid(0) == os.getpid() and not _has_terminal()


OF_AN_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a process is asked to end. In a session without a terminal SIGHUP is ignored."""


@contextmanager
def handling(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Lets the handler take these signals in the block. One that this process ignores stays ignored: SIGHUP under `nohup`, SIGINT
    behind `&`."""
    before = {number: signal.signal(number, signal.SIG_IGN if ignores(number) else handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
