"""A run that is over: its command has nothing to do, and says so before Ray is started."""

from __future__ import annotations

import pytest

from gangway.storage import documents
from gangway.storage.object_store import Limits
from gangway.storage.opening import place_of
from orchestrator.commands import launching
from orchestrator.config.job import build, shown
from orchestrator.run_state import outcome, summary
from orchestrator.run_state.outcome import finished_at
from tests.saved import saved
from tests.unit.trainers.checkpoint.test_layout import put
from trainers.checkpoint import layout

SETTINGS = {"max_num_steps": 800, "evaluation": {"max_batches": 4}}


def job(tmp_path, **changes):
    return build({"name": "x", "storage": str(tmp_path), **SETTINGS, **changes})


def finished(storage):
    """Makes a run that has finished at step 800, on a disk or in a bucket."""
    folder = documents.join(str(storage), "x")
    layout.row_of(place_of(folder) / "checkpoints").take_over({})
    put(place_of(folder) / "checkpoints", 800)
    digest = summary.training_digest(shown(job(storage)))
    documents.write_json(documents.join(folder, "summary.json"), {"launch_id": "a", "lineage": None, "training_digest": digest})
    documents.write_json(documents.join(folder, "outcome.json"), {"launch_id": "a", "status": "finished"})


@pytest.fixture
def run_dir(tmp_path):
    finished(tmp_path)
    return tmp_path / "x"


def at(tmp_path, **changes):
    config = job(tmp_path, **changes)
    return finished_at(config.run_dir, shown(config))


def test_the_same_command_has_nothing_to_do(run_dir, tmp_path, monkeypatch, capsys):
    for name in ("connect", "plan_and_connect", "run_job"):
        monkeypatch.setattr(launching, name, None)  # a call fails
    assert launching.launch(job(tmp_path), 0.0) == 0
    assert "x: finished already at step 800: nothing to do" in capsys.readouterr().out
    assert at(tmp_path, hosts={"count": 3}, tracking={"mlflow": False}) == 800


def test_in_a_bucket_it_has_nothing_to_do_either(stores, monkeypatch, capsys):
    stores["gs"].set(monkeypatch)
    finished(storage := stores["gs"].url())
    for name in ("connect", "plan_and_connect", "run_job"):
        monkeypatch.setattr(launching, name, None)  # a call fails
    assert launching.launch(job(storage), 0.0) == 0
    assert "x: finished already at step 800: nothing to do" in capsys.readouterr().out
    assert at(storage, max_num_steps=801) is None


def test_a_bucket_that_does_not_answer_is_for_the_launch(monkeypatch):
    monkeypatch.setattr(outcome, "BRIEFLY", Limits(request_s=0.2, patience_s=0.2))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    assert finished_at("s3://nowhere/runs/x", {"max_num_steps": 800}) is None


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"max_num_steps": 801}, None),
        ({"max_num_steps": 700}, 800),
        ({"seed": 5}, 800),
        ({"max_num_steps": None, "max_num_data_epochs": 2}, None),
    ],
)
def test_what_the_settings_say_now_counts(run_dir, tmp_path, changes, step):
    assert at(tmp_path, **changes) == step


def test_a_run_that_ended_early_is_over_only_for_the_same_settings(run_dir, tmp_path):
    put(place_of(run_dir / "checkpoints"), 900)
    layout.row_of(place_of(run_dir / "checkpoints")).accept_loss({}, [900])
    limit = {"max_num_steps": 5000}
    assert at(tmp_path, **limit) is None
    digest = summary.training_digest(shown(job(tmp_path, **limit)))
    documents.write_json(run_dir / "summary.json", {"launch_id": "a", "lineage": None, "training_digest": digest})
    assert at(tmp_path, **limit) == 800
    assert at(tmp_path, **limit, seed=3) is None


def loses_its_checkpoint(folder):
    saved(folder, 800).rename(folder / "away")


def has_lost_a_later_one(folder):
    put(place_of(folder / "checkpoints"), 900)
    row = layout.row_of(place_of(folder / "checkpoints"))
    row.remove(row.newest().term, [900])


def is_damaged(folder):
    (saved(folder, 800) / "meta.json").write_text("longer or shorter")


def was_stopped(folder):
    documents.write_json(folder / "outcome.json", {"launch_id": "a", "status": "stopped"})


def died_before_its_end(folder):
    documents.write_json(folder / "outcome.json", {"launch_id": "b", "status": "finished"})


def has_a_damaged_outcome(folder):
    (folder / "outcome.json").write_text("\0")


def has_another_document(folder):
    (folder / "summary.json").write_text("[1]")


WRONG = (
    *(loses_its_checkpoint, has_lost_a_later_one, is_damaged, was_stopped, died_before_its_end, has_a_damaged_outcome),
    has_another_document,
)


@pytest.mark.parametrize("change", WRONG)
def test_otherwise_the_launch_finds_out_what_there_is_to_do(run_dir, tmp_path, change):
    change(run_dir)
    assert at(tmp_path) is None


def test_a_new_run_is_not_over(tmp_path):
    assert at(tmp_path) is None
