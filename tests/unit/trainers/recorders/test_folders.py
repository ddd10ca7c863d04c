"""Where recorders write: the folders of the settings, also after a restart."""

import json

import pytest

from tests.unit.training import arguments, trainer
from trainers.callbacks.profiler import Profiler
from trainers.commands import run
from trainers.recorders.dispatch import Recorders
from trainers.recorders.jsonl import read
from trainers.recorders.recorder import About


def train(tmp_path, monkeypatch, steps, **changes):
    config = tmp_path / "own.yaml"
    settings = {
        "storage": str(tmp_path / "runs"),
        "task": "tests.programs.tiny:TableTask",
        "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"},
        "max_num_steps": steps,
        "publish_every_steps": 2,
    }
    config.write_text(json.dumps({**settings, **changes}))
    monkeypatch.setattr("sys.argv", ["run", str(config)])
    assert run.main() == 0


@pytest.mark.slow("trains twice")
def test_a_run_writes_where_it_is_reported_and_goes_on_there(tmp_path, monkeypatch):
    absolute = tmp_path / "logs" / "tensorboard"
    folders = {"jsonl": "numbers/train", "tensorboard": str(absolute)}
    for steps in (4, 6):
        train(tmp_path, monkeypatch, steps, recorders=["jsonl", "tensorboard"], recorder_folders=folders)
    folder = tmp_path / "runs" / "own"
    lines = [line["step"] for line in read(folder / "numbers" / "train" / "metrics.jsonl") if "loss" in line["metrics"]]
    assert lines == [2, 4, 6]
    assert len(list(absolute.iterdir())) == 2  # a file for each start
    assert not (folder / "metrics.jsonl").exists()
    assert not (folder / "tensorboard").exists()


@pytest.mark.slow("starts W&B")
def test_weights_and_biases_write_there_and_stay_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    about = About("run", str(tmp_path / "run"), {})
    for folders in ({}, {"wandb": "elsewhere"}):
        made = Recorders(["wandb"], about, print, folders=folders)
        made.record(1, {"loss": 1.0})
        made.close(60)
    names = [
        [path.stem for path in (tmp_path / "run" / folder).glob("wandb/offline-run-*/*.wandb")] for folder in (".", "elsewhere")
    ]
    assert len(names[0]) == 1
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"recorder_folders": {"jsonl": "a"}}, r"recorder_folders\.jsonl: expected one of recorders \(none\)"),
        ({"recorders": ["jsonl"], "recorder_folders": {"json": "a"}}, r"recorder_folders\.json: .*; did you mean jsonl\?"),
        (
            {"recorders": ["jsonl"], "recorder_folders": {"jsonl": ""}},
            r"recorder_folders\.jsonl = '': expected a folder",
        ),
        ({"recorders": ["jsonl"], "recorder_folders": {"jsonl": "gs://a"}}, r"= 'gs://a': expected a folder, relative"),
        (
            {"recorders": ["jsonl"], "recorder_folders": {"jsonl": "a"}, "storage": "gs://a"},
            r"jsonl append to files, which gs://a",
        ),
    ],
)
def test_folders_that_make_no_sense(tmp_path, changes, error):
    with pytest.raises(ValueError, match=error):
        arguments(tmp_path, **changes)


def test_with_storage_that_cannot_append_an_absolute_folder_will_do(tmp_path):
    made = arguments(tmp_path, storage="gs://a", recorders=["jsonl"], recorder_folders={"jsonl": "/logs"})
    assert made.recorder_folders == {"jsonl": "/logs"}


@pytest.mark.parametrize(("folder", "where"), [("traces", "run/traces"), ("{}/far", "far"), (None, "run/profile")])
def test_profiles_are_written_where_they_are_reported(tmp_path, folder, where):
    settings = {} if folder is None else {"folder": folder.format(tmp_path)}
    made = trainer(tmp_path, profile=settings)
    (profiler,) = [callback for callback in made.callbacks.callbacks if isinstance(callback, Profiler)]
    assert profiler.folder == str(tmp_path / where)


@pytest.mark.parametrize("folder", ["", "gs://a"])
def test_a_folder_for_profiles_is_a_folder(tmp_path, folder):
    with pytest.raises(ValueError, match=f"folder = '{folder}': expected a folder, relative"):
        arguments(tmp_path, profile={"folder": folder})
