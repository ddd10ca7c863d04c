"""The thread that writes for the driver: in order, the latest of each kind, again after a failure, never in the driver's way."""

import threading

import pytest

from orchestrator.run_state import storage_writer
from orchestrator.run_state.storage_writer import STALL_S, Writer
from tests.programs.processes import PATIENCE_S, wait_until


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch):
    monkeypatch.setattr(storage_writer, "RETRY_S", 0.01)


class Held:
    """A writer whose first job is under way until `free`."""

    def __init__(self, clock=lambda: 0.0):
        self.writer, self.done, self._free, began = Writer(clock), [], threading.Event(), threading.Event()
        self.writer.put("first", lambda: (began.set(), self._free.wait(PATIENCE_S)))
        assert began.wait(PATIENCE_S)

    def put(self, key, what):
        self.writer.put(key, lambda: self.done.append(what))

    def free(self):
        self._free.set()
        assert self.writer.flush(60)


def test_jobs_are_done_in_order_and_only_the_latest_of_a_key():
    held = Held()
    for key, what in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        held.put(key, what)
    assert not held.writer.flush(0.0)
    held.free()
    assert held.done == [2, 3, 4]  # what `a` says now may build on `b`


def test_a_job_that_fails_is_reported_and_tried_again_and_holds_up_no_other():
    made, failing, done = Writer(), [True], []

    def fail():
        if failing:
            raise OSError(28, "No space left on device")
        done.append("late")

    made.put("launch.json", fail)
    made.put("other", lambda: done.append("other"))
    assert wait_until(lambda: made.problem() is not None and done == ["other"])
    assert made.problem() == "launch.json could not be written: No space left on device"
    failing.clear()
    assert made.flush(60)
    assert (done, made.problem()) == (["other", "late"], None)


def test_a_storage_that_does_not_answer_is_reported():
    now_s = [0.0]
    held = Held(lambda: now_s[0])
    assert held.writer.problem() is None
    now_s[0] = STALL_S + 1
    assert held.writer.problem() == f"the storage has not answered for {STALL_S:.0f} s: first is not written"
    held.free()
    assert held.writer.problem() is None


def test_after_stop_nothing_is_written_and_nobody_waits():
    held = Held()
    held.put("a", 1)
    held.writer.stop()
    held.put("a", 2)
    held.free()
    assert held.done == []
