"""A run that begins anew keeps the earlier one, and what is refused leaves all as it was."""

from __future__ import annotations

import pytest

from gangway.storage.documents import StorageError
from gangway.storage.opening import place_of
from gangway.storage.probe import no_folder_if_refused
from gangway.storage.row import Row
from orchestrator.run_state import fresh
from orchestrator.run_state.lease import RunInUse, Time, acquire


def free(run_dir):
    pass


def refused(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("x")
    raise ValueError("no plan")


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "mine"
    acquire(str(folder), "launch", Time()).release()
    (folder / "summary.json").write_text("{}")
    (folder / "checkpoints").mkdir()
    return folder


def test_the_earlier_run_is_moved_and_the_numbers_of_its_drivers_go_on(run):
    before = files(run)
    with fresh.moved_aside(str(run), True, free) as line:
        assert line == f"begins anew: the earlier run is in {run}.before-1"
    assert files(run.with_name("mine.before-1")) == before
    assert (run.with_name("mine.before-1") / "checkpoints").is_dir()
    assert set(files(run)) == {"lease.json", "row/00000001.json"}
    lease = acquire(str(run), "another", Time())
    # A process of it that still trains finds that a later driver has the run.
    assert lease.driver_term == 2
    assert Row(place_of(run) / "row").newest().term.driver_term == 2
    lease.release()
    with fresh.moved_aside(str(run), True, free) as line:
        assert line.endswith("mine.before-2")


def test_an_error_moves_it_back(run):
    before = files(run)
    with pytest.raises(ValueError, match="no plan"), fresh.moved_aside(str(run), True, free):
        raise ValueError("no plan")
    assert files(run) == before
    assert [path.name for path in run.parent.iterdir()] == ["mine"]


def test_what_somebody_has_put_there_meanwhile_stays(run):
    with pytest.raises(ValueError, match="no plan"), fresh.moved_aside(str(run), True, free):
        refused(run, "theirs")
    assert "theirs" in files(run)
    assert "summary.json" in files(run.with_name("mine.before-1"))


def test_a_run_that_is_in_use_or_in_a_bucket_is_not_moved(run):
    def in_use(run_dir):
        raise RunInUse("it is")

    before = files(run)
    with pytest.raises(RunInUse), fresh.moved_aside(str(run), True, in_use):
        pass
    with pytest.raises(StorageError, match=r"--fresh: gs://bucket/run is no folder .* another name"):
        fresh.moved_aside("gs://bucket/run", True, free).__enter__()
    assert files(run) == before


@pytest.mark.parametrize(("asked", "name"), [(False, "mine"), (True, "new")])
def test_without_the_request_or_without_a_run_nothing_is_moved(run, asked, name):
    with fresh.moved_aside(str(run.with_name(name)), asked, free) as line:
        assert line == ""
    assert [path.name for path in run.parent.iterdir()] == ["mine"]
    (run.parent / "new").mkdir()
    assert not fresh.is_begun(str(run.parent / "new"))


def test_a_refused_run_leaves_no_folder(tmp_path):
    folder = tmp_path / "runs" / "new"
    with pytest.raises(ValueError, match="no plan"), no_folder_if_refused(str(folder)):
        refused(folder)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    for names in ((), ("file",)):
        with pytest.raises(ValueError, match="no plan"), no_folder_if_refused(str(folder)):
            refused(folder, *names)
        assert folder.is_dir() == bool(names)
        assert folder.parent.is_dir()  # it was there before
    with no_folder_if_refused("gs://bucket/run"), no_folder_if_refused(str(tmp_path / "stays")):
        (tmp_path / "stays").mkdir()
    assert (tmp_path / "stays").is_dir()
