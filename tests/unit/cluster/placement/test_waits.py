"""Waits that whoever waits can end."""

import itertools
import time

import pytest

from cluster.placement import waits


class Stopped(Exception):
    pass


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time goes by as it is slept."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(waits.ray, "wait", clock.wait)
    return clock


class Clock:
    def __init__(self):
        self.at_s, self.answers = 0.0, {}

    def now(self):
        return self.at_s

    def sleep(self, seconds):
        self.at_s += seconds

    def wait(self, refs, num_returns, timeout):
        """As `ray.wait`: until so many have answered; `answers` says when each does."""
        due = sorted(self.answers.get(ref, float("inf")) for ref in refs)
        self.at_s = max(self.at_s, min(self.at_s + timeout, due[num_returns - 1]))
        ready = [ref for ref in refs if self.answers.get(ref, float("inf")) <= self.at_s]
        return ready, [ref for ref in refs if ref not in ready]


def stop_at(count):
    calls = itertools.count(1)

    def check_stop():
        if next(calls) == count:
            raise Stopped

    return check_stop


def test_a_wait_ends_when_it_is_done_or_its_time_is_over(clock):
    assert waits.wait_until(lambda: clock.at_s > 3, 5)
    assert not waits.wait_until(lambda: False, 5)
    clock.answers = {"a": clock.at_s + 1, "b": clock.at_s + 70}
    assert waits.wait_answers(["a", "b"], clock.at_s + 60, count=1) == ["a"]
    assert waits.wait_answers(["a", "b"], clock.at_s + 60) == ["a"]
    assert waits.wait_answers(["a", "b"], clock.at_s + 60) == ["a", "b"]
    assert waits.wait_answers([], clock.at_s + 60) == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda check_stop: waits.wait_until(lambda: False, 1000, check_stop),
        lambda check_stop: waits.wait_answers(["never"], 1000, check_stop),
    ],
)
def test_whoever_waits_is_asked_at_least_once_a_second_and_may_end_it(clock, wait):
    seen = []

    def check_stop():
        seen.append(clock.at_s)
        if len(seen) == 20:
            raise Stopped

    with pytest.raises(Stopped):
        wait(check_stop)
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 1


def test_a_request_that_came_before_is_heeded_at_once(clock):
    with pytest.raises(Stopped):
        waits.wait_answers(["never"], 1000, stop_at(1))
    with pytest.raises(Stopped):
        waits.wait_until(lambda: False, 1000, stop_at(1))
    assert clock.at_s == 0
