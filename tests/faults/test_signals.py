"""A signal at any moment of a start, of a run that goes on, and of an end: the exit status and the last line are true, and
nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from gangway.storage.opening import place_of
from orchestrator.run_state import outcome
from tests import ROOT, fuzz
from tests.programs.processes import PATIENCE_S, wait_until
from trainers.checkpoint import layout

WINGS = ("orchestrator/commands", "orchestrator/driver/ray_cluster.py", "gangway/program.py")

pytestmark = pytest.mark.slow("starts whole jobs")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PHASES = ("", "reading", "checking", "checking", "reserving", "gang of", "compiling", "step ", "held-out", "finished")
"""Words of the console; none: before its first line. While it checks the model Ray starts, which takes longest."""
LONGEST_DELAY_S = 2.5
IN_SUITE = 3
MARK = "TESTS_OF_SIGNALS"


def struck(command: list[str], env: dict[str, str], number: int, phase: str, delay_s: float) -> tuple[int, list[str]]:
    """Runs a command, and sends it a signal so long after the first line
    that has these words. Returns its exit status and lines."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    lines: list[str] = []
    sent = not phase
    timer = threading.Timer(delay_s, process.send_signal, (number,))
    if sent:
        timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if not sent and phase in line:
            sent = True
            timer.start()
    status = process.wait(PATIENCE_S)
    timer.cancel()
    return status, [line for line in lines if line]


def left_of(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def steps_of(run: Path) -> list[int]:
    return layout.steps(place_of(run) / "checkpoints") if run.exists() else []


def check(status: int, lines: list[str], number: int, before: list[int], saved: list[int]) -> None:
    """Raises AssertionError if the end is not true of what is on the disk."""
    assert max(saved, default=0) >= max(before, default=0)
    if status in (-number, 128 + number):
        assert saved == before
        if status > 0:
            assert lines[-1].startswith("interrupted before anything was trained")
    elif status == outcome.EXIT_STOPPED:
        (line,) = [line for line in lines if line.startswith("stopped ")]
        assert f"saved at {saved[-1]};" in line if saved else "before the first step" in line
    else:
        assert status == outcome.EXIT_FINISHED
        assert any("finished" in line for line in lines)
        assert saved[-1] == 60


def test_each_of_many_signals_has_a_true_end_and_leaves_nothing(tmp_path):
    drawn, folder = random.Random(fuzz.seed(1)), tmp_path / "runs" / "tiny"
    override = [f"storage={tmp_path / 'runs'}", "hosts.count=1", "tracking.mlflow=false"]
    command = [sys.executable, "-m", "orchestrator.run", str(ROOT / "configs" / "tiny.yaml"), *override]
    for case in range(fuzz.count(IN_SUITE)):
        number, phase, delay_s = drawn.choice(SIGNALS), drawn.choice(PHASES), drawn.uniform(0, LONGEST_DELAY_S)
        mark, before = f"{os.getpid()}-{case}-{time.monotonic_ns()}", steps_of(folder)
        status, lines = struck(command, os.environ | {MARK: mark}, number, phase, delay_s)
        try:
            assert wait_until(lambda mark=mark: not left_of(mark)), left_of(mark)
            check(status, lines, number, before, steps_of(folder))
        except AssertionError as error:
            shown = "\n".join(lines[-15:])
            raise AssertionError(f"case {case}: {number.name} {delay_s:.2f} s after {phase!r}: {status}\n{shown}") from error
        if status == outcome.EXIT_FINISHED:
            folder.rename(Path(f"{folder}-{case}"))
