import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies.stragglers import Sample, StragglerPolicy, Stragglers, slower_than_others

POLICY = StragglerPolicy(windows=3, window_s=10.0)
STEPS = 100
"""In each window: a step takes 0.1 s."""


def watch(*windows, num_hosts=3, policy=POLICY):
    """Feeds one heartbeat of each host a window; `windows` are busy seconds a step, by host. Returns whom it found, by window."""
    stragglers, told = Stragglers(num_hosts, policy), []
    totals = [0.0] * num_hosts
    for number, busy in enumerate([(0.0,) * num_hosts, *windows]):
        totals = [total + seconds * STEPS for total, seconds in zip(totals, busy, strict=True)]
        found = [
            slow for host in range(num_hosts) for slow in stragglers.observe(host, number * 10.0, number * STEPS, totals[host])
        ]
        told.append([slow.host for slow in found])
    return told[1:]


# A window ends with the first heartbeat after it; host 0's comes first, so each is judged by what was known until then.
SLOW_1, EVEN = (0.01, 0.05, 0.01), (0.01, 0.01, 0.01)

CASES = {
    "persistently slow": ([SLOW_1] * 5, [1]),
    "slow for too short a time": ([SLOW_1] * 2 + [EVEN] * 4, []),
    "slow now and then": ([SLOW_1, EVEN] * 4, []),
    "all alike": ([EVEN] * 6, []),
    "slower by a factor, but that is nothing beside a step": ([(0.001, 0.01, 0.001)] * 6, []),
    "slower by much, but not by the factor": ([(0.05, 0.065, 0.05)] * 6, []),
    "two slow ones of three": ([(0.01, 0.05, 0.05)] * 6, [1, 2]),
    "two slow ones of five": ([(0.01, 0.05, 0.05, 0.01, 0.01)] * 6, [1, 2]),
    "one of two": ([(0.01, 0.05)] * 6, [1]),
    "a single host": ([(0.05,)] * 6, []),
}


@pytest.mark.parametrize("name", CASES)
def test_stragglers(name):
    windows, expected = CASES[name]
    told = watch(*windows, num_hosts=len(windows[0]))
    assert sorted(host for hosts in told for host in hosts) == expected


BY_HALF = (0.5, 1.0, 0.5)  # of a step of 2.0 s: twice as busy, by a quarter of a step
SETTINGS = {
    "as they are": ({}, 10.0, [1]),
    "exactly the factor is not more than it": ({"factor": 2.0}, 10.0, []),
    "a smaller factor": ({"factor": 1.9}, 10.0, [1]),
    "exactly the share is not more than it": ({"share": 0.25}, 10.0, []),
    "a smaller share": ({"share": 0.24}, 10.0, [1]),
    "fewer windows than there were": ({"windows": 4}, 10.0, [1]),
    "more windows than there were": ({"windows": 6}, 10.0, []),
    "heartbeats fill a window": ({"windows": 4, "window_s": 4.0}, 4.0, [1]),
    "heartbeats come before a window is full": ({"windows": 4, "window_s": 10.0}, 4.0, []),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_number_of_the_policy_counts(name):
    values, heartbeat_s, expected = SETTINGS[name]
    stragglers, told = Stragglers(3, StragglerPolicy(**values)), []
    for number in range(7):  # five windows of `heartbeat_s` that can tell, with steps of a fifth of it
        for host in range(3):
            told += stragglers.observe(host, number * heartbeat_s, number * 5, number * 5 * BY_HALF[host] * heartbeat_s / 10)
    assert [slow.host for slow in told] == expected


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9))
def test_a_host_is_compared_with_the_median_of_the_others(busy):
    before = {host: Sample(0, 0.0) for host in range(len(busy))}
    after = {host: Sample(1, float(seconds)) for host, seconds in enumerate(busy)}
    slow = slower_than_others(before, after, 10.0, StragglerPolicy(factor=1.5, share=0.1))
    medians = [statistics.median(busy[:host] + busy[host + 1 :]) for host in range(len(busy))]
    expected = {host: m for host, m in enumerate(medians) if busy[host] > 1.5 * m and busy[host] - m > 1.0}
    assert {host: each.others_busy_s_per_step for host, each in slow.items()} == expected


def test_a_window_of_one_step_tells():
    stragglers = Stragglers(2, StragglerPolicy(windows=1, window_s=10.0))
    for host, at_s, steps, busy_s in ((0, 0.0, 0, 0.0), (1, 0.0, 0, 0.0), (1, 9.0, 1, 5.0)):
        assert stragglers.observe(host, at_s, steps, busy_s) == []
    assert [slow.host for slow in stragglers.observe(0, 10.0, 1, 1.0)] == [1]


def test_a_straggler_is_reported_once_and_again_after_it_had_caught_up():
    told = [host for hosts in watch(*[SLOW_1] * 8, *[EVEN] * 4, *[SLOW_1] * 8) for host in hosts]
    assert told == [1, 1]


def test_the_summary_says_how_much_slower():
    stragglers = Stragglers(2, StragglerPolicy(windows=1, window_s=10.0))
    stragglers.observe(0, 0.0, 0, 0.0)
    stragglers.observe(1, 0.0, 0, 0.0)
    stragglers.observe(1, 9.0, 100, 5.0)
    (slow,) = stragglers.observe(0, 10.0, 100, 1.0)
    assert slow.summary == ("host 1 is slower than the others: busy 0.050 s of each step of 0.100 s, the others 0.010 s")


def test_a_window_without_steps_and_a_rollback_tell_nothing():
    stragglers = Stragglers(2, StragglerPolicy(windows=1, window_s=10.0))
    for at_s, step, busy in ((0.0, 500, (0.0, 0.0)), (10.0, 500, (1.0, 9.0)), (20.0, 300, (2.0, 19.0))):
        assert stragglers.observe(1, at_s, step, busy[1]) == []
        assert stragglers.observe(0, at_s, step, busy[0]) == []


def test_nothing_is_reported_before_every_host_was_heard():
    stragglers = Stragglers(3, StragglerPolicy(windows=1, window_s=1.0))
    assert [stragglers.observe(host, at_s, at_s, at_s * host) for at_s in range(9) for host in (0, 2)] == [[]] * 18


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"factor": 1.0}, "factor = 1.0: expected more than 1"),
        ({"share": 1.0}, "share = 1.0: expected more than 0 and less than 1"),
        ({"windows": 0}, "windows = 0: expected at least 1"),
        ({"window_s": 0}, "window_s = 0: expected more than 0"),
    ],
)
def test_policy_rejects(values, message):
    with pytest.raises(ValueError, match=message):
        StragglerPolicy(**values)
