import pytest

from tests.stores.contract import buckets


@pytest.fixture(scope="module")
def stores():
    """A bucket of each kind, by scheme."""
    with buckets() as found:
        yield found
