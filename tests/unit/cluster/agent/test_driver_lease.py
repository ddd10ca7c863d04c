import pytest

from cluster.agent.driver_lease import Lease, StaleDriver
from cluster.agent.event_log import EventLog


def test_a_lease_ends_when_nobody_calls():
    lease = Lease(30, 100.0)
    assert lease.left_s(120.0) == 10
    lease.renew(0, 120.0)
    assert lease.left_s(120.0) == 30
    assert lease.left_s(151.0) == -1


def test_the_newest_epoch_leads():
    lease = Lease(30, 0.0)
    lease.renew(2, 0.0)
    lease.renew(2, 0.0)
    lease.renew(5, 0.0)
    with pytest.raises(StaleDriver, match="this driver's term is 4, and a driver with term 5 leads this agent"):
        lease.renew(4, 10.0)
    assert lease.left_s(10.0) == 20  # who has lost the run does not keep the agent alive
    assert lease.driver_term == 5


def log_of(capacity, *kinds):
    log = EventLog(capacity)
    for number, kind in enumerate(kinds):
        log.append({"ev": kind, "number": number})
    return log


def numbers(log, since=0):
    return [event["number"] for event in log.since(since)]


def test_events_are_numbered_through_all_generations():
    log = log_of(10, "phase", "joined")
    assert (log.first, log.next, numbers(log), numbers(log, 1), numbers(log, 2)) == (0, 2, [0, 1], [1], [])
    log.clear()
    assert (log.first, log.next, numbers(log)) == (2, 2, [])
    log.append({"ev": "phase", "number": 2})
    assert numbers(log, 0) == [2]


def test_what_is_left_of_a_full_log_keeps_its_numbers():
    log = log_of(8, "phase", *["metrics"] * 20)
    assert [event["n"] for event in log.since(0)] == numbers(log)
    assert log.since(0)[0]["n"] == 0
    assert log.since(0)[1]["n"] > 1


def test_chatty_events_go_first_and_the_oldest_of_them():
    log = log_of(8, "phase", "metrics", "first_step", *["metrics"] * 5, "saved")
    assert numbers(log) == [0, 2, 5, 6, 7, 8]
    assert numbers(log, 6) == [6, 7, 8]
    assert log.next == 9


def test_a_log_of_rare_events_is_bounded_too():
    log = log_of(8, *["saved"] * 100)
    assert len(numbers(log)) <= 8
    assert numbers(log)[-1] == 99
