"""Whose the checkpoints are: the latest driver's, and of its generations the latest one's. Those that were committed and are not
visible are the storage's fault: nothing begins at step 0."""

import errno
import os
import shutil

import pytest

from gangway.errors import CheckpointUnavailableError, kind_of
from gangway.storage import row
from gangway.storage.opening import place_of
from gangway.storage.row import Row, WriterTerm
from tests.programs import checkpointing
from tests.unit.training import trainer
from trainers import runtime
from trainers.checkpoint import layout, manifest, ownership
from trainers.checkpoint.commit import Commit


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(ownership, "RETRY_S", 0.0)


@pytest.fixture
def folder(tmp_path):
    """Of a run with checkpoints of steps 4 and 8."""
    folder = tmp_path / "run" / "checkpoints"
    manager = checkpointing.manager(folder)
    for step in (4, 8):
        manager.save_now(step)
    return folder


@pytest.fixture
def empty(tmp_path):
    return tmp_path / "run" / "checkpoints"


def restore(folder, ordered_step=None, **conditions):
    manager = checkpointing.manager(folder, ordered_step=ordered_step)
    return manager.restore(checkpointing.abstract(checkpointing.state(0)), **conditions)


def generation(folder, number, driver_term=1):
    """The manager of another process, which has restored what there is."""
    layout._rows.clear()
    manager = checkpointing.manager(folder, term=WriterTerm(driver_term, number))
    manager.restored = manager.restore(checkpointing.abstract(checkpointing.state(0)))
    return manager


def row_of(folder) -> Row:
    return layout.row_of(place_of(folder))


def failing(call, times=10**9):
    left = iter(range(times))

    def fails(*arguments, **how):
        if next(left, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "row")
        return call(*arguments, **how)

    return fails


# ---------------------------------------------------------------------- what was committed, and is not there


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
        restore(folder, 8)
    assert not folder.parent.exists()


def test_an_empty_folder_under_a_mount_point_is_no_beginning(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(CheckpointUnavailableError, match="none is there"):
        restore(folder)


def test_none_as_new_as_what_was_committed_is_no_place_to_go_on_from(folder):
    shutil.rmtree(checkpointing.at(folder, 8))
    lost = r"checkpoint 8 of this run was committed, and is not in .*: the newest there is 4"
    with pytest.raises(CheckpointUnavailableError, match=lost):
        restore(folder)


def test_one_that_is_damaged_has_been_seen(folder):
    (checkpointing.at(folder, 8) / "meta.json").unlink()
    restored = restore(folder, 8)
    assert (restored.meta["step"], restored.skipped) == (4, [{"step": 8, "why": "meta.json is missing"}])


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
    with pytest.raises(CheckpointUnavailableError, match="checkpoint 8 of this run was committed"):
        restore(folder)


def test_checkpoints_may_be_copied_to_a_new_run(folder, tmp_path):
    new = tmp_path / "new" / "checkpoints"
    shutil.copytree(folder, new)
    assert restore(new).meta["step"] == 8
    manager = checkpointing.manager(new)
    manager.restore(checkpointing.abstract(checkpointing.state(0)))
    manager.save_now(9)
    assert row_of(new).newest().step == 9
    assert restore(new, 9).meta["step"] == 9


def test_a_run_of_a_version_without_a_row_is_refused_and_its_weights_may_be_taken(folder):
    newest = checkpointing.at(folder, 8)
    shutil.rmtree(folder.parent / "row")
    newest.rename(folder / "8")
    with pytest.raises(CheckpointUnavailableError, match=r"too old to go on from: .*init_from\.path=.*/8"):
        restore(folder)
    assert manifest.read(layout.named(folder / "8")).step == 8


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
    assert f"{folder} is gone: bring the storage back" in manager.failed[0][1]
    assert os.listdir(folder) == []
    folder.rmdir()
    folder.with_name("away").rename(folder)
    manager.save_now(12)
    assert manager.saved == [9, 12]


def test_no_save_goes_to_a_disk_without_the_row_of_its_run(folder):
    manager = checkpointing.manager(folder)
    manager.restore(checkpointing.abstract(checkpointing.state(0)))
    manager.save_now(9)
    folder.parent.rename(folder.parent.with_name("away"))
    folder.mkdir(parents=True)
    manager.save_now(12)
    assert manager.saved == [9]
    assert "it is gone: bring the storage back" in manager.failed[0][1]
    assert os.listdir(folder.parent) == ["checkpoints"]


def test_whoever_deletes_checkpoints_of_a_run_that_trains_does_not_stop_its_saves(folder):
    manager = checkpointing.manager(folder)
    manager.restore(checkpointing.abstract(checkpointing.state(0)))
    manager.save_now(9)
    for step in (4, 8, 9):
        shutil.rmtree(checkpointing.at(folder, step))
    manager.save_now(12)
    assert (manager.saved, manager.failed) == ([9, 12], [])


def test_a_trainer_is_reported_by_its_orders(tmp_path, events):
    runtime.install(runtime.Runtime(events.append, committed_step=4))
    with pytest.raises(CheckpointUnavailableError, match="checkpoint 4 of this run was committed"):
        trainer(tmp_path).train()


def test_a_run_without_checkpoints_begins_and_needs_no_room(tmp_path, events, monkeypatch):
    monkeypatch.setattr(layout, "no_room", lambda folder, num_bytes: "no room")
    runtime.current().retry_for_s = 0
    made = trainer(tmp_path, checkpoint={"save_steps": None, "save_at_end": False}, max_num_steps=2)
    made.train()
    assert made.output.checkpoint_path is None
    assert not (tmp_path / "run" / "checkpoints").exists()


# ---------------------------------------------------------------------- whose they are


def test_where_nobody_can_tell_nothing_is_committed(empty, monkeypatch):
    manager = generation(empty, 0)
    manager.save_now(4)
    monkeypatch.setattr(Row, "newest", failing(Row.newest))
    assert "it is not known whether another driver has this run" in manager._owner.fenced()
    assert "Input/output error" in manager._owner.fenced()
    manager.save_now(8)
    assert manager.saved == [4]


@pytest.mark.parametrize(("times", "saved"), [(2, [4, 8]), (100, [4])], ids=["for a moment", "for long"])
def test_an_error_in_the_background_is_tried_again(empty, monkeypatch, times, saved):
    manager = generation(empty, 0)
    manager.save_now(4)
    monkeypatch.setattr(Row, "commit", failing(Row.commit, times))
    manager.save_now(8)
    assert manager.saved == saved


@pytest.mark.parametrize("overtaken", [False, True], ids=["tried again", "then overtaken"])
def test_a_commit_whose_answer_was_lost_counts_once(empty, monkeypatch, overtaken):
    manager, commit, taken = generation(empty, 0), Row.commit, []
    manager.save_now(4)

    def loses_its_answer(of_run, *record):
        replaced = commit(of_run, *record)
        if not taken:
            taken.append(checkpointing.take_over(empty) if overtaken else 1)
            raise OSError(errno.EIO, os.strerror(errno.EIO), "row")
        return replaced

    monkeypatch.setattr(Row, "commit", loses_its_answer)
    manager.save_now(8)
    assert (manager.saved, manager.failed) == ([4, 8], [])
    assert checkpointing.names(empty) == ["4", "8"]
    assert generation(empty, 0, driver_term=3).restored.meta["step"] == 8


def test_a_generation_that_was_thought_dead_commits_nothing_beside_the_next(empty):
    old = generation(empty, 0)
    old.save_now(4)
    new = generation(empty, 1)
    old.save_now(8)
    assert old.saved == [4]
    assert "the run belongs to driver term 1, generation 1 since record" in old.failed[0][1]
    assert "; this is driver term 1, generation 0" in old.failed[0][1]
    assert (old.overtaken(), new.overtaken()) == (old.failed[0][1], "")
    new.save_now(8)
    assert new.saved == [8]


def test_so_it_is_where_nothing_was_saved_yet(empty):
    old = generation(empty, 0)
    new = generation(empty, 1)
    old.save_now(4)
    assert (old.saved, new.restored) == ([], None)


def test_a_claim_that_comes_while_saving_is_seen_before_anything_is_committed(empty, monkeypatch):
    old, write = generation(empty, 0), manifest.write
    old.save_now(4)

    def slow(place, content):
        digest = write(place, content)
        row_of(empty).claim(WriterTerm(1, 1))
        return digest

    monkeypatch.setattr(manifest, "write", slow)
    old.save_now(8)
    assert old.saved == [4]
    assert checkpointing.names(empty) == ["4"]


def test_the_term_is_in_the_names_of_what_is_being_written_and_of_the_checkpoint(empty, monkeypatch):
    manager, names = generation(empty, 3, driver_term=2), []
    describe = Commit._describe
    monkeypatch.setattr(Commit, "_describe", lambda self, told: names.append(self.work.name) or describe(self, told))
    manager.save_now(4)
    assert names[0].startswith("4-2_3_")
    assert layout.unfinished(place_of(empty)) == []
    assert layout.writer_of(layout.at(place_of(empty), 4).name) == (2, 3)


def test_between_the_last_look_and_the_commit_there_is_no_gap(empty, monkeypatch):
    old = generation(empty, 0)
    old.save_now(4)
    new, document = [], row._document

    def sleeps(record):
        """It has looked, sleeps while a later generation works, and goes on to commit."""
        if record.what == "commit" and record.term == (1, 0) and not new:
            new.append(generation(empty, 1))
            new[0].save_now(6)
        return document(record)

    monkeypatch.setattr(row, "_document", sleeps)
    old.save_now(8)
    assert row_of(empty).newest().of("checkpoints").keys() == {4, 6}
    assert (old.saved, new[0].saved, checkpointing.names(empty)) == ([4], [6], ["4", "6"])
    assert "the run belongs to driver term 1, generation 1 since record" in old.failed[0][1]


def test_what_was_written_and_not_recorded_does_not_count(empty, monkeypatch):
    old = generation(empty, 0)
    old.save_now(4)
    monkeypatch.setattr(old._owner._row, "commit", failing(None))
    old.save_now(8)
    assert [step for step, _ in layout.unfinished(place_of(empty))] == [8]  # nobody can tell: it stays
    new = generation(empty, 1)
    assert new.restored.meta["step"] == 4
    new.save_now(8)
    assert layout.unfinished(place_of(empty)) == []


def test_a_generation_that_another_driver_takes_over_commits_for_that_one(empty):
    manager = generation(empty, 3)
    manager.save_now(4)
    driver_term = checkpointing.take_over(empty)
    manager.save_now(8)
    assert "the run belongs to driver term 2, generation 0 on elsewhere" in manager.failed[0][1]
    manager.follow_driver(driver_term)  # as that driver orders
    manager.save_now(8)
    assert manager.saved == [4, 8]
    assert row_of(empty).newest().term == (2, 3)


def test_a_process_without_a_driver_takes_the_run_from_another_one(empty):
    first, second = checkpointing.manager(empty), checkpointing.manager(empty)
    first.save_now(4)
    second.restore(checkpointing.abstract(checkpointing.state(0)))
    first.save_now(8)
    assert (first.saved, second.saved) == ([4], [])
    assert "the run belongs to driver term 2" in first.failed[0][1]
    second.save_now(8)
    assert second.saved == [8]


def test_without_a_driver_the_newest_is_the_newest(empty):
    """A run goes on without its driver, and its documents may have been deleted: nothing that was saved since is passed over."""
    driven = generation(empty, 2, driver_term=7)
    driven.save_now(4)
    alone = checkpointing.manager(empty)
    alone.restore(checkpointing.abstract(checkpointing.state(0)))
    alone.save_now(8)
    assert generation(empty, 0, driver_term=9).restored.meta["step"] == 8
