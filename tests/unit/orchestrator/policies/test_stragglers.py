import pytest

from orchestrator.policies.stragglers import StragglerPolicy, Stragglers

POLICY = StragglerPolicy(windows=3, window_s=10.0)
STEPS = 100
"""In each window: a step takes 0.1 s."""


def watch(*windows, num_hosts=3, policy=POLICY):
    """Feeds one heartbeat of each host a window; `windows` are busy seconds a step, by host. Returns whom it found, by window."""
    stragglers, told = Stragglers(num_hosts, policy), []
    totals = [0.0] * num_hosts
    for number, busy in enumerate([(0.0,) * num_hosts, *windows]):
        totals = [total + seconds * STEPS for total, seconds in zip(totals, busy, strict=True)]
        found = [slow for host in range(num_hosts) for slow in stragglers.take(host, number * 10.0, number * STEPS, totals[host])]
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


def test_a_straggler_is_told_once_and_again_after_it_had_caught_up():
    told = [host for hosts in watch(*[SLOW_1] * 8, *[EVEN] * 4, *[SLOW_1] * 8) for host in hosts]
    assert told == [1, 1]


def test_the_summary_says_how_much_slower():
    stragglers = Stragglers(2, StragglerPolicy(windows=1, window_s=10.0))
    stragglers.take(0, 0.0, 0, 0.0)
    stragglers.take(1, 0.0, 0, 0.0)
    stragglers.take(1, 9.0, 100, 5.0)
    (slow,) = stragglers.take(0, 10.0, 100, 1.0)
    assert slow.summary == ("host 1 is slower than the others: busy 0.050 s of each step of 0.100 s, the others 0.010 s")


def test_a_window_without_steps_and_a_rollback_tell_nothing():
    stragglers = Stragglers(2, StragglerPolicy(windows=1, window_s=10.0))
    for at_s, step, busy in ((0.0, 500, (0.0, 0.0)), (10.0, 500, (1.0, 9.0)), (20.0, 300, (2.0, 19.0))):
        assert stragglers.take(1, at_s, step, busy[1]) == []
        assert stragglers.take(0, at_s, step, busy[0]) == []


def test_nothing_is_told_before_every_host_was_heard():
    stragglers = Stragglers(3, StragglerPolicy(windows=1, window_s=1.0))
    assert [stragglers.take(host, at_s, at_s, at_s * host) for at_s in range(9) for host in (0, 2)] == [[]] * 18


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
