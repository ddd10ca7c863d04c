"""Recorders: what reaches them, in which order, what becomes of those that stall or fail, and of steps that come twice."""

from __future__ import annotations

import json
import math
import threading
import time

import pytest

from gangway.published import Distribution
from tests.programs.processes import PATIENCE_S
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.recorders.dispatch import Recorders
from trainers.recorders.jsonl import JsonLines, read
from trainers.recorders.recorder import About
from trainers.recorders.tensorboard import TensorBoard

SHAPE = Distribution(0.5, 0.25, 0.0, 1.0, (1, 2, 1))


class Kept:
    """Keeps what it is given, by its class and the folder of its run."""

    made: dict[tuple[str, str], Kept] = {}  # noqa: RUF012

    def __init__(self, about):
        self.given, self.closed = [], False
        Kept.made[type(self).__name__, about.folder] = self

    def record(self, step, metrics, distributions):
        self.given.append((step, dict(metrics), dict(distributions)))

    def close(self):
        self.closed = True


class Failing(Kept):
    def record(self, step, metrics, distributions):
        if step != 3:
            raise OSError(f"no room for {step}")
        super().record(step, metrics, distributions)


class Stalling(Kept):
    began, go_on = threading.Event(), threading.Event()

    def record(self, step, metrics, distributions):
        self.began.set()
        self.go_on.wait()
        super().record(step, metrics, distributions)


def about(tmp_path):
    return About("run", str(tmp_path), {"seed": 0})


def made_for(folder, kind="Kept"):
    return Kept.made[kind, str(folder)]


def feeds(tmp_path, *names, **options):
    notes = []
    return Recorders([f"{__name__}:{name}" for name in names], about(tmp_path), notes.append, **options), notes


def test_what_is_published_reaches_a_recorder_in_order(tmp_path):
    made, notes = feeds(tmp_path, "Kept")
    made.record(1, {"loss": 2.0, "text": "no number"})
    made.record(2, {"loss": 1.0}, {"params/w": list(SHAPE)})  # as it comes out of JSON
    made.close()
    kept = made_for(tmp_path)
    assert kept.given == [(1, {"loss": 2.0}, {}), (2, {"loss": 1.0}, {"params/w": SHAPE})]
    assert kept.closed
    assert notes == []


def test_one_that_raises_is_reported_once_and_its_losses_at_the_end(tmp_path):
    made, notes = feeds(tmp_path, "Failing")
    for step in (1, 2, 3):
        made.record(step, {"loss": 1.0})
    made.close()
    assert [step for step, *_ in made_for(tmp_path, "Failing").given] == [3]
    assert len(notes) == 2
    assert "Failing failed: OSError: no room for 1; training goes on" in notes[0]
    assert notes[1].endswith("Failing: 2 publishes were not recorded")


def test_one_that_stalls_holds_nobody_up_and_keeps_the_newest(tmp_path):
    Stalling.began.clear()
    Stalling.go_on.clear()
    made, notes = feeds(tmp_path, "Stalling", kept_publishes=3)
    for step in range(1, 9):
        made.record(step, {"loss": 1.0})
        assert Stalling.began.wait(PATIENCE_S)  # its thread has taken the first
    made.close(timeout_s=0.2)
    assert "is too slow" in notes[0]
    assert notes[1].endswith("8 publishes were not recorded")
    Stalling.go_on.set()
    deadline = time.monotonic() + PATIENCE_S
    while not made_for(tmp_path, "Stalling").closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [step for step, *_ in made_for(tmp_path, "Stalling").given] == [1, 6, 7, 8]


def test_one_does_not_hinder_another(tmp_path):
    Stalling.go_on.clear()
    made, _ = feeds(tmp_path, "Stalling")
    made.record(1, {"loss": 1.0})
    other, notes = feeds(tmp_path / "other", "Failing", "Kept")
    other.record(1, {"loss": 1.0})
    other.close()
    assert len(notes) == 2
    assert made_for(tmp_path / "other").given == [(1, {"loss": 1.0}, {})]
    Stalling.go_on.set()
    made.close()


def test_a_recorder_that_cannot_be_made_is_reported(tmp_path):
    made, notes = feeds(tmp_path, "NotThere")
    made.record(1, {"loss": 1.0})
    made.close()
    assert "has no 'NotThere'" in notes[0]
    assert notes[1].endswith("1 publishes were not recorded")


def test_json_lines_hold_each_number_once_over_restarts(tmp_path):
    first = JsonLines(about(tmp_path))
    first.record(10, {"loss": 2.0}, {"params/w": SHAPE})
    first.record(20, {"loss": math.nan}, {})
    first.record(20, {"eval_loss": 1.5}, {})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"t": 1, "step": 30, "metr')  # killed here
    again = JsonLines(about(tmp_path))
    for step in (10, 20, 30):
        again.record(step, {"loss": 7.0}, {"params/w": SHAPE})
    again.close()
    lines = list(read(tmp_path / "metrics.jsonl"))
    assert [(line["step"], line["metrics"]) for line in lines] == [
        (10, {"loss": 2.0}),
        (20, {"loss": None}),
        (20, {"eval_loss": 1.5}),
        (20, {}),
        (30, {"loss": 7.0}),
    ]
    assert lines[0]["distributions"]["params/w"] == {"mean": 0.5, "std": 0.25, "min": 0.0, "max": 1.0, "counts": [1, 2, 1]}


def test_tensorboard_shows_scalars_and_histograms_and_voids_what_comes_again(tmp_path):
    first = TensorBoard(about(tmp_path))
    first.record(10, {"loss": 2.0}, {"params/w": SHAPE})
    first.close()
    again = TensorBoard(about(tmp_path))
    again.record(8, {"loss": 3.0}, {})
    again.close()
    files = [
        list(events(path)) for path in sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    ]
    loss, shape = [event.summary.value[0] for event in files[0] if event.summary.value]
    assert (loss.tag, loss.simple_value) == ("loss", 2.0)
    assert shape.tag == "params/w"
    assert (shape.histo.min, shape.histo.max, shape.histo.num, shape.histo.sum) == (0.0, 1.0, 4, 2.0)
    assert list(shape.histo.bucket) == [1, 2, 1]
    assert shape.histo.bucket_limit[-1] == 1.0
    start = [event for event in files[1] if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in start] == [
        (8, 1)
    ]  # SessionLog.START: steps from here on are void


def events(path):
    """Of a file of TensorBoard's: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data = path.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def arguments(**changes):
    return from_dict(TrainingArguments, {"name": "run", "max_num_steps": 1, **changes})


def test_a_name_that_is_none_is_refused_with_the_likely_one():
    with pytest.raises(ValueError, match=r"'tensorbord': expected one of jsonl, .*did you mean tensorboard\?"):
        arguments(recorders=["tensorbord"])
    with pytest.raises(ValueError, match="each once"):
        arguments(recorders=["jsonl", "jsonl"])
    with pytest.raises(ValueError, match="jsonl append to files, which gs://bucket cannot do"):
        arguments(recorders=["jsonl"], storage="gs://bucket")


def test_a_recorder_whose_package_is_missing_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"'wandb' needs the package wandb, which is not installed: pip install 'gangway\[wandb\]'"
    ):
        arguments(recorders=["wandb"])


def test_alone_the_same_recorders_are_fed(tmp_path, capfd, monkeypatch):
    from trainers.commands import run

    config = tmp_path / "own.yaml"
    config.write_text(
        json.dumps(
            {
                "storage": str(tmp_path),
                "task": "tests.programs.tiny:TableTask",
                "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"},
                "max_num_steps": 4,
                "publish_every_steps": 2,
                "recorders": ["jsonl", "tensorboard", f"{__name__}:Kept"],
            }
        )
    )
    monkeypatch.setattr("sys.argv", ["run", str(config)])
    assert run.main() == 0
    folder = tmp_path / "own"
    assert [(line["step"], "loss" in line["metrics"]) for line in read(folder / "metrics.jsonl")] == [
        (2, True),
        (4, True),
        (4, False),
    ]
    assert [step for step, *_ in made_for(folder).given] == [2, 4, 4]
    assert list((folder / "tensorboard").iterdir())
    assert "  step 4/4  loss" in capfd.readouterr().out
