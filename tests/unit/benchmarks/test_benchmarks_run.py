"""The benchmarks reach into the trainer: nothing else says that they still run."""

import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks import bench, fp8_curve
from tests import ROOT
from tests.programs.processes import PATIENCE_S


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """What one of them compiles, the next one finds. On one device, as by hand: eight in a process of their own have too few
    threads on two cores, and wait for each other for ever."""
    return {
        **os.environ,
        "XLA_FLAGS": "",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.mark.parametrize(
    ("module", "last_line"), [("step_overhead", r"median ratio \d\.\d{3}"), ("everything_on", r"\w+: median \d\.\d{3} of off")]
)
@pytest.mark.slow("runs a whole benchmark")
def test_a_benchmark_runs_to_its_result(module, last_line, env):
    command = [sys.executable, "-m", f"benchmarks.{module}", "configs/tiny.yaml", "--rounds", "1", "--steps", "3"]
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(last_line, done.stdout.splitlines()[-1])


@pytest.mark.slow("runs a whole benchmark")
def test_the_benchmark_of_the_data_runs_to_its_result():
    command = [sys.executable, "-m", "benchmarks.data", "--megabytes", "1", "--lines", "10000", "--sequence-length", "512"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert re.match(r"on the fly +bytes +1\.0 M tokens in +[\d.]+ s: +[\d,]+ tokens/s", lines[1])
    assert re.fullmatch(r"index kept: \d+\.\d\d s, \d+ MB of memory at most, \d+ before", lines[-1])


@pytest.mark.slow("runs a whole benchmark")
def test_the_benchmark_of_8_bits_tells_the_losses_of_three_types(monkeypatch, capsys):
    monkeypatch.setattr(fp8_curve, "MODEL", {**fp8_curve.MODEL, "num_layers": 1, "width": 16, "mlp_width": 24})
    monkeypatch.setattr(sys, "argv", ["fp8_curve", "--steps", "2", "--seeds", "1"])
    fp8_curve.main()
    three = r"\d\.\d{4} \d\.\d{4} \d\.\d{4}"
    first, *differ, seconds = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"seed 1, step 2: loss {three}, eval_loss {three}", first)
    shape = r"seed 1, (float32|fp8): (loss|eval_loss) differs by \d\.\d\d% \(median\), \d\.\d\d% at most"
    assert [bool(re.fullmatch(shape, line)) for line in differ] == [True] * 4
    assert re.fullmatch(r"seed 1: float32 \d+ s, bfloat16 \d+ s, fp8 \d+ s", seconds)


@pytest.mark.slow("runs a whole benchmark")
def test_the_benchmark_of_small_models_tells_the_held_out_loss_of_each(tmp_path, env):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 100)
    command = [sys.executable, "-m", "benchmarks.shakespeare", str(tmp_path / "text.txt"), "--seeds", "1", "--steps", "2"]
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    shape = r"(gpt2|gpt2, own start|llama): \d\.\d{3} \(seeds \d\.\d{3}\), \d+ s; 2: \d\.\d{3}"
    assert len(lines := done.stdout.splitlines()) == 3
    assert all(re.fullmatch(shape, line) for line in lines)


@pytest.mark.parametrize(
    ("ratios", "kept", "slower"),
    [
        ([1.0, 1.01, 1.02, 1.03], 1.0, False),  # within the noise
        ([1.05, 1.06, 1.07, 1.08], 1.0, True),
        ([0.9, 0.95, 1.2, 1.3], 1.0, False),  # the pairs differ more than the row does
        ([1.05, 1.06, 1.07, 1.08], None, False),
    ],
)
def test_a_row_of_the_bench_is_slower_when_its_pairs_say_so_together(ratios, kept, slower):
    row = bench.Row("save", [bench.Pair(0.1, 0.1 * ratio) for ratio in ratios])
    said, found = bench.told(row, kept)
    assert found == slower
    assert said.startswith("save ")
    assert said.endswith(", SLOWER") == slower


@pytest.mark.slow("runs a whole benchmark")
def test_the_bench_takes_turns_with_the_loop_by_hand_and_names_what_is_slower(env, tmp_path, monkeypatch, capsys):
    medians = tmp_path / "medians.json"
    medians.write_text(json.dumps({"step of 2 ms": 0.001, "save": 1000, "recovery": 2}))
    monkeypatch.setattr(bench, "MEDIANS", medians)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert bench.main(["--share", "0.01", "--keep", "step of 2 ms", "save"]) == 1
    line = r"\d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\): [\d,]+\.\d\d ms, theirs [\d,]+\.\d\d ms; it was"
    steps, saves = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"step of 2 ms +{line} 0\.001, SLOWER", steps)
    assert re.fullmatch(rf"save +{line} 1000\.000", saves)
    kept = json.loads(medians.read_text())
    assert kept["step of 2 ms"] > 0.001
    assert kept["save"] < 1000
    assert kept["recovery"] == 2
