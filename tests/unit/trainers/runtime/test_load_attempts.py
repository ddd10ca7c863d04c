"""Executables that end the processes that load them."""

from __future__ import annotations

import faulthandler
import os
import threading

import pytest

from trainers.runtime import load_attempts
from trainers.runtime.load_attempts import MAX_CRASHES, MAX_ENDS, Attempts

NAME = "train_step-1.xla"
SEGMENTATION_FAULT = b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
ABORTED = b"Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n"


@pytest.fixture
def notes():
    return []


@pytest.fixture
def host(tmp_path, notes, monkeypatch):
    """`host()` is a process of host 0; `host(1)` one of another host of the same machine."""
    monkeypatch.setattr(load_attempts, "_in_log", False)  # an earlier test may have begun a training process here

    def make(number=0):
        return Attempts(tmp_path, number, notes.append)

    return make


@pytest.fixture
def file(tmp_path):
    path = tmp_path / NAME
    path.write_bytes(b"executable")
    return path


def die(process, last_words=b""):
    """What the kernel does at the end of a process: its locks are gone, its files stay. faulthandler may have written before."""
    os.write(process._journal, last_words)
    if process._reports_crashes:
        faulthandler.disable()
    os.close(process._journal)


def crash(process):
    die(process, SEGMENTATION_FAULT)


def records(tmp_path):
    return [path for path in (tmp_path / "attempts").rglob("*") if path.is_file()]


def test_what_goes_well_leaves_nothing(tmp_path, host, file, notes):
    process = host()
    with process.of(NAME):
        assert len(records(tmp_path)) == 1
        with process.of("fingerprints-1.xla"):
            pass
        assert len(records(tmp_path)) == 1
    assert records(tmp_path) == []
    host()
    assert file.exists()
    assert notes == []


@pytest.mark.parametrize("ended", [False, True])
def test_a_crash_makes_the_next_process_drop_the_file_and_those_only_that_were_tried(tmp_path, host, file, notes, ended):
    (tmp_path / "eval_step-1.xla").touch()
    process = host()
    with process.of("eval_step-1.xla"):
        process.begin(NAME)
    process.begin("fingerprints-1.xla")
    if ended:
        process.end(NAME)
    crash(process)
    assert not host().barred(NAME)
    assert file.exists() == ended
    assert (tmp_path / "eval_step-1.xla").exists()
    assert any(NAME in note for note in notes) != ended
    assert "Segmentation fault" in notes[0]
    before = len(notes)
    host()
    assert len(notes) == before  # it is judged once


def test_a_second_crash_ends_all_trying(host, file):
    assert MAX_CRASHES == 2
    for crashes in range(MAX_CRASHES):
        assert not host().barred(NAME)
        file.write_bytes(b"compiled again")
        process = host()
        process.begin(NAME)
        crash(process)
        assert crashes < MAX_CRASHES
    assert host().barred(NAME)
    assert not host().barred("fingerprints-1.xla")


@pytest.mark.parametrize("last_words", [b"", ABORTED])
def test_processes_that_were_killed_cost_the_file_only_after_several_in_succession(host, file, notes, last_words):
    """A gang is killed whenever one of its hosts fails, whatever the others do; and aborts if host 0 is gone."""
    for _ in range(3):
        for _ in range(2):
            process = host()
            process.begin(NAME)
            die(process, last_words)
        host().worked(NAME)
    assert file.exists()
    assert notes == []
    for _ in range(MAX_ENDS):
        process = host()
        assert file.exists()
        process.begin(NAME)
        die(process, last_words)
    process = host()
    assert not file.exists()
    assert f"{MAX_ENDS} processes" in notes[0]
    assert not process.barred(NAME)  # what is compiled now may be tried


def test_hosts_of_one_machine_that_are_killed_together_count_as_one(host, file, notes):
    for _ in range(MAX_ENDS - 1):
        gang = [host(number) for number in range(4)]
        for process in gang:
            process.begin(NAME)
        for process in gang:
            die(process)
    for number in range(4):
        host(number)
    assert file.exists()
    assert notes == []


def test_a_process_that_lives_is_not_judged(tmp_path, host, file, notes):
    process = host()
    process.begin(NAME)
    journal = records(tmp_path)
    host()
    assert records(tmp_path) == journal
    assert file.exists()
    process.end(NAME)
    assert notes == []


def test_an_error_of_the_first_use_counts_as_an_end(host, file):
    for _ in range(MAX_ENDS - 1):
        process = host()
        process.begin(NAME)
        process.failed(NAME)
    process = host()
    assert file.exists()
    process.begin(NAME)
    die(process)
    host()
    assert not file.exists()


def test_where_nothing_can_be_written_it_is_said_once(tmp_path, host, notes):
    (tmp_path / "attempts").write_text("in the way")
    process = host()
    for _ in range(2):
        with process.of(NAME):
            pass
    assert len(notes) == 1
    assert "would not be remembered" in notes[0]


def test_somebody_elses_faulthandler_is_left_alone(host, monkeypatch):
    enabled = []
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: True)
    monkeypatch.setattr(faulthandler, "enable", enabled.append)
    monkeypatch.setattr(faulthandler, "disable", lambda: enabled.append("disabled"))
    with host().of(NAME):
        pass
    assert enabled == []


def test_threads_may_try_at_the_same_time(tmp_path, host):
    process = host()

    def attempt(number):
        for _ in range(20):
            with process.of(f"program-{number}.xla"):
                pass

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records(tmp_path) == []
