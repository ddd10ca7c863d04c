"""Before JAX starts: the tests see eight CPU devices, threads enough for all of them, and nothing that is the user's."""

import gc
import os
import signal

import hypothesis
import pytest

from tests import fuzz
from tests.environment import as_users_compile, prepare, start_jax
from tests.ledger import Ledger
from tests.pool import Pool
from tests.progress import MARKERS, Progress

prepare(os.environ)
# The same cases each time; those of the seed where a run has one. A deadline, or a check that cases come fast, limits the time.
hypothesis.settings.register_profile(
    "suite",
    derandomize=fuzz.SEED not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")
if fuzz.SEED in os.environ:
    hypothesis.core.global_force_seed = fuzz.seed(0)


@pytest.fixture(scope="module", autouse=True)
def _as_users_compile(request):
    """What a test starts is compiled quickly, except where a file has AS_USERS_COMPILE."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(request.module, "AS_USERS_COMPILE"):
            for name, value in as_users_compile(os.environ).items():
                patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def _own_environment():
    """What a command that a test calls sets for its own process, which is that of many tests here, is gone after the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def pytest_addoption(parser):
    parser.addoption("--pool", metavar="N", type=int, default=0, help="run N files of tests at a time")
    parser.addoption("--slow-of", metavar="PATH", help="leave out the slow tests of files that are not listed in this file")


def pytest_configure(config):
    # A training would take it for its own end alone, and the next test would begin.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Ignored behind `&` in a script, in all that the tests start, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.pluginmanager.register(Progress(config), "gangway-progress")
    if num_workers := config.getoption("pool"):
        config.pluginmanager.register(Pool(num_workers), "gangway-pool")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Without a pool, the tests are run in this process."""
    if not session.config.getoption("pool") and not session.config.option.collectonly:
        start_jax()
        session.config.pluginmanager.register(Ledger(), "gangway-ledger")


def pytest_sessionfinish(session):
    ledger = session.config.pluginmanager.get_plugin("gangway-ledger") or Ledger(meter=False)
    ledger.close()


def pytest_unconfigure():
    # Pytest then collects garbage five times, which takes seconds after thousands of tests.
    gc.freeze()
