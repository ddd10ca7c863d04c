"""The orders of a training process are read at one door: what it does not know is an error that names it."""

from __future__ import annotations

import pytest

from gangway.wire import orders
from gangway.wire.orders import OrderError

START = {"cmd": "start", "generation": 0, "host": 0, "num_hosts": 1, "coordinator": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("read", "message", "problem"),
    [
        (orders.read_orders, None, "not an order: expected an object with `cmd`, found None"),
        (orders.read_orders, {"generation": 0}, "not an order: expected an object with `cmd`"),
        (
            orders.read_orders,
            {**START, "cmd": "strat"},
            "no order 'strat' at this point: expected start or precompile; did",
        ),
        (
            orders.read_orders,
            {**START, "skip_batch": [1]},
            "'start' has no field 'skip_batch'; did you mean skip_batches?",
        ),
        (orders.read_orders, {**START, "zzz": 1}, "the order 'start' has no field 'zzz'; the fields are local_device_ids, slice"),
        (orders.read_orders, {**START, "host": "0"}, "the order 'start': host = '0': expected int"),
        (orders.read_orders, {**START, "driver_term": None}, "the order 'start': driver_term = None: expected int"),
        (orders.read_orders, {"cmd": "start", "host": 0}, "the order 'start': num_hosts is missing"),
        (orders.read_orders, {**START, "cmd": "precompile"}, "the order 'precompile' has no field 'generation'"),
        (orders.read_preparation, {"cmd": "prepare", "arguments": {}}, "the order 'prepare': arguments_class is missing"),
        (orders.read_command, {"cmd": "start"}, "no order 'start' at this point: expected stop or save or profile or taken_over"),
        (
            orders.read_command,
            {"cmd": "taken_over", "driver_trm": 2},
            "the order 'taken_over' has no field 'driver_trm'; did you mean driver_term?",
        ),
        (orders.read_command, {"cmd": "profile", "id": "a", "steps": "3"}, "the order 'profile': steps = '3': expected int"),
    ],
)
def test_what_is_not_understood_is_named(read, message, problem):
    with pytest.raises(OrderError) as caught:
        read(message)
    assert problem in str(caught.value)


def test_a_field_that_may_be_absent_may():
    assert orders.read_orders(START) == START
    assert orders.read_orders({**START, "stop_at": None, "skip_batches": (3,)})["skip_batches"] == (3,)


def test_commands_that_are_made_here_are_read():
    for command in (orders.SAVE, orders.stop("requested"), orders.taken_over(2)):
        assert orders.read_command(command) == command
