import pytest

from tests import compiled
from tests.multihost import harness


@pytest.fixture(scope="session", autouse=True)
def _session():
    with harness.session(compiled.folder("multihost")):
        yield
