import dataclasses
import os
import socket
import threading

import pytest

from orchestrator import lease, storage
from orchestrator.lease import LeaseLost, RunInUse, acquire, holder_of


class Clock:
    def __init__(self, now_s=1_000_000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def rewrite(run_dir, **changes):
    """The lease as another machine, or another process, would have left it."""
    storage.write_json(storage.join(run_dir, "lease.json"), dataclasses.asdict(holder_of(run_dir)) | changes)


def test_the_first_driver_gets_epoch_one_and_a_released_run_is_free_at_once(tmp_path, clock):
    run = str(tmp_path)
    first = acquire(run, "a", clock)
    assert (first.epoch, first.valid()) == (1, True)
    assert (holder_of(run).pid, holder_of(run).hostname) == (os.getpid(), socket.gethostname())
    first.release()
    second = acquire(run, "b", clock)
    assert second.epoch == 2
    second.release()


def test_a_live_run_is_refused_with_who_where_since_when_and_what_to_do(tmp_path, clock):
    run = str(tmp_path / "quick")
    first = acquire(run, "a", clock)
    clock.now_s += 3
    with pytest.raises(RunInUse) as error:
        acquire(run, "b", clock)
    first.release()
    message = str(error.value)
    assert message.startswith(f"run 'quick' is in use: process {os.getpid()} on {socket.gethostname()} drives it since ")
    assert "(launch a, last heard of 3 s ago)" in message
    assert message.endswith("stop that one, wait 15 s if it is gone already, or start this one under another name (name=...)")


def test_a_restarted_driver_of_the_same_launch_takes_over_at_once_and_fences_the_old_one(tmp_path, clock):
    run = str(tmp_path)
    old = acquire(run, "a", clock)
    new = acquire(run, "a", clock)
    assert new.epoch == old.epoch + 1
    with pytest.raises(LeaseLost, match=f"{run}: epoch 1 has a successor; this driver must stop"):
        old.renew()
    assert not old.valid()
    old.release()  # Must not release what is not its own.
    assert (holder_of(run).epoch, holder_of(run).released) == (2, False)
    assert new.valid()
    new.release()


def test_a_driver_of_another_machine_is_waited_for(tmp_path, clock):
    run = str(tmp_path)
    acquire(run, "a", clock).release()
    rewrite(run, released=False, machine="elsewhere", hostname="far", pid=1)
    clock.now_s += lease.TTL_S
    with pytest.raises(RunInUse, match="process 1 on far"):
        acquire(run, "b", clock)
    clock.now_s += 0.1
    acquire(run, "b", clock).release()


@pytest.mark.parametrize(
    "changes", [{"pid": 2**22 - 1}, {"process_started_at_s": 5.0}], ids=["no such pid", "pid given out again"]
)
def test_a_dead_driver_of_this_machine_is_not_waited_for(tmp_path, clock, changes):
    run = str(tmp_path)
    acquire(run, "a", clock).release()
    rewrite(run, released=False)
    with pytest.raises(RunInUse):
        acquire(run, "b", clock)
    rewrite(run, **changes)
    acquire(run, "b", clock).release()


def test_a_driver_that_won_its_epoch_but_has_not_yet_written_the_lease_counts(tmp_path, clock):
    run = str(tmp_path)
    acquire(run, "a", clock).release()
    claim = dataclasses.asdict(holder_of(run)) | {"epoch": 2, "launch_id": "b", "released": False}
    storage.create_json(storage.join(run, "epochs", "000002.json"), claim)
    with pytest.raises(RunInUse, match="launch b"):
        acquire(run, "c", clock)
    clock.now_s += lease.TTL_S + 1  # It never did: it died in between.
    third = acquire(run, "c", clock)
    assert third.epoch == 3
    third.release()


def test_of_drivers_that_start_at_once_one_gets_the_run(tmp_path, clock):
    run = str(tmp_path)
    held, refused = [], []
    barrier = threading.Barrier(6)

    def start(number):
        barrier.wait()
        try:
            held.append(acquire(run, f"launch-{number}", clock))
        except RunInUse:
            refused.append(number)

    threads = [threading.Thread(target=start, args=(n,)) for n in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert (len(held), len(refused)) == (1, 5)
    held[0].release()


def test_a_lease_that_cannot_be_renewed_stops_being_valid(tmp_path, clock):
    held = acquire(str(tmp_path), "a", clock)
    clock.now_s += lease.TTL_S
    assert held.valid()
    clock.now_s += 1
    assert not held.valid()
    held.renew()
    assert held.valid()
    held.release()


def test_the_renewing_thread_tells_of_a_successor_once(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.01)
    lost = threading.Event()
    old = acquire(str(tmp_path), "a", clock, on_lost=lost.set)
    clock.now_s += 1
    while holder_of(str(tmp_path)).renewed_at_s != clock.now_s:
        assert not lost.wait(0.01)
    new = acquire(str(tmp_path), "a", clock)
    assert lost.wait(30)
    old.release()
    new.release()
