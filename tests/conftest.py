"""Before JAX starts: the tests see eight CPU devices, threads enough for all of them, and nothing that is the user's."""

import gc
import os
import signal

import pytest

from cluster.hosts.process_env import CPU_THREADS_PER_DEVICE
from tests.environment import NUM_DEVICES, prepare
from tests.ledger import Ledger
from tests.progress import MARKERS, Progress

prepare(os.environ)

with pytest.MonkeyPatch.context() as patch:
    # XLA reads it once, when JAX starts: here, before a test module's import starts it. What the tests start has its own.
    patch.setenv("NPROC", str(CPU_THREADS_PER_DEVICE * NUM_DEVICES))
    import jax

    jax.devices()


@pytest.fixture(autouse=True)
def _threads_of_others_are_their_own():
    """A command that a test calls sets it for its own process, which is the one of all tests here."""
    yield
    os.environ.pop("NPROC", None)


def pytest_addoption(parser):
    parser.addoption("--slow-of", metavar="PATH", help="leave out the slow tests of files that are not listed in this file")


def pytest_configure(config):
    # A training would take it for its own end alone, and the next test would begin.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.pluginmanager.register(Progress(config), "gangway-progress")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # the process that runs tests
        config.pluginmanager.register(Ledger(), "gangway-ledger")


def pytest_unconfigure():
    # Pytest then collects garbage five times: of thousands of tests so much that xdist interrupts the process, with a traceback.
    gc.freeze()
