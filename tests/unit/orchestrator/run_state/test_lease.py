import dataclasses
import os
import socket
import threading

import pytest

from gangway.storage import documents
from gangway.storage.row import Row
from orchestrator.run_state import lease
from orchestrator.run_state.lease import LeaseLost, RunInUse, Time, acquire, holder_of
from tests.programs.processes import PATIENCE_S


class Clock:
    """Of one machine. Who sleeps makes time pass, and `meanwhile` happen."""

    def __init__(self, now_s=1_000_000.0):
        self.now_s, self.passed_s, self.meanwhile = now_s, 50.0, lambda: None

    def pass_(self, seconds):
        self.now_s += seconds
        self.passed_s += seconds

    def sleep(self, seconds):
        self.pass_(seconds)
        self.meanwhile()

    @property
    def times(self):
        return Time(wall=lambda: self.now_s, passed=lambda: self.passed_s, sleep=self.sleep)


@pytest.fixture
def clock():
    return Clock()


def rewrite(run_dir, **changes):
    """The lease as another machine, or another process, would have left it."""
    documents.write_json(documents.join(run_dir, "lease.json"), dataclasses.asdict(holder_of(run_dir)) | changes)


def test_the_first_driver_gets_epoch_one_and_a_released_run_is_free_at_once(tmp_path, clock):
    run = str(tmp_path)
    first = acquire(run, "a", clock.times)
    assert (first.driver_term, first.valid()) == (1, True)
    assert (holder_of(run).pid, holder_of(run).hostname) == (os.getpid(), socket.gethostname())
    first.release()
    second = acquire(run, "b", clock.times)
    assert second.driver_term == 2
    second.release()


def test_a_live_run_is_refused_with_who_where_since_when_and_what_to_do(tmp_path, clock):
    run = str(tmp_path / "quick")
    first = acquire(run, "a", clock.times)
    clock.pass_(3)
    with pytest.raises(RunInUse) as error:
        acquire(run, "b", clock.times)
    first.release()
    message = str(error.value)
    assert message.startswith(f"run 'quick' is in use: process {os.getpid()} on {socket.gethostname()} drives it since ")
    assert message.endswith("(launch a); stop that one, or start this one under another name (name=...)")
    assert clock.passed_s == 53.0  # at once


def test_a_restarted_driver_of_the_same_launch_takes_over_at_once_and_fences_the_old_one(tmp_path, clock):
    run = str(tmp_path)
    old = acquire(run, "a", clock.times)
    new = acquire(run, "a", clock.times)
    assert new.driver_term == old.driver_term + 1
    with pytest.raises(LeaseLost, match=f"{run}: term 1 has a successor; this driver must stop"):
        old.renew()
    assert not old.valid()
    old.release()  # Must not release what is not its own.
    assert (holder_of(run).driver_term, holder_of(run).released) == (2, False)
    assert new.valid()
    new.release()


def elsewhere(run, clock, **changes):
    """Another machine's driver has the run, which renews its lease as often as `renew` is called."""
    acquire(run, "a", clock.times).release()
    about = {"released": False, "machine": "elsewhere", "hostname": "far", "pid": 1, **changes}
    rewrite(run, **about)

    def renew():
        rewrite(run, renewals=holder_of(run).renewals + 1)

    return renew


@pytest.mark.parametrize("skew_s", [-3600.0, -20.0, 0.0, 20.0, 3600.0])
def test_a_live_driver_of_another_machine_keeps_the_run_whatever_its_clock_says(tmp_path, clock, skew_s):
    run, begun_s = str(tmp_path), clock.passed_s
    renew, told = elsewhere(run, clock, renewed_at_s=clock.now_s + skew_s), []

    def meanwhile():
        if clock.passed_s - begun_s >= lease.RENEW_EVERY_S:
            renew()

    clock.meanwhile = meanwhile
    with pytest.raises(RunInUse, match="process 1 on far"):
        acquire(run, "b", clock.times, waiting=told.append)
    assert clock.passed_s - begun_s <= lease.RENEW_EVERY_S + lease.LOOK_EVERY_S
    assert len(told) == 1
    assert "was driven by process 1 on far (launch a), which has not released it" in told[0]
    assert "no sign of life for 15 s" in told[0]


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_a_dead_driver_of_another_machine_is_waited_for_one_lease_long(tmp_path, clock, skew_s):
    run, begun_s = str(tmp_path), clock.passed_s
    elsewhere(run, clock, renewed_at_s=clock.now_s + skew_s)
    held = acquire(run, "b", clock.times)
    assert held.driver_term == 2
    assert lease.TTL_S < clock.passed_s - begun_s <= lease.TTL_S + 2 * lease.LOOK_EVERY_S
    held.release()


def test_an_early_word_is_given_at_once_or_not_at_all(tmp_path, clock):
    run = str(tmp_path)
    held = acquire(run, "a", clock.times)
    with pytest.raises(RunInUse):
        lease.check_free(run, lambda: clock.passed_s)
    rewrite(run, machine="elsewhere")
    lease.check_free(run, lambda: clock.passed_s)
    held.release()
    lease.check_free(run, lambda: clock.passed_s)


@pytest.mark.parametrize("changes", [{"pid": 2**22 - 1}, {"started": 5}], ids=["no such pid", "pid given out again"])
def test_a_dead_driver_of_this_machine_is_not_waited_for(tmp_path, clock, changes):
    run = str(tmp_path)
    acquire(run, "a", clock.times).release()
    rewrite(run, released=False)
    with pytest.raises(RunInUse):
        acquire(run, "b", clock.times)
    rewrite(run, **changes)
    acquire(run, "b", clock.times).release()


def test_a_driver_that_won_its_epoch_but_has_not_yet_written_the_lease_counts(tmp_path, clock):
    run = str(tmp_path)
    acquire(run, "a", clock.times).release()
    claim = dataclasses.asdict(holder_of(run)) | {"driver_term": 2, "launch_id": "b", "released": False}
    lease.row_of(run).take_over(claim)
    with pytest.raises(RunInUse, match="launch b"):
        acquire(run, "c", clock.times)
    rewrite(run, machine="elsewhere")
    lease.row_of(run).take_over(claim | {"machine": "elsewhere", "driver_term": 3})
    third = acquire(run, "c", clock.times)  # it never did: it died in between
    assert third.driver_term == 4
    third.release()


def test_of_drivers_that_start_at_once_one_gets_the_run(tmp_path, clock):
    run = str(tmp_path)
    held, refused = [], []
    barrier = threading.Barrier(6)

    def start(number):
        barrier.wait()
        try:
            held.append(acquire(run, f"launch-{number}", clock.times))
        except RunInUse:
            refused.append(number)

    threads = [threading.Thread(target=start, args=(n,)) for n in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert (len(held), len(refused)) == (1, 5)
    held[0].release()


def test_epochs_go_on_where_their_documents_were_deleted(tmp_path, clock):
    held = acquire(str(tmp_path), "a", clock.times, above_term=7)
    assert held.driver_term == 8
    held.release()


def test_a_lease_that_cannot_be_renewed_stops_being_valid(tmp_path, clock):
    held = acquire(str(tmp_path), "a", clock.times)
    clock.pass_(lease.TTL_S)
    assert held.valid()
    clock.pass_(1)
    assert not held.valid()
    held.renew()
    assert held.valid()
    held.release()


def test_a_clock_that_is_set_changes_nothing(tmp_path, clock):
    held = acquire(str(tmp_path), "a", clock.times)
    for jump_s in (-3600.0, 7200.0):
        clock.now_s += jump_s
        assert held.valid()
        held.renew()
        assert held.valid()
    clock.passed_s += lease.TTL_S + 1
    assert not held.valid()
    held.release()


def test_a_renewal_counts_from_before_it_was_written(tmp_path, clock, monkeypatch):
    held, write = acquire(str(tmp_path), "a", clock.times), documents.write_text

    def slow(*arguments):
        clock.pass_(10)
        write(*arguments)

    monkeypatch.setattr(documents, "write_text", slow)
    held.renew()
    monkeypatch.undo()
    clock.pass_(lease.TTL_S - 9)
    assert not held.valid()
    held.release()


def test_where_nobody_can_tell_of_a_successor_the_lease_is_not_renewed(tmp_path, clock, monkeypatch):
    held = acquire(str(tmp_path), "a", clock.times)
    (tmp_path / "row").rename(tmp_path / "away")
    with pytest.raises(OSError, match="it is gone"):
        held.renew()
    (tmp_path / "away").rename(tmp_path / "row")
    held.renew()
    held.release()


def test_a_driver_that_loses_the_run_as_it_takes_it_says_so(tmp_path, clock, monkeypatch):
    take_over, others = Row.take_over, []

    def slow(row, *arguments, **how):
        monkeypatch.setattr(Row, "take_over", take_over)
        taken = take_over(row, *arguments, **how)
        others.append(acquire(str(tmp_path), "a", clock.times))
        return taken

    monkeypatch.setattr(Row, "take_over", slow)
    with pytest.raises(RunInUse, match="is in use: another driver has taken it in the same moment"):
        acquire(str(tmp_path), "a", clock.times)
    assert others[0].valid()
    others[0].release()


def test_the_renewing_thread_tells_of_a_successor_once(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.01)
    lost = threading.Event()
    old = acquire(str(tmp_path), "a", clock.times, on_lost=lost.set)
    clock.pass_(1)
    while holder_of(str(tmp_path)).renewed_at_s != clock.now_s:
        assert not lost.wait(0.01)
    new = acquire(str(tmp_path), "a", clock.times)
    assert lost.wait(PATIENCE_S)
    old.release()
    new.release()


@pytest.fixture(params=["folder", "gs", "s3"])
def anywhere(request, stores, tmp_path, monkeypatch):
    """The folder of a run, on a disk and in a bucket."""
    if request.param == "folder":
        return str(tmp_path / "run")
    stores[request.param].set(monkeypatch)
    return stores[request.param].url()


def test_a_run_has_one_driver_wherever_it_is(anywhere, clock):
    first = acquire(anywhere, "a", clock.times)
    with pytest.raises(RunInUse, match="is in use: process"):
        acquire(anywhere, "b", clock.times)
    with pytest.raises(RunInUse, match="is in use: process"):
        lease.check_free(anywhere, clock.times.passed)
    restarted = acquire(anywhere, "a", clock.times)
    with pytest.raises(LeaseLost):
        first.renew()
    assert (first.superseded(), restarted.superseded(), first.superseded_by("a")) == (True, False, True)
    restarted.release()
    first.release()
    last = acquire(anywhere, "b", clock.times)
    assert (last.driver_term, holder_of(anywhere).launch_id) == (3, "b")
    last.release()


def test_of_drivers_that_start_at_once_anywhere_one_gets_the_run(anywhere, clock):
    barrier, won, refused = threading.Barrier(4), [], []

    def start(name):
        barrier.wait()
        try:
            won.append(acquire(anywhere, name, clock.times))
        except RunInUse:
            refused.append(name)

    threads = [threading.Thread(target=start, args=(f"launch-{n}",)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert (len(won), len(refused)) == (1, 3)
    won[0].release()
