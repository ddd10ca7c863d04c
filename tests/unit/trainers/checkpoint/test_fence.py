"""Who may commit: the latest driver, and of its generations the latest. Where nobody can tell, nobody."""

import errno
import os

import pytest

from gangway.storage.row import Record
from tests.programs import checkpointing
from trainers.checkpoint import fence, layout, manifest
from trainers.checkpoint.commit import Commit
from trainers.checkpoint.fence import NO_DRIVER, WriterTerm


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "driver_terms").mkdir()
    return tmp_path / "checkpoints"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(fence, "RETRY_S", 0.0)


def generation(folder, number, driver_term=1):
    """The manager of another process, which has restored what there is."""
    manager = checkpointing.manager(folder, term=WriterTerm(driver_term, number))
    manager.follow_fence(str(folder.parent / "driver_terms" / f"{driver_term + 1:06}.json"))
    manager.restored = manager.restore(checkpointing.abstract(checkpointing.state(0)))
    return manager


def failing(call, number, times=10**9):
    left = iter(range(times))

    def fails(*arguments, **how):
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return call(*arguments, **how)

    return fails


def test_an_error_is_a_fence(folder, monkeypatch):
    path = str(folder.parent / "driver_terms" / "000002.json")
    assert fence.fenced(path, folder, NO_DRIVER) == ""
    monkeypatch.setattr(os, "listdir", failing(os.listdir, errno.EIO))
    assert "it is not known whether another driver has this run" in fence.fenced(path, folder, NO_DRIVER)
    assert "Input/output error" in fence.fenced(path, folder, NO_DRIVER)


def test_storage_that_is_gone_is_a_fence(folder):
    (folder.parent / "driver_terms").rmdir()
    assert "No such file or directory" in fence.fenced(str(folder.parent / "driver_terms" / "000002.json"), folder, NO_DRIVER)


def test_any_later_driver_is_a_fence_also_where_a_document_between_is_missing(folder):
    path = str(folder.parent / "driver_terms" / "000002.json")
    for name in ("000001.json", "000002.json.abc.tmp"):
        (folder.parent / "driver_terms" / name).touch()
    assert fence.fenced(path, folder, NO_DRIVER) == ""
    (folder.parent / "driver_terms" / "000003.json").touch()  # empty: its driver is just writing it
    assert "000003.json exists" in fence.fenced(path, folder, NO_DRIVER)


def test_absence_is_never_asked_for_by_name(folder, monkeypatch):
    """A client of a file server remembers for a while that a name was absent."""
    path = str(folder.parent / "driver_terms" / "000002.json")
    (folder.parent / "driver_terms" / "000002.json").touch()
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(os, "stat", failing(os.stat, errno.ENOENT))
    assert "000002.json exists" in fence.fenced(path, folder, NO_DRIVER)


@pytest.mark.parametrize(("times", "fenced"), [(2, False), (100, True)], ids=["for a moment", "for long"])
def test_an_error_in_the_background_is_tried_again(folder, monkeypatch, times, fenced):
    path = str(folder.parent / "driver_terms" / "000002.json")
    monkeypatch.setattr(os, "listdir", failing(os.listdir, errno.ESTALE, times))
    assert bool(fence.with_patience(lambda: fence.fenced(path, folder, NO_DRIVER))) == fenced


def test_a_generation_that_was_thought_dead_commits_nothing_beside_the_next(folder):
    old = generation(folder, 0)
    old.save_now(4)
    new = generation(folder, 1)
    old.save_now(8)
    assert old.saved == [4]
    assert "a later generation has claimed" in old.failed[0][1]
    assert "(driver term 1, generation 1; this is driver term 1, generation 0)" in old.failed[0][1]
    new.save_now(8)
    assert new.saved == [8]
    assert fence.claims(folder) == [WriterTerm(1, 1)]


def test_a_claim_that_comes_while_saving_is_seen_before_anything_is_committed(folder, monkeypatch):
    old, write = generation(folder, 0), manifest.write
    old.save_now(4)

    def slow(folder_, content):
        write(folder_, content)
        fence.claim(folder, WriterTerm(1, 1))

    monkeypatch.setattr(manifest, "write", slow)
    old.save_now(8)
    assert old.saved == [4]
    assert checkpointing.names(folder) == ["4"]


def test_the_term_is_in_the_names_of_what_is_being_written_and_in_the_checkpoint(folder, monkeypatch):
    manager, names = generation(folder, 3, driver_term=2), []
    describe = Commit._describe
    monkeypatch.setattr(Commit, "_describe", lambda self, told: names.append(self.work.name) or describe(self, told))
    manager.save_now(4)
    assert names[0].startswith("4.saving-2_3_")
    assert layout.on_the_way(folder) == []
    assert manifest.read_meta(folder / "4")["term"] == [2, 3]


def frozen_save(monkeypatch, folder, manager, step):
    """Commits as a process of before there was a row does, that was frozen after it had looked at the fence for the last time."""
    with monkeypatch.context() as patched:
        patched.setattr(fence, "fenced", lambda *about: "")
        patched.setattr(manager._owner._row, "newest", Record)
        patched.setattr(manager._owner._row, "commit", lambda *about: None)
        manager.save_now(step, course="old")


def test_between_the_last_look_and_the_commit_there_is_no_gap(folder, monkeypatch):
    old = generation(folder, 0)
    old.save_now(4)
    new = generation(folder, 1)
    monkeypatch.setattr(fence, "fenced", lambda *about: "")
    look, asleep = old._owner._row.newest, [True]
    # It looks, sleeps while a later generation works, and goes on to commit.
    monkeypatch.setattr(old._owner, "fenced", lambda: (asleep and asleep.pop() and new.save_now(6) and "") or "")
    old.save_now(8)
    assert look().of("checkpoints").keys() == {4, 6}
    assert (old.saved, new.saved, checkpointing.names(folder)) == ([4], [6], ["4", "6"])
    assert "the run belongs to driver term 1, generation 1 since record" in old.failed[0][1]


def test_what_was_recorded_is_whole_for_the_next_generation_though_its_writer_sleeps_before_it_renames(folder, monkeypatch):
    old = generation(folder, 0)
    old.save_now(4)
    put_in_place, read = layout.put_in_place, []

    def sleeps(work, final, *, replace):
        if final.name == "8" and not read:
            read.append(None)  # the later generation renames it itself
            read.append(generation(folder, 1).restored.meta["step"])
        put_in_place(work, final, replace=replace)

    monkeypatch.setattr(layout, "put_in_place", sleeps)
    old.save_now(8)
    assert read == [None, 8]
    assert checkpointing.names(folder) == ["4", "8"]


def test_what_was_written_and_not_recorded_does_not_count(folder, monkeypatch):
    old = generation(folder, 0)
    old.save_now(4)

    def dies(*about):
        raise OSError(errno.EIO, "the process dies here")

    monkeypatch.setattr(old._owner._row, "commit", dies)
    old.save_now(8)
    assert any(path.name.startswith("8.saving-1_0_") for path in layout.on_the_way(folder))  # nobody can tell: it stays
    new = generation(folder, 1)
    assert new.restored.meta["step"] == 4
    new.save_now(8)
    assert layout.on_the_way(folder) == []


def test_a_generation_that_another_driver_takes_over_commits_for_that_one(folder):
    manager = generation(folder, 3)
    manager.save_now(4)
    row = manager._owner._row
    row.take_over({"hostname": "another"})
    manager.save_now(8)
    assert "the run belongs to driver term 2, generation 0 on another" in manager.failed[0][1]
    manager.follow_fence(str(folder.parent / "driver_terms" / "000003.json"))  # as that driver orders
    manager.save_now(8)
    assert manager.saved == [4, 8]
    assert row.newest().term == (2, 3)


def test_a_process_without_a_driver_takes_the_run_from_another_one(folder):
    first, second = checkpointing.manager(folder), checkpointing.manager(folder)
    first.save_now(4)
    second.restore(checkpointing.abstract(checkpointing.state(0)))
    first.save_now(8)
    assert (first.saved, second.saved) == ([4], [])
    assert "the run belongs to driver term 2" in first.failed[0][1]
    second.save_now(8)
    assert second.saved == [8]


def test_what_was_committed_too_late_is_passed_over_for_the_later_generation(folder, monkeypatch):
    old = generation(folder, 0)
    old.save_now(4)
    new = generation(folder, 1)
    new.save_now(6)
    frozen_save(monkeypatch, folder, old, 8)
    assert old.saved == [4, 8]
    third = generation(folder, 2)
    assert third.restored.meta["step"] == 6
    third.save_now(8, course="new")
    assert third.saved == [8]
    assert generation(folder, 3).restored.meta["course"] == "new"


def test_what_was_committed_too_late_makes_way(folder, monkeypatch):
    old = generation(folder, 0)
    old.save_now(4)
    new = generation(folder, 1)
    frozen_save(monkeypatch, folder, old, 8)
    new.save_now(8, course="new")
    assert new.failed == []
    assert generation(folder, 2).restored.meta["course"] == "new"


def test_a_later_generations_checkpoint_is_not_replaced(folder, monkeypatch):
    old = generation(folder, 0)
    for step in (4, 8):
        old.save_now(step)
    old.restore(checkpointing.abstract(checkpointing.state(0)), before=4)  # it would replace 8 now
    new = generation(folder, 1)
    new._course.superseded.add(8)
    new._course.last_saved_step = 4
    new.save_now(8, course="new")
    frozen_save(monkeypatch, folder, old, 8)
    assert "was saved by a later generation (driver term 1, generation 1)" in old.failed[0][1]
    assert generation(folder, 2).restored.meta["course"] == "new"


def test_without_a_driver_the_newest_is_the_newest(folder):
    """A run goes on without its driver, and its documents may have been deleted: nothing that was saved since is passed over."""
    driven = generation(folder, 2, driver_term=7)
    driven.save_now(4)
    alone = checkpointing.manager(folder)
    alone.restore(checkpointing.abstract(checkpointing.state(0)))
    alone.save_now(8)
    assert generation(folder, 0, driver_term=8).restored.meta["step"] == 8
