"""`gangway.launch` as a user calls it: from a program, whose own classes and functions the hosts import."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_until
from tests.saved import saved
from tests.strikes import Folder
from tests.unit.documents import blocks

WINGS = ("orchestrator/library.py", "orchestrator/commands/launched.py", "orchestrator/shipped", "trainers/library.py")

pytestmark = pytest.mark.slow("trains under a Ray of its own")


def start(path, **env):
    """A user's program, in its folder. It imports this project as an installed one."""
    with (path.parent / "out.txt").open("w") as out:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        return subprocess.Popen([sys.executable, path.name], cwd=path.parent, env=env, stdout=out, stderr=subprocess.STDOUT)


def test_a_program_of_the_documents_trains_on_two_hosts_also_when_one_is_killed(tmp_path):
    (block,) = [block for block in blocks("python") if block.file_name == "on_hosts.py"]
    program = tmp_path / "on_hosts.py"
    faults = Folder(tmp_path / "faults")
    faults.order(1, "kill", at=120)
    assert "hosts=2," in block.text
    hosts = {"count": 2, "env": {"GANGWAY_FAULTS": str(faults.path)}}
    program.write_text(block.text.replace("hosts=2,", f"hosts={hosts!r},"))
    process = start(program)
    try:
        status = process.wait(PATIENCE_S)
    finally:
        process.kill()
    told = (tmp_path / "out.txt").read_text()
    assert status == 0, told
    assert "host 1: training process ended by SIGKILL" in told
    last = told.splitlines()[-1]
    assert last.startswith("Result(steps=300, loss=")
    assert last.endswith("stop_reason=max_steps)")
    folder = tmp_path / "runs" / "net"
    summary = json.loads((folder / "summary.json").read_text())
    assert [incident["host"] for incident in summary["incidents"]] == [1]
    assert summary["lineage"][-1]["num_hosts"] == 2
    assert summary["samples"] == 300 * 40
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row["metrics"]] == list(range(10, 301, 10))
    assert float(last.split("loss=")[1].split(",")[0]) < 0.01


def test_ctrl_c_saves_and_the_result_says_so_and_a_mistake_in_a_thread_is_reported_with_its_line(tmp_path):
    program = tmp_path / "my_program.py"
    program.write_text((ROOT / "tests" / "programs" / "launching.py").read_text())
    process = start(program)
    try:
        wait_until(lambda: process.poll() is not None or saved(tmp_path / "runs" / "slow", 5).exists())
        process.send_signal(signal.SIGINT)
        status = process.wait(PATIENCE_S)
    finally:
        process.kill()
    told = (tmp_path / "out.txt").read_text()
    assert status == 0, told
    assert "refused: mistaken: 1 problem" in told
    assert re.search(r'my_program.py, line \d+, in mistaken: return model\(batch\["nothing"\]\)', told)
    words = told.splitlines()[-1].split()
    steps, slope = int(words[0].removeprefix("Result(steps=").rstrip(",")), float(words[words.index("slope") + 1])
    assert "stop_reason=interrupted)" in words
    assert 5 <= steps < 100_000
    # Of the newest checkpoint, which the run has saved at its end.
    assert int(words[words.index("step") + 1]) == steps
    assert int(words[-1]) == steps
    assert 0 < slope < 2
    assert (tmp_path / "told.txt").read_text().split() == [str(step) for step in range(1, steps + 1)]
