"""Tests that train the same small model compile it once, and see what a training process would have told."""

import json

import pytest

from gangway.storage import failed_requests
from tests.compile_cache import compile_cache
from tests.event_schema import check_event
from tests.stores.contract import buckets
from trainers import runtime


@pytest.fixture(autouse=True)
def _own_runtime():
    """What one test installs, the next one does not see."""
    before = runtime.current()
    failed_requests.HERE.take()
    yield
    runtime.install(before)


@pytest.fixture
def events():
    """What the process would have told its agent."""
    told: list[dict] = []

    def send(event):
        told.append(json.loads(json.dumps(event)))
        check_event(told[-1], "process")

    runtime.install(runtime.Runtime(send))
    return told


@pytest.fixture(scope="session", autouse=True)
def _compile_cache():
    with compile_cache():
        yield


@pytest.fixture(scope="module")
def stores():
    """A bucket of each kind, by scheme; a server starts when it is asked for."""
    with buckets() as found:
        yield found
