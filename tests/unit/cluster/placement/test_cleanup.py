"""Agents without a driver leave in turn: thousands that ask each other at once would be millions of calls."""

from cluster.placement.cleanup import EXIT_STAGGER_S, MAX_EXIT_DELAY_S, exit_delay_s, name_of


def test_agents_leave_in_the_order_of_their_slots():
    turns = [exit_delay_s("a-run", name_of("a-run", "host", slot, 3, 7)) for slot in range(4096)]
    assert turns == sorted(turns)
    assert turns[:3] == [0.0, EXIT_STAGGER_S, 2 * EXIT_STAGGER_S]
    assert turns[-1] == MAX_EXIT_DELAY_S
    assert exit_delay_s("a-run", "an agent that no gang has made") == 0.0
