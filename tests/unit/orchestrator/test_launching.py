"""The start of a run: what goes on side by side, and what is left when it goes wrong; the signals that stop it."""

import errno
import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from gangway import program, terminal
from orchestrator import run as command_of_run
from orchestrator.commands import launching
from orchestrator.config.job import ConfigError, build
from orchestrator.planning import report
from orchestrator.reporting.board import Board
from orchestrator.run_state import outcome
from tests.programs.processes import PATIENCE_S


class Console:
    def __init__(self):
        self.shown, self.closed = [], 0

    def show(self, event):
        self.shown.append(event)

    def close(self):
        self.closed += 1


@pytest.fixture
def job(tmp_path):
    return build({"name": "x", "max_num_steps": 1, "storage": str(tmp_path)})


@pytest.fixture
def happened(monkeypatch):
    """What happened, in order. Ray and the child process are stood in for: both take seconds."""
    happened = []

    class Plan:
        answer: object = "the plan"

        def __init__(self, config):
            happened.append("the child is started")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            happened.append("the child is ended")

        def report(self):
            happened.append("its answer is waited for")
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

    monkeypatch.setattr(report, "start", Plan)
    monkeypatch.setattr(report, "answered", lambda config, plan: plan.report())
    monkeypatch.setattr(launching, "connect", lambda config: happened.append("Ray is started") or True)
    monkeypatch.setattr(launching, "import_ray_train", lambda: happened.append("Ray Train is imported"))
    monkeypatch.setattr(launching, "disconnect", lambda: happened.append("Ray is ended"))
    return happened


BESIDE = ["the child is started", "Ray is started", "Ray Train is imported", "its answer is waited for"]


def test_the_plan_is_worked_out_while_ray_starts(job, happened):
    console = Console()
    assert launching.plan_and_connect(job, console) == ("the plan", True)
    assert happened == [*BESIDE, "the child is ended"]
    assert console.shown == [{"ev": "status", "state": "checking"}]


def test_what_is_wrong_ends_ray_and_the_console_before_it_is_reported(job, happened, monkeypatch, capsys):
    monkeypatch.setattr(report.start, "answer", ConfigError("x", ["no such column"]))
    console = Console()
    monkeypatch.setattr(launching, "make_console", lambda *given, **named: console)
    monkeypatch.setattr(launching, "load", lambda path, overrides: job)
    assert launching.run("x.yaml", [], began_s=0.0) == outcome.EXIT_REFUSED
    assert happened == [*BESIDE, "Ray is ended", "the child is ended"]
    assert console.closed == 1
    assert "no such column" in capsys.readouterr().err
    assert not Path(job.run_dir).exists()  # nothing is left of what was refused


def test_a_disk_that_fails_at_the_start_is_a_line_and_no_traceback(monkeypatch, capsys):
    def load(path, overrides):
        raise OSError(errno.EIO, "Input/output error", "/runs/a")

    monkeypatch.setattr(launching, "load", load)
    assert launching.run("x.yaml", [], began_s=0.0) == outcome.EXIT_REFUSED
    assert capsys.readouterr().err == "error: [Errno 5] Input/output error: '/runs/a'\n"


BEFORE = "interrupted before anything was trained; what earlier launches of the run have saved is as it was\n"


def test_a_sigterm_that_ray_takes_is_an_interruption_and_another_exit_is_none(monkeypatch, capsys):
    monkeypatch.setattr(launching, "load", Mock(side_effect=[SystemExit(signal.SIGTERM), SystemExit(3)]))
    assert command_of_run.main(["x.yaml"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == BEFORE
    with pytest.raises(SystemExit):
        command_of_run.main(["x.yaml"])


def test_somebody_who_interrupts_the_start_gets_a_line_and_no_traceback(job, happened, monkeypatch, capsys):
    monkeypatch.setattr(report.start, "answer", KeyboardInterrupt())
    console = Console()
    monkeypatch.setattr(launching, "make_console", lambda *given, **named: console)
    monkeypatch.setattr(launching, "load", lambda path, overrides: job)
    assert command_of_run.main(["x.yaml"]) == 130
    assert "Ray is ended" in happened
    assert capsys.readouterr().err == BEFORE


# ---------------------------------------------------------------------- signals


def asked(board):
    """Waits for the thread that a handler has started."""
    deadline_s = time.monotonic() + PATIENCE_S
    while board.stop_requested() is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return board.stop_requested()


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_PYTHON = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)


@pytest.fixture
def of_a_terminal(monkeypatch):
    monkeypatch.setattr(terminal, "ignores", lambda number: False)


@pytest.mark.usefixtures("of_a_terminal")
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "interrupted")]
)
def test_each_signal_asks_for_a_stop_and_the_handlers_of_before_come_back(tmp_path, monkeypatch, number, reason):
    monkeypatch.setattr(threading, "Timer", lambda *given: threading.Thread(target=lambda: None))
    before = [signal.getsignal(each) for each in SIGNALS]
    with terminal.handling(launching.Relay(board := Board(), str(tmp_path), "here").on_signal, *SIGNALS):
        signal.raise_signal(number)
        assert asked(board) == reason
        signal.raise_signal(signal.SIGHUP)  # a service manager sends it after SIGTERM: once is enough
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_at_the_start_is_ignored_to_the_end(tmp_path, number):
    """Without a terminal, as under `nohup`; behind `&` in a script."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with program.interruptible():
            signal.raise_signal(number)
        with terminal.handling(launching.Relay(board := Board(), str(tmp_path), "here").on_signal, *SIGNALS):
            signal.raise_signal(number)
            signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert board.stop_requested() is None


def test_a_signal_after_the_end_of_the_board_raises_nothing(tmp_path):
    class Gone(Board):
        def request_stop(self, reason, *, wait=True):
            raise ConnectionError

    launching.Relay(Gone(), str(tmp_path), "here")._request_stop("interrupted")


@pytest.mark.usefixtures("of_a_terminal")
@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_interrupts_the_start_and_nothing_is_left_of_it(job, happened, monkeypatch, capsys, number):
    monkeypatch.setattr(program, "ignores", lambda number: False)
    monkeypatch.setattr(report.start, "report", lambda plan: os.kill(os.getpid(), number))
    monkeypatch.setattr(launching, "make_console", lambda *given, **named: Console())
    monkeypatch.setattr(launching, "load", lambda path, overrides: job)
    before = [signal.signal(each, handler) for each, handler in zip(SIGNALS, OF_PYTHON, strict=True)]
    try:
        assert command_of_run.main(["x.yaml"]) == 128 + number
        assert tuple(signal.getsignal(each) for each in SIGNALS) == OF_PYTHON
    finally:
        for each, handler in zip(SIGNALS, before, strict=True):
            signal.signal(each, handler)
    assert "Ray is ended" in happened
    assert capsys.readouterr().err.endswith(BEFORE)


def test_the_file_that_has_the_output_of_the_hosts_is_named_unless_it_is_shown(job):
    line = launching.where_printed(job)
    assert line.startswith("what the hosts print (print, logging) is in ")
    assert f"{job.run_dir}/logs; driver.console_hosts=all" in line
    shown = build({"name": "x", "max_num_steps": 1, "driver": {"console_hosts": "all"}, "storage": job.training.storage})
    assert launching.where_printed(shown) == ""


def test_a_dry_run_that_would_begin_anew_says_where_the_earlier_run_goes(job, monkeypatch):
    plan = report.PlanReport(
        num_hosts=1,
        devices_per_host=1,
        mesh=dict.fromkeys(("data", "fsdp", "expert", "tensor"), 1),
        continues={"step": 3, "notes": ["goes on"]},
    )
    monkeypatch.setattr(report, "check", lambda config: plan)
    assert "begins anew" not in launching.dry_run(job, begin_anew=True)  # there is none
    Path(job.run_dir, "checkpoints").mkdir(parents=True)
    shown = launching.dry_run(job, begin_anew=True)
    assert shown.splitlines()[-1] == f"# begins anew       {job.run_dir} is moved to {job.run_dir}.before-1"
    assert "seed: 0" not in shown
    assert "seed: 0" in launching.dry_run(job, begin_anew=True, everything=True)
