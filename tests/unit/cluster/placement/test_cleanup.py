"""Agents without a driver leave in turn: thousands that ask each other at once would be millions of calls."""

from cluster.placement.cleanup import LAST_TURN_S, TURN_S, agent_name, turn_s


def test_agents_leave_in_the_order_of_their_slots():
    turns = [turn_s("a-run", agent_name("a-run", slot, 3, 7)) for slot in range(4096)]
    assert turns == sorted(turns)
    assert turns[:3] == [0.0, TURN_S, 2 * TURN_S]
    assert turns[-1] == LAST_TURN_S
    assert turn_s("a-run", "an agent that no gang has made") == 0.0
