"""How long each host works at a step, for the time line."""

from __future__ import annotations

from orchestrator.driver.event_handler import BATCHES, HostTimes


def test_an_interval_gives_the_seconds_of_a_step_of_each_host():
    times = HostTimes()
    assert [times.observe(host, 0, 0.0) for host in (0, 1)] == [None, None]
    assert times.observe(0, BATCHES, 1.0) is None
    assert times.observe(1, BATCHES, 2.0) == [1.0 / BATCHES, 2.0 / BATCHES]


def test_a_process_that_starts_again_begins_a_new_interval():
    """Its seconds begin at 0 again: the time of a step was negative then."""
    times = HostTimes()
    for host in (0, 1):
        times.observe(host, BATCHES - 1, 9.0)
    for host in (0, 1):  # both were killed, and train again from batch 10
        assert times.observe(host, 10, 0.0) is None
    assert times.observe(0, BATCHES, 1.0) is None
    assert times.observe(0, 10 + BATCHES, 2.0) is None
    assert times.observe(1, 10 + BATCHES, 4.0) == [2.0 / BATCHES, 4.0 / BATCHES]


def test_a_host_that_the_gang_has_no_more_is_not_waited_for():
    times = HostTimes()
    for host in (0, 1, 2):
        times.observe(host, BATCHES - 1, 9.0)
    for host in (0, 1):
        times.observe(host, 10, 0.0)
    times.observe(0, 10 + BATCHES, 2.0)
    assert times.observe(1, 10 + BATCHES, 2.0) == [2.0 / BATCHES, 2.0 / BATCHES]


def test_a_rollback_begins_a_new_interval():
    times = HostTimes()
    times.observe(0, 15, 3.0)
    assert times.observe(0, 5, 4.0) is None
    assert times.observe(0, 5 + BATCHES, 6.0) == [2.0 / BATCHES]
