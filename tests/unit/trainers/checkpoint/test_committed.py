"""Checkpoints that were committed and are not visible: the storage is to blame, and nothing begins at step 0."""

import os
import shutil

import pytest

from gangway.errors import CheckpointUnavailableError, kind_of
from tests.programs import checkpointing
from tests.unit.training import trainer
from trainers import runtime
from trainers.checkpoint import committed
from trainers.checkpoint.committed import Committed


@pytest.fixture
def folder(tmp_path):
    """Of a run with checkpoints of steps 4 and 8."""
    folder = tmp_path / "run" / "checkpoints"
    manager = checkpointing.manager(folder)
    for step in (4, 8):
        manager.save_now(step)
    return folder


def restore(folder, ordered=committed.NOTHING, **conditions):
    manager = checkpointing.manager(folder, ordered=ordered)
    return manager.restore(checkpointing.abstract(checkpointing.state(0)), **conditions)


def forget(folder):
    for place in (folder, folder.parent):
        (place / committed.FILE).unlink(missing_ok=True)


def test_a_folder_that_is_gone_is_no_beginning(folder):
    shutil.rmtree(folder)
    with pytest.raises(CheckpointUnavailableError) as error:
        restore(folder)
    message = str(error.value)
    assert message.startswith(f"checkpoint 8 of this run was committed, and is not in {folder}: there is no such folder; bring ")
    assert message.endswith(f"python -m orchestrator.commands.checkpoints {folder.parent} --accept-loss")
    assert kind_of(error.value) == {"kind": "storage", "deterministic": False}


def test_what_the_driver_knows_holds_where_no_record_is_left(folder):
    shutil.rmtree(folder.parent)
    assert restore(folder) is None
    with pytest.raises(CheckpointUnavailableError, match="checkpoint 8 of this run was committed"):
        restore(folder, Committed("run", 8))
    assert not folder.parent.exists()


def test_an_empty_folder_under_a_mount_point_is_no_beginning(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(CheckpointUnavailableError, match="it is empty"):
        restore(folder)


def test_the_record_beside_the_checkpoints_is_enough(folder):
    """The driver's documents and the run folder's record are deleted, and so are the checkpoints."""
    (folder.parent / committed.FILE).unlink()
    for step in ("4", "8"):
        shutil.rmtree(folder / step)
    with pytest.raises(CheckpointUnavailableError, match="checkpoint 8 of this run"):
        restore(folder)


def test_none_as_new_as_what_was_committed_is_no_place_to_go_on_from(folder):
    shutil.rmtree(folder / "8")
    lost = r"checkpoint 8 of this run was committed, and is not in .*: the newest there is 4"
    with pytest.raises(CheckpointUnavailableError, match=lost):
        restore(folder)


def test_one_that_is_damaged_has_been_seen(folder):
    (folder / "8" / "meta.json").unlink()
    restored = restore(folder, Committed(None, 8))
    assert (restored.meta["step"], restored.skipped) == (4, [{"step": 8, "why": "meta.json is missing"}])


def test_one_that_was_making_way_for_another_has_been_seen(folder):
    os.rename(folder / "8", folder / "8.replaced-dead")
    assert restore(folder).meta["step"] == 4


def test_a_rollback_finds_the_storage_gone(folder):
    manager = checkpointing.manager(folder)
    abstract = checkpointing.abstract(checkpointing.state(0))
    manager.restore(abstract)
    folder.rename(folder.with_name("away"))
    with pytest.raises(CheckpointUnavailableError, match="there is no such folder"):
        manager.restore(abstract, before=4)


def test_a_rollback_that_abandons_what_is_newer_is_no_loss(folder):
    manager = checkpointing.manager(folder, keep=2)
    manager.restore(checkpointing.abstract(checkpointing.state(0)), before=4)
    for step in (5, 6, 7):
        manager.save_now(step)
    assert restore(folder, accept=lambda meta: "abandoned" if meta["step"] == 8 else "").meta["step"] == 7
    assert restore(folder, accept=lambda meta: "abandoned") is None


def test_a_folder_of_another_run_is_not_gone_on_from(folder, tmp_path):
    other = tmp_path / "other" / "checkpoints"
    checkpointing.manager(other).save_now(100)
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    with pytest.raises(CheckpointUnavailableError, match="belongs to another run"):
        restore(folder)


def test_checkpoints_may_be_copied_to_a_new_run(folder, tmp_path):
    new = tmp_path / "new" / "checkpoints"
    shutil.copytree(folder, new)
    assert restore(new, Committed("new", None)).meta["step"] == 8
    manager = checkpointing.manager(new, ordered=Committed("new", None))
    manager.restore(checkpointing.abstract(checkpointing.state(0)))
    manager.save_now(9)
    assert committed.read(new) == committed.read(new.parent) == Committed("new", 9)
    assert restore(new, Committed("new", 9)).meta["step"] == 9


def test_checkpoints_of_older_versions_have_no_record_and_get_one(folder):
    forget(folder)
    manager = checkpointing.manager(folder, ordered=Committed("run", 8))
    assert manager.restore(checkpointing.abstract(checkpointing.state(0))).meta["step"] == 8
    manager.save_now(9)
    assert committed.read(folder) == Committed("run", 9)


def test_a_record_that_cannot_be_read_says_that_there_was_something(folder):
    (folder.parent / committed.FILE).unlink()
    (folder / committed.FILE).write_text("{")
    assert restore(folder).meta["step"] == 8
    for step in ("4", "8"):
        shutil.rmtree(folder / step)
    with pytest.raises(CheckpointUnavailableError, match=r"committed\.json cannot be read"):
        restore(folder)


def test_a_record_that_is_right_is_not_written_again_before_a_save(folder, monkeypatch):
    """Training waits for what comes before a save."""
    manager, write, written = checkpointing.manager(folder), committed.write, []
    manager.restore(checkpointing.abstract(checkpointing.state(0)))
    monkeypatch.setattr(committed, "write", lambda place, record: written.append(record.step) or write(place, record))
    manager.save_now(9)
    assert written == [9, 9]
    (folder / committed.FILE).write_text("{")
    again = checkpointing.manager(folder)
    again.restore(checkpointing.abstract(checkpointing.state(0)))
    again.save_now(10)
    assert written == [9, 9, 9, 10, 10]


def test_no_save_makes_a_folder_anew_that_was_there_before(folder):
    """The run goes on with a state that was given to it: nothing was restored."""
    shutil.rmtree(folder)
    manager = checkpointing.manager(folder)
    manager.save_now(12)
    assert manager.saved == []
    assert "checkpoint 8 of this run was committed" in manager.failed[0][1]
    assert not folder.exists()


def test_no_save_goes_under_a_mount_point_whose_storage_has_gone(folder):
    manager = checkpointing.manager(folder)
    manager.restore(checkpointing.abstract(checkpointing.state(0)))
    manager.save_now(9)
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    manager.save_now(12)
    assert manager.saved == [9]
    assert f"{committed.FILE} is gone: bring the storage back" in manager.failed[0][1]
    assert os.listdir(folder) == []
    folder.rmdir()
    folder.with_name("away").rename(folder)
    manager.save_now(12)
    assert manager.saved == [9, 12]


def test_a_trainer_is_reported_by_its_orders(tmp_path, events):
    runtime.install(runtime.Runtime(events.append, run="run", committed_step=4))
    with pytest.raises(CheckpointUnavailableError, match="checkpoint 4 of this run was committed"):
        trainer(tmp_path).train()


def test_a_run_without_checkpoints_begins(tmp_path, events):
    made = trainer(tmp_path, checkpoint={"save_steps": None, "save_at_end": False}, max_num_steps=2)
    made.train()
    assert made.output.checkpoint_path is None
    assert not (tmp_path / "run" / "checkpoints").exists()
