"""`python -m orchestrator.commands.checkpoints`: what it says of which folder, and its exit status."""

import json
import shutil
import subprocess
import sys

import pytest

from gangway.errors import CheckpointUnavailableError
from gangway.program import EXIT_REFUSED
from gangway.storage import documents
from gangway.storage.opening import place_of
from gangway.storage.row import Kept
from orchestrator.commands import checkpoints
from orchestrator.run_state import lease
from tests.programs import checkpointing
from tests.saved import saved
from trainers.checkpoint import layout


@pytest.fixture
def run_dir(tmp_path):
    """Two checkpoints of a run."""
    manager = checkpointing.manager(tmp_path / "job" / "checkpoints")
    lineage = [{"batch_index": 0, "num_hosts": 2, "num_devices": 8, "mesh": {}}]
    for step in (4, 8):
        manager.save_now(step, lineage=lineage, skipped_batches=[3] if step == 8 else [])
    return tmp_path / "job"


def ask(capsys, *arguments):
    """(exit status, rows)"""
    status = checkpoints.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def row_of(run_dir):
    return layout.row_of(place_of(run_dir) / "checkpoints")


def commit(run_dir, step):
    """Records a checkpoint that is not there."""
    row_of(run_dir).commit(row_of(run_dir).newest().term, step, Kept(f"{step}-9_0_00000000", ""))


def check(run_dir):
    layout.check(place_of(run_dir) / "checkpoints", row_of(run_dir).newest(), None)


def arrays_of(run_dir, step):
    return max((saved(run_dir, step) / "state").rglob("*"), key=lambda path: path.stat().st_size)


def flip_last_byte(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_it_lists_what_there_is(run_dir, capsys):
    status, rows = ask(capsys, run_dir)
    assert status == checkpoints.EXIT_FINE
    assert [(row["step"], row["state"], row["why"], row["num_hosts"]) for row in rows] == [
        (4, "whole", [], 2),
        (8, "whole", [], 2),
    ]
    assert rows[1]["skipped_batches"] == [3]
    assert rows[0]["num_bytes"] > 1000
    assert ask(capsys, run_dir, "--verify")[1][0]["state"] == "verified"


def test_scores_are_shown_and_the_best_and_the_newest_are_marked(run_dir, capsys, monkeypatch):
    manager = checkpointing.manager(run_dir / "checkpoints")
    rules = {"evaluation": {"score": {"metrics": ["eval_loss"], "lower_better": None}}}
    for step, score in ((12, 0.25), (16, 0.125), (20, 0.5)):
        manager.save_now(step, scores={"step": step, "score": score, "metrics": ["eval_loss"]}, arguments=rules)
    _, rows = ask(capsys, run_dir)
    assert [(row["step"], row["score"], row["marks"]) for row in rows] == [
        (12, 0.25, []),
        (16, 0.125, ["best"]),
        (20, 0.5, ["newest"]),
    ]
    monkeypatch.setenv("COLUMNS", "200")
    checkpoints.main([str(run_dir)])
    lines = capsys.readouterr().out.splitlines()
    assert {"16", "best", "0.1250"} <= {*lines[-2].split()}
    best = row_of(run_dir).newest().of("checkpoints")[16]
    row_of(run_dir).remove(row_of(run_dir).newest().term, [16])
    row_of(run_dir).commit(row_of(run_dir).newest().term, 16, best, "models")
    (run_dir / "models").mkdir()
    (run_dir / "checkpoints" / best.folder).rename(run_dir / "models" / best.folder)
    _, rows = ask(capsys, run_dir)
    assert [(row["step"], row["state"], row["marks"]) for row in rows[1:]] == [(20, "whole", ["newest"]), (16, "model", ["best"])]


def test_people_get_a_table(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (run_dir / "checkpoints" / "9-1_0_0000abcd").mkdir()
    assert checkpoints.main([str(run_dir)]) == checkpoints.EXIT_FINE
    shown = capsys.readouterr().out
    assert "2x8@0" in shown
    assert "unfinished: being saved" in shown


def test_a_flipped_byte_of_large_arrays_is_found_by_verifying(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(checkpoints.manifest, "SMALL_BYTES", 100)
    flip_last_byte(arrays_of(run_dir, 4))
    assert [row["state"] for row in ask(capsys, run_dir)[1]] == ["whole", "whole"]
    status, rows = ask(capsys, run_dir, "--verify")
    assert status == checkpoints.EXIT_DAMAGED
    assert [row["state"] for row in rows] == ["damaged", "verified"]
    assert "are not those that were saved" in rows[0]["why"][0]


@pytest.mark.parametrize(("name", "state", "status"), [("meta.json", "damaged", 1), ("manifest.json", "incomplete", 0)])
def test_a_missing_document_is_named(run_dir, capsys, name, state, status):
    (saved(run_dir, 8) / name).unlink()
    found, rows = ask(capsys, run_dir)
    assert (found, [row["state"] for row in rows]) == (status, ["whole", state])
    assert rows[1]["why"]


def test_a_changed_manifest_is_damage(run_dir, capsys):
    flip_last_byte(saved(run_dir, 8) / "meta.json")
    path = saved(run_dir, 4) / "manifest.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 5'))
    assert [row["state"] for row in ask(capsys, run_dir)[1]] == ["damaged", "damaged"]


def test_a_configuration_names_its_run(run_dir, tmp_path, capsys):
    config = tmp_path / "job.yaml"
    config.write_text(f"storage: {tmp_path}\ndata: {{paths: [{__file__}]}}\nmax_num_steps: 9\n")
    assert [row["step"] for row in ask(capsys, config)[1]] == [4, 8]
    assert checkpoints.main([str(config), "name=other"]) == EXIT_REFUSED
    assert "was not started yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "message"), [(True, "is not a run's folder: expected one with checkpoints/"), (False, "there is no")]
)
def test_what_is_no_run_is_refused(tmp_path, capsys, made, message):
    folder = tmp_path / "x"
    if made:
        folder.mkdir()
    assert checkpoints.main([str(folder)]) == EXIT_REFUSED
    assert message in capsys.readouterr().err


def test_a_run_that_has_not_saved_yet_has_none(tmp_path, capsys):
    (tmp_path / "launch.json").write_text("{}")
    assert checkpoints.main([str(tmp_path)]) == checkpoints.EXIT_FINE
    assert "no checkpoint in" in capsys.readouterr().out


def test_what_was_committed_and_is_not_there_is_an_error_with_the_way_out(run_dir, capsys):
    shutil.rmtree(saved(run_dir, 8))
    (_, rows), (status, _) = ask(capsys, run_dir), (checkpoints.main([str(run_dir)]), None)
    told = capsys.readouterr()
    assert status == checkpoints.EXIT_DAMAGED
    assert [row["step"] for row in rows if row["state"] == "whole"] == [4]
    assert (
        f"error: checkpoint 8 of this run was committed, and is not in {run_dir}/checkpoints: the newest there is 4; " in told.err
    )
    shutil.rmtree(run_dir / "checkpoints")
    assert checkpoints.main([str(run_dir)]) == checkpoints.EXIT_DAMAGED
    told = capsys.readouterr()
    assert "no checkpoint in" not in told.out  # "yet" is not true of it
    assert "there is no such folder; bring the storage back" in told.err


def test_it_runs_as_a_command_without_jax(run_dir):
    code = "import sys; from orchestrator.commands.checkpoints import main; sys.exit(main(sys.argv[1:]) or 'jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(run_dir)], check=True)


def test_a_loss_is_accepted_by_saying_so(run_dir, capsys):
    """Until then the run does not go on without what it had committed."""
    folder = run_dir / "checkpoints"
    progress = {"generations": 1, "drivers": 1, "high_water_step": 12, "saved_path": None, "checkpoint_step": 12}
    clocks = {
        "goodput": {"started_at_s": 0.0, "counted_to_s": 1.0, "category": "step", "seconds": {}},
        "time_used": {"seconds": 0.0, "counted_to_s": None},
    }
    seen = {"published": {"train": 12, "eval": -1}, "seen": {"generation": None, "events": []}}
    documents.write_json(run_dir / "launch.json", {"launch_id": "a", "committed_step": 12, **progress, **clocks, **seen})
    commit(run_dir, 12)
    with pytest.raises(CheckpointUnavailableError, match="--accept-loss"):
        check(run_dir)
    assert checkpoints.main([str(run_dir), "--accept-loss"]) == checkpoints.EXIT_FINE
    assert documents.read_json(run_dir / "launch.json")["committed_step"] == 8
    check(run_dir)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointUnavailableError, match="--accept-loss"):
        check(run_dir)
    assert checkpoints.main([str(run_dir), "--accept-loss"]) == checkpoints.EXIT_FINE
    check(run_dir)
    assert not folder.exists()


def test_no_loss_is_accepted_while_the_run_goes_on(run_dir, capsys):
    held = lease.acquire(str(run_dir), "a")
    commit(run_dir, 12)
    assert checkpoints.main([str(run_dir), "--accept-loss"]) == EXIT_REFUSED
    held.release()
    assert "is in use" in capsys.readouterr().err
    assert row_of(run_dir).newest().step == 12
