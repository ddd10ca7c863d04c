from contextlib import suppress
from unittest import mock

import pytest
from ray._private import services

from tests.programs.processes import wait_until
from tests.ray.machines import everything_is_free


@pytest.fixture(scope="session", autouse=True)
def patient_with_nodes():
    """Ray gives a node that it starts 30 s to register, and cannot be told to give more. A busy machine needs them."""
    get_node = services.get_node

    def get_node_at_last(*arguments):
        found = []

        def has_registered():
            with suppress(RuntimeError):
                found.append(get_node(*arguments))
            return found

        return found[0] if wait_until(has_registered) else get_node(*arguments)

    with mock.patch.object(services, "get_node", get_node_at_last):
        yield


@pytest.fixture
def taken():
    """Gangs that a test has taken: given back, whatever came of it. Then all machines must be free."""
    gangs = []
    yield gangs
    for gang in gangs:
        gang.release()
    assert wait_until(everything_is_free)
