"""`--dry-run` as a user calls it: real processes, no Ray, no device."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.programs.processes import PATIENCE_S

WINGS = ("orchestrator/planning", "trainers/planning", "orchestrator/run.py")

SMALL = "{vocab_size: 256, width: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, mlp_width: 48}"


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 200)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"max_num_steps: 4\nstorage: {tmp_path}/runs\nmodel: {SMALL}\nhosts: {{count: 2}}\n"
        f"data: {{paths: [{text}], sequence_length: 32}}\n"
    )
    return path


def dry_run(config: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "orchestrator.run", str(config), *overrides, "--dry-run"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.slow("starts the processes of several hosts")
def test_it_prints_what_would_run_and_leaves_nothing_behind(config, tmp_path):
    done = dry_run(config, "seed=7")
    assert done.returncode == 0, done.stderr
    assert "\nseed: 7\n" in done.stdout
    assert "# devices           2 hosts x 1 = 2\n" in done.stdout
    assert "# tokens a step     16 sequences x 32 = 512\n" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "job.yaml"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learnig_rate=1", "optimizer.learnig_rate: unknown key (found 1); did you mean optimizer.learning_rate?"),
        ("data.paths=[/nowhere]", "data.paths: '/nowhere' does not exist"),
        ("data.sequence_length=100000", "expected at least 100001: data.sequence_length = 100000"),
    ],
)
@pytest.mark.slow("starts the processes of several hosts")
def test_it_refuses_what_cannot_run(config, override, message):
    done = dry_run(config, override)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_planning_touches_no_device(config):
    program = (
        "import sys; from jax._src import xla_bridge; from trainers import run; from trainers.planning import estimate\n"
        "problems, facts = estimate.plan(run.read(sys.argv[1]), 2)\n"
        "assert problems == [] and facts['parameters'], problems\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    named = config.with_name("named.yaml")
    named.write_text(config.read_text() + "name: job\n")
    done = subprocess.run(
        [sys.executable, "-c", program, str(named)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
