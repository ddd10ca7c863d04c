"""Who could train, and who will: the two must agree, or a gang restarts for hosts that it does not take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster.topology import HostsConfig
from orchestrator.quarantine import Quarantine
from orchestrator.roster import Roster
from trainers.arguments import TrainingArguments


def roster(present, available, most=4):
    seats = {number: SimpleNamespace(number=number, node_id=f"node-{number}") for number in {*present, *available}}
    there = [seats[number] for number in available]
    gang = SimpleNamespace(
        members=[seats[number] for number in present],
        seats=list(seats.values()),
        refresh=lambda: list(there),
        lose=lambda seat, avoid_nodes, fill: there.remove(seat),
        set_members=lambda members: setattr(gang, "members", members),
    )
    hosts = HostsConfig(min=2, max=most, start_timeout_s=0.1)
    return Roster(SimpleNamespace(hosts=hosts, training=TrainingArguments(name="run", max_num_steps=1)), gang)


@pytest.mark.parametrize(
    ("present", "available", "leaving", "avoid", "count"),
    [
        ((0, 1, 2), (0, 1, 2), (), (), 3),
        ((0, 1, 2), (0, 1, 2, 3), (), (), 4),
        ((0, 1, 2), (0, 1, 2, 3, 4), (), (), 4),
        ((0, 2, 3), (0, 1, 2, 3), (), (1,), 3),  # one that was put out for its failures is there, and stays out
        ((0, 1, 2), (0, 1, 2), (2,), (), 2),
        ((0, 1), (0, 1), (), (0, 1), 2),  # without them there would be too few
    ],
)
def test_as_many_are_possible_as_would_be_taken(present, available, leaving, avoid, count):
    made, quarantine = roster(present, available), Quarantine(dict.fromkeys(avoid, "it has failed"))
    made.leaving = dict.fromkeys(leaving, "its node is drained")
    assert made.possible(quarantine) == count
    assert made.form(avoid=quarantine).after == len(made.gang.members) == count


def test_where_too_few_are_left_none_are_possible():
    assert roster((0, 1), (0,)).possible(Quarantine()) == 0


def test_a_machine_to_avoid_is_better_than_none():
    """When no other has come in time."""
    made = roster((0, 1), (0,))
    gang, avoided = made.gang, made.gang.seats[1]
    gang.fill_vacant = lambda: None
    gang.wait_available = lambda count, timeout_s: gang.refresh()
    gang.put_up_with_any = lambda: setattr(gang, "refresh", lambda: [gang.seats[0], avoided]) or True
    assert made.form(avoid=Quarantine()).after == 2
