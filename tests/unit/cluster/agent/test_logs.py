"""Logs on the machine and their copies in the run's folder, with real files."""

import os
import threading
import time

import fsspec
import pytest

from cluster.agent import logs
from cluster.agent.logs import Logs, cut, keep_newest

LONG_S = 30.0


@pytest.fixture
def make(tmp_path):
    """Makes the logs of one host; the folder of their copies is called `run`."""
    made = []

    def make(copies=None):
        told = []
        made.append(Logs(str(tmp_path / "local"), "job", "host-0003", copies or str(tmp_path / "run" / "host-0003"), told.append))
        return made[-1], told

    yield make
    for each in made:
        each.close(0.0)


def write(kept, name, text):
    path, trouble = kept.new(name)
    assert trouble is None
    with open(path, "a") as file:
        file.write(text)
    return path


def test_what_is_printed_is_kept_on_the_machine_and_copied_to_the_run(make, tmp_path):
    kept, told = make()
    path = write(kept, "a.log", "one\n")
    assert path == str(tmp_path / "local" / "job" / "host-0003" / "a.log")
    assert kept.copy_of(path) == str(tmp_path / "run" / "host-0003" / "a.log")
    kept.copy()
    write(kept, "a.log", "two\n")
    assert kept.close(LONG_S)
    with open(kept.copy_of(path)) as copy:
        assert copy.read() == "one\ntwo\n"
    assert os.listdir(tmp_path / "run" / "host-0003") == ["a.log"]
    assert told == []


def test_a_bucket_gets_copies_too(make):
    kept, told = make("memory://bucket/run/host-0003")
    write(kept, "a.log", "text")
    assert kept.close(LONG_S)
    assert fsspec.filesystem("memory").cat_file("/bucket/run/host-0003/a.log") == b"text"
    assert told == []


def test_only_the_end_of_a_large_log_is_copied_and_it_says_so(make, monkeypatch):
    monkeypatch.setattr(logs, "COPIED_BYTES", 10)
    kept, _ = make()
    path = write(kept, "a.log", "x" * 90 + "0123456789")
    assert kept.close(LONG_S)
    with open(kept.copy_of(path)) as copy:
        first, last = copy.read().splitlines()
    assert first.startswith(f"[90 bytes before this are in {path} on ")
    assert last == "0123456789"


def test_what_an_agent_that_was_killed_left_is_copied_by_the_next_and_nothing_else_is_copied_again(make, monkeypatch):
    first, _ = make()
    write(first, "a.log", "copied")
    assert first.close(LONG_S)
    left = write(first, "b.log", "left")
    written = []
    monkeypatch.setattr(logs, "_write", lambda path, payload: written.append((path, payload)))
    second, _ = make()
    assert second.close(LONG_S)
    assert written == [(second.copy_of(left), b"left")]


def test_a_folder_that_cannot_be_written_is_told_once_and_the_copy_is_made_when_it_can(make, tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    kept, told = make()
    path = write(kept, "a.log", "text")
    for _ in range(3):
        kept.copy()
        time.sleep(0.02)
    deadline_s = time.monotonic() + LONG_S
    while not told and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (message,) = told
    assert message.startswith(f"what the training process prints cannot be copied to {tmp_path / 'run' / 'host-0003'} (")
    assert f"it is in {tmp_path / 'local' / 'job' / 'host-0003'} on " in message
    (tmp_path / "run").unlink()
    assert kept.close(LONG_S)
    with open(kept.copy_of(path)) as copy:
        assert copy.read() == "text"
    assert len(told) == 1


def test_a_shared_folder_that_hangs_holds_nobody_up(make, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(logs, "_write", lambda path, payload: answered.wait(LONG_S))
    kept, _ = make()
    write(kept, "a.log", "text")
    kept.copy()
    assert not kept.close(0.1)
    write(kept, "b.log", "text")
    answered.set()


def test_a_log_that_cannot_be_opened_stops_nothing(make, tmp_path):
    (tmp_path / "local").write_text("a file where the folder should be")
    kept, _ = make()
    path, trouble = kept.new("a.log")
    assert path == os.devnull
    assert trouble.startswith(f"what the training process prints is lost: its log {tmp_path / 'local'}")
    assert kept.copy_of(path) is None


def test_a_log_that_grows_too_large_is_cut_and_its_end_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "COPIED_BYTES", 4)
    path = tmp_path / "a.log"
    with open(path, "ab", buffering=0) as log:  # as the process has it open
        log.write(b"0123456789")
        cut(str(path), 10)
        assert path.read_bytes() == b"0123456789"
        cut(str(path), 9)
        log.write(b"more")
    assert path.read_bytes() == b"more"
    assert (tmp_path / "a.log.1").read_bytes() == b"6789"
    cut(str(path) + ".1", 1)
    assert (tmp_path / "a.log.1").read_bytes() == b"6789"


def aged(folder, *sizes):
    """Files of these sizes, the oldest first."""
    for number, size in enumerate(sizes):
        (folder / f"{number}.log").write_bytes(b"x" * size)
        os.utime(folder / f"{number}.log", (1000 + number, 1000 + number))


def test_the_newest_logs_are_kept_by_number_and_by_size(tmp_path):
    aged(tmp_path, 1, 1, 1, 1)
    keep_newest(str(tmp_path), max_files=3)
    assert sorted(os.listdir(tmp_path)) == ["1.log", "2.log", "3.log"]
    keep_newest(str(tmp_path), max_bytes=2)
    assert sorted(os.listdir(tmp_path)) == ["2.log", "3.log"]
    keep_newest(str(tmp_path), max_bytes=0)
    assert os.listdir(tmp_path) == ["3.log"]


def test_copies_are_bounded_as_the_logs_are(make, tmp_path):
    (tmp_path / "run" / "host-0003").mkdir(parents=True)
    aged(tmp_path / "run" / "host-0003", *[1] * (logs.MAX_FILES + 5))
    kept, _ = make()
    write(kept, "new.log", "text")
    assert kept.close(LONG_S)
    left = os.listdir(tmp_path / "run" / "host-0003")
    assert len(left) == logs.MAX_FILES
    assert "new.log" in left
    assert "0.log" not in left


def test_a_machine_keeps_its_logs_tidy_and_forgets_runs_of_long_ago(make, monkeypatch, tmp_path):
    monkeypatch.setattr(logs, "TIDY_EVERY_S", 0.01)
    for name in ("old", "job", "other"):
        (tmp_path / "local" / name / "host-0003").mkdir(parents=True)
    aged(tmp_path / "local" / "job" / "host-0003", *[1] * (logs.MAX_FILES + 5))
    os.utime(tmp_path / "local" / "old", (1000, 1000))
    make()
    deadline_s = time.monotonic() + LONG_S
    while len(os.listdir(tmp_path / "local" / "job" / "host-0003")) > logs.MAX_FILES and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(os.listdir(tmp_path / "local" / "job" / "host-0003")) == logs.MAX_FILES
    assert sorted(os.listdir(tmp_path / "local")) == ["job", "other"]
