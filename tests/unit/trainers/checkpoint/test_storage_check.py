"""Storage that hangs: who asks it does not wait for longer than it wants, and a late answer is not lost."""

import threading

import pytest

from tests.programs import checkpointing
from tests.unit.training import trainer
from trainers.checkpoint import layout
from trainers.checkpoint.ownership import FRESH_S, StorageCheck
from trainers.trainer.training_run import TrainingRun

LONG_S = 60.0


class Hanging:
    """A question that is answered when the test says so."""

    def __init__(self, answer=""):
        self.answer, self.asked, self.released = answer, 0, threading.Event()

    def __call__(self, *_):
        self.asked += 1
        assert self.released.wait(LONG_S)
        return self.answer


def wait_for_answer(check):
    assert check._pending.done.wait(LONG_S)


def test_an_answer_in_time_is_handed_on():
    check = StorageCheck()
    assert check.ask(lambda: "", LONG_S) == ""
    assert check.ask(lambda: "no room", None) == "no room"
    with pytest.raises(OSError, match="away"):
        check.ask(lambda: (_ for _ in ()).throw(OSError("away")), LONG_S)
    assert check.ask(lambda: "", LONG_S) == ""


def test_without_an_answer_nobody_waits_and_no_second_question_is_asked():
    check, hanging = StorageCheck(), Hanging()
    assert "the storage has not answered for 0 s" in check.ask(hanging, 0.01)
    assert "the storage has not answered" in check.ask(lambda: "another question", 0.01)
    hanging.released.set()
    assert check.ask(lambda: "another question", LONG_S) == ""
    assert (hanging.asked, check.ask(lambda: "another question", LONG_S)) == (1, "another question")


@pytest.mark.parametrize(("age_s", "expected"), [(FRESH_S, "late"), (FRESH_S + 1, "new")])
def test_a_late_answer_counts_while_it_is_fresh(age_s, expected):
    now = [0.0]
    check, hanging = StorageCheck(lambda: now[0]), Hanging("late")
    check.ask(hanging, 0.01)
    hanging.released.set()
    wait_for_answer(check)
    now[0] = age_s
    assert check.ask(lambda: "new", LONG_S) == expected


def test_a_save_that_the_storage_does_not_answer_for_has_failed_and_the_next_is_made(tmp_path, monkeypatch):
    manager, hanging = checkpointing.manager(tmp_path / "checkpoints", storage_patience_s=1.0), Hanging()
    monkeypatch.setattr(layout, "obstacle", hanging)
    manager.save_now(1)
    [(step, problem)] = manager.failed
    assert step == 1
    assert "the storage has not answered" in problem
    assert manager.failing
    assert checkpointing.names(tmp_path / "checkpoints") == []
    hanging.released.set()
    wait_for_answer(manager._saver._background._storage)
    manager.save_now(2)
    assert (manager.saved, manager.failing, hanging.asked) == ([2], False, 1)


def test_a_first_save_that_hangs_before_the_folder_is_there_is_made_good(tmp_path, monkeypatch):
    manager, hanging = checkpointing.manager(tmp_path / "checkpoints", storage_patience_s=1.0), Hanging()
    claim = manager._owner._claim_folder
    monkeypatch.setattr(manager._owner, "_claim_folder", lambda: hanging() or claim())
    manager.save_now(1)
    assert len(manager.failed) == 1
    hanging.released.set()
    wait_for_answer(manager._owner._storage)
    manager.save_now(2)
    assert manager.saved == [2]


def test_a_folder_that_goes_after_the_storage_has_answered_is_not_made_anew(tmp_path, monkeypatch):
    """An unmounted share: what is made below the mount point lies on another disk."""
    folder = tmp_path / "checkpoints"
    manager = checkpointing.manager(folder)
    manager.save_now(1)
    monkeypatch.setattr(layout, "obstacle", lambda *_: folder.rename(tmp_path / "away") and "")
    manager.save_now(2)
    assert [step for step, _ in manager.failed] == [2]
    assert not folder.exists()


def test_training_goes_on_while_the_storage_hangs_and_waits_for_it_at_its_end(tmp_path, monkeypatch):
    made = trainer(tmp_path, max_num_steps=6, checkpoint={"save_steps": 2, "storage_patience_s": 0.05})
    hanging, taken = Hanging(), []
    monkeypatch.setattr(layout, "obstacle", hanging)
    train_end = TrainingRun.finish

    def finish(self, loop, state, reason):
        taken.append(int(state.step))
        threading.Timer(0.5, hanging.released.set).start()
        return train_end(self, loop, state, reason)

    monkeypatch.setattr(TrainingRun, "finish", finish)
    state = made.train()
    assert taken == [6]
    assert not made.functions.checkpoint_manager.failing
    assert made.functions.checkpoint_manager.last_saved_step == int(state.step) == 6


def test_a_save_waits_for_the_storage_as_long_as_the_settings_say(tmp_path, events, monkeypatch):
    ask, patience = StorageCheck.ask, []
    monkeypatch.setattr(StorageCheck, "ask", lambda self, question, s: patience.append(s) or ask(self, question, s))
    trainer(tmp_path, max_num_steps=3, checkpoint={"save_steps": 2, "storage_patience_s": 7.5}).train()
    assert patience[-1] is None  # the last save waits
    assert set(patience) == {7.5, None}
