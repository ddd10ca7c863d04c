"""Kept executables that crash the process which loads them: as real processes meet them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import ROOT
from tests.programs.processes import PATIENCE_S

WINGS = ("trainers/runtime",)


def start(folder, *when):
    """(exit status, what it printed)"""
    command = [sys.executable, "-m", "tests.programs.crashing", str(folder), *when]
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONFAULTHANDLER")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=PATIENCE_S, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


@pytest.mark.parametrize("when", ["load", "use"])
@pytest.mark.slow("starts the processes of several hosts")
def test_a_crash_while_it_is_tried_makes_the_next_process_compile(tmp_path, when):
    folder = tmp_path / "programs"
    assert start(folder) == (0, {"answer": [2, 2, 2], "notes": [], "traces": 1})
    assert start(folder, when)[0] == -signal.SIGSEGV
    status, told = start(folder)
    assert (status, told["answer"], told["traces"]) == (0, [2, 2, 2], 1)
    assert "a process crashed while it was tried (Segmentation fault)" in told["notes"][0]
    assert len(list(folder.glob("*.xla"))) == 1
