"""The leases of a gang's agents are kept from a thread of its own."""

import itertools
import math

import pytest
import ray

from cluster.agent.driver_lease import StaleDriver
from cluster.gang.lease_keeper import DRIVER_SILENCE_S, LeaseKeeper

LEASE_S = 120.0


class Agents:
    """Agents that say when they were called, and a clock. Answers come at once, except from those that are `frozen`."""

    def __init__(self, monkeypatch):
        self.now_s, self.calls, self.frozen, self.errors = 0.0, [], set(), {}
        monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: ([r for r in refs if r[0] not in self.frozen], []))
        monkeypatch.setattr(ray, "get", self._get)

    def call(self, agent):
        self.calls.append((agent, self.now_s))
        return agent, len(self.calls)

    def _get(self, ref):
        if ref[0] in self.errors:
            raise self.errors[ref[0]]

    def times(self, agent):
        return [at_s for called, at_s in self.calls if called == agent]


@pytest.fixture
def agents(monkeypatch):
    return Agents(monkeypatch)


@pytest.fixture
def keeper(agents):
    return LeaseKeeper(LEASE_S, agents.call, clock=lambda: agents.now_s, start=False)


def let_pass(agents, keeper, seconds, turn_s=0.5):
    end_s = agents.now_s + seconds
    while agents.now_s < end_s:
        agents.now_s += turn_s
        keeper.turn()


def test_every_agent_is_called_several_times_in_its_lease_whatever_the_driver_does(agents, keeper):
    """The driver gives no sign meanwhile: it hangs in its storage, say."""
    for slot in range(8):
        keeper.keep(slot, f"agent-{slot}")
    let_pass(agents, keeper, 600)
    for slot in range(8):
        times = [0, *agents.times(f"agent-{slot}"), agents.now_s]
        assert max(after - before for before, after in itertools.pairwise(times)) <= LEASE_S / 4 + 0.5
        assert len(times) - 2 <= 600 / (LEASE_S / 4) + 1


def test_the_calls_to_very_many_are_spread(agents, keeper):
    for slot in range(4096):
        keeper.keep(slot, slot)
    let_pass(agents, keeper, LEASE_S)
    per_turn = [sum(1 for _, at_s in agents.calls if at_s == turn / 2) for turn in range(1, int(2 * LEASE_S))]
    assert max(per_turn) < 4 * 4096 / (2 * LEASE_S / 4)
    assert len(agents.calls) == math.ceil(4096 * 4)


def test_the_newest_agent_of_a_slot_is_called_and_one_that_is_dropped_is_not(agents, keeper):
    keeper.keep(0, "first")
    keeper.keep(1, "other")
    keeper.drop(0)
    keeper.keep(0, "second")
    let_pass(agents, keeper, LEASE_S)
    assert agents.times("first") == []
    assert len(agents.times("second")) == 4
    keeper.drop(1)
    let_pass(agents, keeper, LEASE_S)
    assert len(agents.times("other")) == 4
    assert len(agents.times("second")) == 8


def test_calls_to_an_agent_that_does_not_answer_do_not_pile_up(agents, keeper):
    keeper.keep(0, "frozen")
    agents.frozen.add("frozen")
    let_pass(agents, keeper, 10 * LEASE_S)
    assert 10 <= len(agents.times("frozen")) <= 20  # an answer may have been lost: asked again, seldom


def test_an_agent_that_is_gone_or_cut_off_is_the_drivers_business(agents, keeper):
    agents.errors = {"gone": ray.exceptions.ActorDiedError(), "cut off": ray.exceptions.ActorUnavailableError("", None)}
    for slot, agent in enumerate(["gone", "cut off", "well"]):
        keeper.keep(slot, agent)
    let_pass(agents, keeper, LEASE_S)
    keeper.driver_alive()
    assert len(agents.times("cut off")) == len(agents.times("well")) == 4


def test_that_another_driver_leads_is_reported_to_the_drivers_thread(agents, keeper):
    agents.errors = {"led": StaleDriver("a driver with term 2 leads this agent")}
    keeper.keep(0, "led")
    keeper.keep(1, "other")
    keeper.driver_alive()
    let_pass(agents, keeper, LEASE_S)
    for _ in range(2):
        with pytest.raises(StaleDriver, match="a driver with term 2"):
            keeper.driver_alive()
    calls = len(agents.calls)
    let_pass(agents, keeper, LEASE_S)
    assert len(agents.calls) == calls  # the machines are the other's to keep


def test_a_driver_that_is_stuck_for_good_does_not_hold_its_machines(agents, keeper):
    keeper.keep(0, "agent")
    let_pass(agents, keeper, DRIVER_SILENCE_S + 1)
    calls = len(agents.calls)
    let_pass(agents, keeper, LEASE_S)
    assert len(agents.calls) == calls
    keeper.driver_alive()  # it was not for good
    let_pass(agents, keeper, LEASE_S)
    assert len(agents.calls) >= calls + 4
