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


def test_the_benchmark_of_the_data_runs_to_its_result():
    command = [sys.executable, "-m", "benchmarks.data", "--megabytes", "1", "--lines", "10000", "--sequence-length", "64"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert re.match(r"on the fly +bytes +1\.0 M tokens in +[\d.]+ s: +[\d,]+ tokens/s", lines[1])
    assert re.fullmatch(r"index kept: \d+\.\d\d s, \d+ MB of memory at most, \d+ before", lines[-1])
