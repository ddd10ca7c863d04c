"""Copies of runs between folders and buckets: verified, marked until they are whole, and gone on with."""

import time
from pathlib import Path

import pytest

from gangway.storage import identity
from gangway.storage.documents import StorageError
from gangway.storage.opening import place_of
from gangway.storage.row import Row, WriterTerm
from orchestrator.commands import checkpoints
from orchestrator.run_state import incident_log, lines
from orchestrator.run_state import launch as launches
from orchestrator.run_state.incidents import Incident
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.run_state.versions import check_versions
from orchestrator.runs import copying
from orchestrator.tracking.config import TrackingConfig
from tests.programs import checkpointing
from tests.saved import saved
from trainers.checkpoint import copied, layout, manifest


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    layout._rows.clear()


@pytest.fixture
def bucket(stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    return stores["gs"].url()


@pytest.fixture
def place(bucket, tmp_path):
    """A function: the URL of a run of that name in the bucket, or on this disk."""
    return lambda kind, name: f"{bucket}/{name}" if kind == "bucket" else str(tmp_path / "runs" / name)


def driver_of(run_dir, launch_id="again"):
    return launches.open_launch(run_dir, launch_id, time.time(), TrackingConfig(mlflow=False), {}, time.time)


def manager_of(run_dir, driver_term):
    layout._rows.clear()
    manager = checkpointing.manager(f"{run_dir}/checkpoints", term=WriterTerm(driver_term, 0))
    manager.restored = manager.restore(checkpointing.abstract(checkpointing.state(0)))
    return manager


@pytest.fixture
def start(place):
    """A function: makes a run with checkpoints of steps 4 and 8, an incident and a metric; returns its URL and the states."""

    def start(kind, name="a"):
        run_dir = place(kind, name)
        launch = driver_of(run_dir, "launch")
        manager = manager_of(run_dir, 1)
        states = {step: manager.save_now(step) for step in (4, 8)}
        launch.record(Incident(kind="process_crash", host=1, generation=0, step=5, failed_at_s=time.time()))
        assert launch.progress.is_new(8, "train")
        launch.publish(8, {"loss": 2.5})
        launch.saved(8, manager.path(8))
        assert launch.flush(30.0)
        launch.close("FINISHED", 30.0)
        return run_dir, states

    return start


@pytest.mark.parametrize(("kind", "to"), [("disk", "bucket"), ("bucket", "disk"), ("disk", "disk"), ("bucket", "bucket")])
def test_a_copy_goes_on_where_it_is(start, place, kind, to, capsys):
    run_dir, states = start(kind)
    target = place(to, "b")
    assert checkpoints.main([run_dir, "--copy-to", target]) == 0
    assert f"copied {run_dir} to {target}: checkpoints 4, 8;" in capsys.readouterr().out
    check_versions(target)
    launch = driver_of(target)
    assert launch.progress.checkpoint_step == 8
    assert [entry.step for _, entry in launch.progress.earlier_incidents] == [5]
    assert launch.progress.saved_path == str(layout.at(place_of(target) / "checkpoints", 8))
    assert b'"loss": 2.5' in b"\n".join(lines.metrics(place_of(target)))
    assert Row(place_of(target) / "row").newest().term.driver_term == 2
    launch.close("FINISHED", 30.0)
    manager = manager_of(target, 2)
    assert (manager.restored.meta["step"], manager.steps()) == (8, [4, 8])
    assert checkpointing.same(manager.restored.state, states[8])
    manager.save_now(12)
    assert manager_of(target, 3).restored.meta["step"] == 12
    # The run itself is as it was.
    assert manager_of(run_dir, 2).restored.meta["step"] == 8
    assert identity.of(run_dir).id != identity.of(target).id


def test_a_damaged_checkpoint_is_named_and_not_copied(start, place, capsys):
    run_dir, states = start("disk")
    path = layout.at(place_of(run_dir) / "checkpoints", 8)
    file = max((path / name for name in manifest.names_below(path)), key=lambda file: file.size())
    content = bytearray(file.content())
    content[len(content) // 2] ^= 1
    file.put(bytes(content))
    target = place("bucket", "b")
    assert checkpoints.main([run_dir, "--copy-to", target]) == 1
    assert f"checkpoints/{path.name} is not copied: the contents of" in capsys.readouterr().err
    launch = driver_of(target)
    assert (launch.progress.checkpoint_step, launch.progress.saved_path[:-8]) == (4, f"{target}/checkpoints/4-0_0_")
    launch.close("FINISHED", 30.0)
    assert checkpointing.same(manager_of(target, 2).restored.state, states[4])


@pytest.mark.parametrize("to", ["disk", "bucket"])
def test_a_copy_that_was_cut_short_is_no_run_and_is_completed_by_the_same_command(start, place, monkeypatch, capsys, to):
    run_dir, states = start("disk")
    target, real, files = place(to, "b"), copying._copy, []

    def until_it_is_cut(*given):
        if len(files) == 9:
            raise OSError("the machine is gone")
        files.append(given[0].name)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(copying, "_copy", until_it_is_cut)
        assert checkpoints.main([run_dir, "--copy-to", target]) == 2
    for refused in (lambda: check_versions(target), lambda: copied.check_whole(place_of(target))):
        with pytest.raises(StorageError, match=f"is a copy of {run_dir} that is not complete: give the command"):
            refused()
    assert checkpoints.main([target]) == 2
    assert "that is not complete" in capsys.readouterr().err
    other, _ = start("disk", "other")
    assert checkpoints.main([other, "--copy-to", target]) == 2
    assert f"a copy of {run_dir} was begun there" in capsys.readouterr().err
    assert checkpoints.main([run_dir, "--copy-to", target]) == 0
    assert checkpointing.same(manager_of(target, 2).restored.state, states[8])
    assert len(list(RunFolder(target).last_lines(incident_log.NAME))) == 1


def test_a_copy_of_which_only_the_mark_is_left_is_completed_and_nothing_is_recorded_twice(start, place, monkeypatch):
    run_dir, _ = start("disk")
    target = place("bucket", "b")
    assert checkpoints.main([run_dir, "--copy-to", target]) == 0
    copied.KIND.write(place_of(target) / copied.KIND.name, {"source": run_dir})
    monkeypatch.setattr(copying, "_saved", None)  # nothing is copied again
    assert checkpoints.main([run_dir, "--copy-to", target]) == 0
    assert Row(place_of(target) / "row").newest().number == 1
    check_versions(target)


def test_a_place_that_is_in_use_is_refused(start, place, tmp_path, capsys):
    run_dir, _ = start("disk")
    other, _ = start("disk", "b")
    for target, why in (
        (other, "a run is there already"),
        (run_dir, "the run itself is there"),
        (f"{run_dir}/within", "the run itself is there"),
        ("gs://b?x=1/y", "gs://b?x=1/y"),
    ):
        assert checkpoints.main([run_dir, "--copy-to", target]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "runs" / "a" / "within").exists()


def test_a_run_without_a_good_checkpoint_is_not_copied_as_if_it_had_none(start, place, capsys):
    run_dir, _ = start("disk")
    for step in (4, 8):
        (saved(run_dir, step) / "manifest.json").unlink()
    assert checkpoints.main([run_dir, "--copy-to", place("bucket", "b")]) == 2
    assert f"has no good checkpoint to go on from: checkpoints/{saved(run_dir, 8).name} is not copied:" in capsys.readouterr().err


def test_whoever_cannot_read_a_run_cannot_read_its_copy(start, place):
    run_dir, _ = start("disk")
    (Path(run_dir) / "figures").mkdir()
    for name in ("report.html", "figures/loss.png", "launch.json"):
        (Path(run_dir) / name).touch()
        (Path(run_dir) / name).chmod(0o600)
    for folder in (Path(run_dir), Path(run_dir) / "figures"):
        folder.chmod(0o700)
    target = Path(place("disk", "b"))
    assert checkpoints.main([run_dir, "--copy-to", str(target)]) == 0
    for name in ("report.html", "figures/loss.png", "launch.json"):
        assert (target / name).stat().st_mode & 0o777 == 0o600, name
    assert {folder.stat().st_mode & 0o777 for folder in (target, target / "figures")} == {0o700}
