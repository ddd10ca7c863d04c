import pytest

from tests.multihost import harness


@pytest.fixture(scope="session", autouse=True)
def _session(tmp_path_factory):
    with harness.session(tmp_path_factory.mktemp("compiled")):
        yield
