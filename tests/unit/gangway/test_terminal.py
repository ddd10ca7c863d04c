"""Showing can never fail what is shown: streams of every kind, broken in every way."""

import errno
import importlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys

import pytest

from gangway import terminal
from gangway.program import EXIT_REFUSED, command
from gangway.storage.store import StorageRefused
from gangway.terminal import ignores, shown
from orchestrator.gangway import COMMANDS
from tests import ROOT
from tests.programs.processes import PATIENCE_S


class Broken(io.StringIO):
    """A stream that fails from the second write on."""

    def __init__(self, error):
        super().__init__()
        self.error, self.num_writes = error, 0

    def write(self, text):
        self.num_writes += 1
        if self.num_writes > 1:
            raise self.error
        return super().write(text)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (FULL, "No space left on device"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (ValueError("I/O operation on closed file."), "I/O operation on closed file."),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_stream_that_fails_is_lost_and_says_why(error, why):
    broken = Broken(error)
    stream = shown(broken)
    for text in ("one\n", "two\n", "three\n"):
        print(text, end="", file=stream, flush=True)
    assert broken.getvalue() == "one\n"
    assert broken.num_writes == 2  # then nothing is tried any more
    assert stream.lost == why
    assert stream.reader_is_gone == isinstance(error, BrokenPipeError)
    assert not stream.isatty()


def test_a_log_of_a_training_process_misses_only_what_was_printed_while_the_disk_was_full():
    broken = Broken(FULL)
    stream = shown(broken, tries_again=True)
    for number in range(4):
        print(number, end="", file=stream)
        broken.num_writes = 0 if number == 2 else broken.num_writes
    assert broken.getvalue() == "03"
    assert stream.lost is None


def test_characters_that_a_stream_does_not_know_do_not_lose_it():
    under = io.BytesIO()
    stream = shown(io.TextIOWrapper(under, encoding="ascii", write_through=True))
    stream.write("step 3 · loss 2\n")
    assert under.getvalue() == b"step 3 ? loss 2\n"

    class Picky(io.StringIO):
        def write(self, text):
            return super().write(text.encode("ascii").decode())

    stream = shown(picky := Picky())
    stream.write("3 · 2")
    assert (picky.getvalue(), stream.lost) == ("3 ? 2", None)


def test_a_stream_that_is_closed_or_not_there_takes_everything():
    closed = io.StringIO()
    closed.close()
    for stream in (shown(closed), shown(None)):
        print("text", file=stream, flush=True)
        assert stream.lost
        assert not stream.isatty()
    assert shown(shown(None)).lost == "there is none"


def test_a_command_has_such_streams_and_the_process_has_its_own_again_afterwards(monkeypatch):
    out, err = Broken(FULL), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    @command()
    def main():
        print("one\ntwo")  # two writes: the text, and its end
        print("three")
        return 7

    assert main() == 7
    assert (sys.stdout, sys.stderr) == (out, err)
    assert err.getvalue() == "not all could be shown: standard output cannot be written: No space left on device\n"


def test_a_reader_that_goes_away_is_nothing_to_tell_about(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    command()(lambda: [print("line") for _ in range(3)])()
    assert capsys.readouterr().err == ""


def test_a_command_that_only_shows_how_something_goes_on_ends_when_nobody_looks(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError(errno.EPIPE, "Broken pipe")))

    @command()
    def main():
        number = 0
        while not terminal.nobody_looks():
            number += 1
            print(number)
        return number

    assert main() == 1
    assert not terminal.nobody_looks()  # a stream of a test, or of a notebook


def test_without_standard_streams_a_command_ends_as_with_them(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)

    @command()
    def main():
        assert not sys.stdout.isatty()
        print("text")
        print("text", file=sys.stderr)
        return 0

    assert main() == 0
    assert sys.stdout is None


def test_each_command_has_streams_that_cannot_fail():
    passes_on = {
        "orchestrator.verify": "orchestrator.faultlab.verify.command",
        "orchestrator.chaos": "orchestrator.faultlab.chaos.command",
    }
    names = ["orchestrator.gangway", *(passes_on.get(command.module, command.module) for command in COMMANDS.values())]
    mains = {name: inspect.getsource(importlib.import_module(name).main) for name in names}
    assert [name for name, source in mains.items() if not re.match(r"@(program\.)?command\([^@]*\)\ndef main\(", source)] == []


def test_an_error_that_its_user_can_mend_is_one_line_and_others_are_none_of_it(capsys):
    @command(OSError, ValueError)
    def main(error):
        raise error

    assert main(ValueError("data.paths = s3://me:pass@bucket/a: it is no list")) == EXIT_REFUSED
    assert main(StorageRefused(errno.EACCES, "the bucket answers no", "s3://bucket/run")) == EXIT_REFUSED
    assert capsys.readouterr().err == (
        "error: data.paths = s3://***@bucket/a: it is no list\nerror: s3://bucket/run: the bucket answers no\n"
    )
    with pytest.raises(KeyError):
        main(KeyError("a mistake"))


LEAVES = """
import atexit, os, signal, sys
from gangway.program import command, leave

@command()
def main():
    return 3

def strike():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
    print("libraries have ended")

atexit.register(strike)
leave(main())
"""


def test_a_signal_while_libraries_end_changes_nothing_of_the_exit_status():
    ran = run([sys.executable, "-c", LEAVES])
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "libraries have ended\n", "")


def test_a_command_that_is_interrupted_says_so(capsys):
    @command(interrupted="interrupted: nothing is written")
    def main():
        raise KeyboardInterrupt

    assert main() == 130
    assert capsys.readouterr().err == "interrupted: nothing is written\n"


def run(command, **how):
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **how)


IN_A_COMMAND = """
import os, subprocess, sys
from gangway.program import command

@command(%s)
def main():
    %s

sys.exit(main())
"""


def exit_status(tmp_path, body, redirection, how=""):
    """Returns the exit status of a command with this body, and what it wrote to standard error."""
    (tmp_path / "program.py").write_text(IN_A_COMMAND % (how, body))
    line = f'"{sys.executable}" program.py {redirection}; exit ${{PIPESTATUS[0]}}'
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = run(["bash", "-c", line], cwd=tmp_path, env={**buffered, "PYTHONPATH": str(ROOT)})
    return done.returncode, done.stderr


TOLD = "not all could be shown: standard output cannot be written: No space left on device\n"
LITTLE, MUCH = "print('a line'); return 7", "print('a line\\n' * 20000); return 7"
OPENS = "file = os.open('file', os.O_CREAT | os.O_WRONLY); print('text', flush=True); os._exit(7 if file > 2 else 1)"
HAS_A_CHILD = "print('a line\\n' * 20000, flush=True); return subprocess.call(['bash', '-c', 'echo from the child'])"


IS_READ = [
    *("orchestrator.runs.status", "orchestrator.runs.history", "orchestrator.runs.compare", "orchestrator.runs.incidents"),
    *("orchestrator.runs.logs", "orchestrator.commands.checkpoints", "orchestrator.plan"),
    *("orchestrator.commands.compile", "orchestrator.commands.completion"),
    *("trainers.commands.data", "trainers.commands.evaluate", "trainers.commands.generate"),
]


@pytest.mark.parametrize("name", IS_READ)
def test_a_command_whose_output_is_read_says_so(name):
    assert "is_read=True" in inspect.getsource(importlib.import_module(name).main).partition("def main")[0]


@pytest.mark.parametrize(
    ("body", "redirection", "expected"),
    [
        ("print('a line'); return 0", ">/dev/full", (1, TOLD)),
        ("print('a line\\n' * 20000); return 0", ">/dev/full", (1, TOLD)),
        ("print('a line'); return 0", "", (0, "")),
        ("print('a line\\n' * 20000); return 0", "| head -n 1", (0, "")),
        ("print('a line'); return 0", ">&-", (0, "")),
        ("print('a line'); return 2", ">/dev/full", (2, TOLD)),
    ],
)
def test_a_command_that_is_read_fails_where_its_output_did_not_arrive(tmp_path, body, redirection, expected):
    assert exit_status(tmp_path, body, redirection, "is_read=True") == expected


@pytest.mark.parametrize(
    ("body", "redirection", "expected"),
    [
        (LITTLE, ">/dev/full", (7, TOLD)),  # all of it is in the buffer until the end
        (MUCH, ">/dev/full", (7, TOLD)),
        (MUCH, "| head -n 1", (7, "")),
        (LITTLE, ">&-", (7, "")),
        (OPENS, "<&- >&- 2>&-", (7, "")),  # no file takes the place of a standard stream
        (HAS_A_CHILD, ">/dev/full", (0, TOLD)),  # it can write, too
    ],
)
def test_the_exit_status_is_that_of_the_command_whatever_becomes_of_its_output(tmp_path, body, redirection, expected):
    assert exit_status(tmp_path, body, redirection) == expected


@pytest.mark.parametrize(
    ("ignored", "leads", "has_terminal", "goes_on"),
    [
        (True, False, True, True),  # nohup
        (False, True, False, True),  # setsid, or a service
        (False, True, True, False),  # the one command of a terminal: `script -c`, `ssh -t`
        (False, False, True, False),  # of a shell in a terminal
        (False, False, False, False),  # started by a program that has no terminal itself
    ],
)
def test_a_closed_terminal_ends_what_was_not_taken_out_of_it(monkeypatch, ignored, leads, has_terminal, goes_on):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if ignored else signal.SIG_DFL)
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid() if leads else 1)
    monkeypatch.setattr(terminal, "_has_terminal", lambda: has_terminal)
    assert ignores(signal.SIGHUP) == goes_on
