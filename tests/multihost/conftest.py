import pytest

from tests.compile_cache import kept
from tests.multihost import harness


@pytest.fixture(scope="session", autouse=True)
def _session():
    with harness.session(kept("hosts")):
        yield
