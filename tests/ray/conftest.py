import pytest

from orchestrator.driver.ray_cluster import patient_with_agents
from tests.programs.processes import PATIENCE_S, wait_until
from tests.ray.machines import everything_is_free


@pytest.fixture(scope="session", autouse=True)
def patient():
    """Ray gives a node that it starts some seconds, and cannot be told to give more. A busy machine needs them."""
    with patient_with_agents(PATIENCE_S):
        yield


@pytest.fixture
def taken():
    """Gangs that a test has taken: given back, whatever came of it. Then all machines must be free."""
    gangs = []
    yield gangs
    for gang in gangs:
        gang.release()
    assert wait_until(everything_is_free)
