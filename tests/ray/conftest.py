import pytest

from tests.programs.processes import wait_until
from tests.ray.machines import everything_is_free


@pytest.fixture
def taken():
    """Gangs that a test has taken: given back, whatever came of it. Then all machines must be free."""
    gangs = []
    yield gangs
    for gang in gangs:
        gang.release()
    assert wait_until(everything_is_free)
