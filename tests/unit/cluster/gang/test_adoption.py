"""A driver may have ended before, between or after its orders and its record of them: the agents know what they were told."""

import pytest

from cluster.gang.adoption import AdoptError, newest_generation


def take_over(generation, host=0, num_hosts=2):
    orders = {"generation": generation, "host": host, "num_hosts": num_hosts}
    return {"generation": generation, "orders": orders}


NO_ORDERS = {"generation": None, "orders": None}


@pytest.mark.parametrize(
    ("leads", "members"),
    [
        ({0: take_over(3, 0), 1: take_over(3, 1)}, [0, 1]),
        (
            {0: take_over(4, 1), 5: take_over(4, 0), 1: take_over(3, 1)},
            [5, 0],
        ),  # a spare took the place of a host, and no record tells
        ({0: take_over(4, 0, 1), 1: take_over(3, 1, 2)}, [0]),  # it shrank
        ({0: take_over(3, 0), 1: take_over(3, 1), 2: NO_ORDERS}, [0, 1]),
    ],
    ids=["as recorded", "replaced", "shrunk", "a spare"],
)
def test_members_are_those_with_orders_for_the_newest_generation(leads, members):
    assert newest_generation(leads) == members


@pytest.mark.parametrize(
    ("leads", "why"),
    [
        (
            {0: take_over(4, 0), 1: take_over(3, 1)},
            "of generation 4, the agents of hosts 1 are gone, do not answer, or had no orders yet",
        ),
        ({1: take_over(3, 1)}, "hosts 0 "),
        ({0: NO_ORDERS}, "no agent has orders"),
        ({}, "no agent answers"),
        ({4: take_over("3")}, "the agent of slot 4 has orders that belong to no gang: generation = '3': expected int"),
        ({4: {"orders": {"generation": 3, "num_hosts": 2}}}, "the agent of slot 4 has orders .*: host is missing"),
    ],
    ids=["orders for one host alone", "a host is gone", "before the first orders", "nobody", "of another type", "of no gang"],
)
def test_half_a_generation_is_not_adopted(leads, why):
    with pytest.raises(AdoptError, match=why):
        newest_generation(leads)
