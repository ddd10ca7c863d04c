"""The benchmarks reach into the trainer: nothing else says that they still run."""

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT


@pytest.mark.parametrize(
    ("module", "last_line"), [("step_overhead", r"median ratio \d\.\d{3}"), ("everything_on", r"\w+: median \d\.\d{3} of off")]
)
def test_a_benchmark_runs_to_its_result(module, last_line):
    command = [sys.executable, "-m", f"benchmarks.{module}", "configs/tiny.yaml", "--rounds", "1", "--steps", "3"]
    env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(last_line, done.stdout.splitlines()[-1])
