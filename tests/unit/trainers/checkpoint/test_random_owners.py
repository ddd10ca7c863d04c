"""Whatever dies, sleeps or loses power: what was saved is restored by all who come later, and nobody else's is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import fuzz
from tests.programs import owners
from tests.programs.processes import PATIENCE_S


@pytest.fixture
def processes():
    """With the environment of one test."""
    made = owners.Processes()
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_disk():
    """For all tests that need no variables: it imports for seconds."""
    made = owners.Processes()
    yield made
    made.close()


def case(processes: owners.Processes, run_dir: str, told: Path, seed: int, *, power_cuts: bool = False) -> list[str]:
    """Lets the drivers of one case loose; returns what is wrong with what came of it."""
    started: list[int] = []

    def none_lives() -> bool:
        return not any(map(processes.live, started))

    for driver in owners.drivers(seed, power_cuts=power_cuts):
        alone = power_cuts or driver.is_last
        wait_until(lambda: none_lives() or (not alone and len(owners.lines(told)) >= driver.starts_after))  # noqa: B023
        started.append(processes.start(driver, run_dir, told))
    wait_until(none_lives)
    return owners.wrong(owners.lines(told))


def wait_until(true) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def cases(in_suite: int) -> range:
    first = fuzz.seed(1) * 1000
    return range(first, first + fuzz.count(in_suite))


def test_many_drivers_take_a_run_on_a_disk_from_each_other(tmp_path, on_disk):
    wrong = {}
    for seed in cases(2):
        told = tmp_path / f"{seed}.jsonl"
        if problems := case(on_disk, str(tmp_path / f"{seed}"), told, seed):
            wrong[seed] = (problems, told.read_text())
    assert wrong == {}


@pytest.mark.slow("the same on a disk is in `make test`")
def test_many_drivers_take_a_run_in_a_bucket_from_each_other(tmp_path, stores, monkeypatch, request):
    stores["gs"].set(monkeypatch)
    processes = request.getfixturevalue("processes")  # with this environment
    wrong = {}
    for seed in cases(1):
        told = tmp_path / f"{seed}.jsonl"
        if problems := case(processes, stores["gs"].url(), told, seed):
            wrong[seed] = (problems, told.read_text())
    assert wrong == {}


def test_many_power_cuts_lose_nothing_that_was_saved(tmp_path, on_disk):
    wrong = {}
    for seed in cases(2):
        told = tmp_path / f"{seed}.jsonl"
        if problems := case(on_disk, str(tmp_path / f"{seed}"), told, seed, power_cuts=True):
            wrong[seed] = (problems, told.read_text())
    assert wrong == {}
