"""The schemas of orders: what an agent reads is what a driver sends, and what an agent passes on its process knows."""

from __future__ import annotations

from gangway.wire import agent_orders as agent
from gangway.wire import orders as process
from tests.event_schema import fields_of


def test_an_agent_reads_fields_that_its_process_knows_too():
    pairs = ((agent.StartOrders, process.Start), (agent.GangOrders, process.Start), (agent.ProfileCommand, process.Profile))
    for read, sent in pairs:
        for name, (_, hint) in fields_of(read).items():
            assert name in fields_of(sent), f"{read.__name__}.{name}: an agent reads it, and no driver sends it"
            if name != "cmd":
                assert fields_of(sent)[name][1] == hint, f"{read.__name__}.{name}"


def test_a_gangs_part_of_the_orders_is_one_that_a_process_takes():
    for name, (_, hint) in fields_of(agent.MachineOrders).items():
        assert fields_of(process.Member)[name][1] == hint, name
