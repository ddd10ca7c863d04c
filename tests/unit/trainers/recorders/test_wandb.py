"""Weights & Biases, offline: what is in its files, one run over restarts, and the end of its service process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from wandb.proto.wandb_internal_pb2 import Record

from gangway.published import Distribution
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About
from trainers.recorders.wandb import SERVICE, WeightsAndBiases

SHAPE = Distribution(0.5, 0.25, 0.0, 1.0, (1, 2, 1))
BLOCK, HEADER = 32 * 1024, 7


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def about(folder) -> About:
    return About("run", str(folder), {"seed": 3})


def files(folder) -> list[Path]:
    return sorted(Path(folder).glob("wandb/offline-run-*/*.wandb"))


def records(path: Path) -> list[Record]:
    """The records of an offline run: a LevelDB log, whose records may be cut at the ends of its blocks."""
    data, found, part = path.read_bytes(), [], b""
    position = HEADER  # of the file; each record has one of the same size: checksum, length, kind
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        part += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(part))
            part = b""
    return found


def history(path: Path) -> list[dict[str, object]]:
    """The rows of an offline run, without W&B's own entries but the step."""
    rows = []
    for record in records(path):
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if name == "_step" or not name.startswith("_")})
    return rows


def services() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == SERVICE]


def test_what_is_published_is_in_the_files_of_the_offline_run(tmp_path):
    notes = []
    made = Recorders(["wandb"], about(tmp_path / "new"), notes.append)
    made.record(10, {"loss": 0.5, "learning_rate": 0.25}, {"params/w": SHAPE})
    made.record(10, {"eval_loss": 0.75})  # an evaluation comes after the training of its step
    made.record(20, {"loss": 0.125})
    made.close(60)
    assert notes == []
    (path,) = files(tmp_path / "new")
    first, second = history(path)
    shape = {"params/w._type": "histogram", "params/w.values": [1, 2, 1], "params/w.bins": pytest.approx([0, 1 / 3, 2 / 3, 1])}
    assert first == {"_step": 10, "loss": 0.5, "learning_rate": 0.25, "eval_loss": 0.75, **shape}
    assert second == {"_step": 20, "loss": 0.125}
    (run,) = [record.run for record in records(path) if record.HasField("run")]
    assert run.display_name == "run"
    assert {item.key: item.value_json for item in run.config.update}["seed"] == "3"


def test_a_restart_goes_on_with_the_same_run(tmp_path):
    for step in (10, 20):
        recorder = WeightsAndBiases(about(tmp_path))
        recorder.record(step, {"loss": 1.0}, {})
        recorder.close()
    made = files(tmp_path)
    assert [row["_step"] for path in made for row in history(path)] == [10, 20]
    ids = {record.run.run_id for path in made for record in records(path) if record.HasField("run")}
    assert len(ids) == 1
    other = WeightsAndBiases(about(tmp_path / "other"))
    other.close()
    (path,) = files(tmp_path / "other")
    assert {record.run.run_id for record in records(path) if record.HasField("run")}.isdisjoint(ids)


def test_an_error_at_a_record_is_reported_and_costs_that_record_alone(tmp_path, monkeypatch):
    from wandb.sdk.wandb_run import Run

    log, notes = Run.log, []

    def failing(self, data, step):
        if step == 10:
            raise OSError("no room")
        log(self, data, step=step)

    monkeypatch.setattr(Run, "log", failing)
    made = Recorders(["wandb"], about(tmp_path), notes.append)
    made.record(10, {"loss": 0.5})
    made.record(20, {"loss": 0.25})
    made.close(60)
    assert notes == [
        "recorder wandb failed: OSError: no room; training goes on, and what is lost is counted",
        "recorder wandb: 1 publishes were not recorded",
    ]
    (path,) = files(tmp_path)
    assert history(path) == [{"_step": 20, "loss": 0.25}]


def test_its_service_ends_with_the_recorder(tmp_path):
    recorder = WeightsAndBiases(about(tmp_path))
    assert len(services()) == 1
    recorder.close()
    assert services() == []


HANGING = """
import sys, time, psutil
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About
made = Recorders(["wandb"], About("run", sys.argv[1], {}), lambda text: print(text, flush=True))
made.record(10, {"loss": 0.5})
made.record(20, {"loss": 0.25})
while made._feeds[0]._waiting or made._feeds[0]._num_recording:
    time.sleep(0.05)
(service,) = psutil.Process().children()
service.suspend()
print(service.pid, flush=True)
made.close(1)
"""


def test_a_service_that_hangs_does_not_keep_the_process_from_ending(tmp_path):
    # To a file: the service inherits it, and a pipe would be read until the service ends too.
    with (tmp_path / "output").open("w") as output:
        done = subprocess.run(
            [sys.executable, "-c", HANGING, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )
    text = (tmp_path / "output").read_text()
    assert done.returncode == 0, text
    pid = int(text.splitlines()[0])
    try:
        assert "recorder wandb was not closed in time" in text
        assert "Traceback" not in text
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    finally:
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()
