"""The pool runs every test once, whatever becomes of a worker, and a fork never copies a thread."""

import os
import signal
import subprocess
import sys

import pytest

from tests import ROOT, ledger
from tests.programs.processes import PATIENCE_S, wait_until

DIES = """
import os, signal
def test_before(): ...
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): ...
"""
FAILS = """
import logging, sys
logger = logging.getLogger("made at import")
logger.addHandler(logging.StreamHandler(sys.stderr))
def test_fails(tmp_path):
    print("of the test that fails")
    logger.warning("logged by a handler of an import")
    assert str(tmp_path) == 'wrong'
"""
SHARES = """
import pytest
@pytest.fixture(scope="module")
def once():
    print("set up")
    yield
    print("torn down")
def test_one(once):
    for _ in range(1000): print("of another file")
def test_other(once): ...
@pytest.mark.skip
def test_skipped(): ...
"""
WAITS = """
import pathlib, time
import pytest
@pytest.fixture(scope="module")
def once():
    yield
    (pathlib.Path(__file__).parent / "torn down").touch()
def test(once):
    (pathlib.Path(__file__).parent / "set up").touch()
    time.sleep(600)
"""
STARTS_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(5,)).start()
def test(): ...
"""
FILES = {
    "conftest.py": "from tests.conftest import *\n",
    "test_dies.py": DIES,
    "test_fails.py": FAILS,
    "test_shares.py": SHARES,
}


def run(folder, *options):
    command = (
        sys.executable,
        "-m",
        "pytest",
        "--pool=2",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
        *options,
    )
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_worker_that_dies_has_failed_its_test_alone(folder):
    ran = run(folder)
    assert ran.returncode == 1
    assert "2 failed, 4 passed, 1 skipped" in ran.stdout, ran.stdout + ran.stderr
    assert "the worker that ran it ended with status -9" in ran.stdout
    assert "test_dies.py::test_dies" in ran.stdout
    assert "test_fails.py::test_fails" in ran.stdout
    assert "of the test that fails" in ran.stdout
    assert "logged by a handler of an import" in ran.stdout
    assert "of another file" not in ran.stdout, "of a test that passed"
    assert "Logging error" not in ran.stdout + ran.stderr
    assert "worker-" in ran.stdout, "workers have folders of their own"
    assert not [line for line in ledger.read() if line["test"].startswith("test_dies.py")], "counted twice"


def test_the_first_failure_ends_it_when_asked(folder):
    (folder / "test_dies.py").unlink()
    ran = run(folder, "-x")
    assert ran.returncode == 1
    assert "stopping after 1 failures" in ran.stdout, ran.stdout + ran.stderr


def test_a_thread_that_a_module_starts_is_refused(folder):
    (folder / "test_shares.py").write_text(STARTS_A_THREAD)
    ran = run(folder)
    assert "1 threads run when the tests are collected" in ran.stdout + ran.stderr
    assert ran.returncode not in (0, 1)


def test_fixtures_are_torn_down_after_ctrl_c(folder):
    """Whatever they have started would be left running."""
    (folder / "test_shares.py").write_text(WAITS)
    command = (sys.executable, "-m", "pytest", "--pool=2", "-p", "no:cacheprovider", str(folder / "test_shares.py"))
    log = (folder / "log").open("w")
    # What was started in the background, as by `nohup make test-all &`, ignores the signal, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process:
        signal.signal(signal.SIGINT, before)
        assert wait_until((folder / "set up").exists)
        os.killpg(process.pid, signal.SIGINT)
    printed = (folder / "log").read_text()
    assert process.returncode == 2, printed
    assert (folder / "torn down").exists(), printed
