"""Tests that train the same small model compile it once, and see what a training process would have told."""

import json
import os

import jax
import pytest

from tests.event_schema import check_event
from trainers import runtime


@pytest.fixture(autouse=True)
def _own_runtime():
    """What one test installs, the next one does not see."""
    before = runtime.current()
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
def _compile_cache(tmp_path_factory):
    settings = {
        # A folder that many runs share: `benchmarks.mutants` compiles most programs once.
        "jax_compilation_cache_dir": os.environ.get("TESTS_COMPILE_CACHE") or str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
