"""Logs on the machine and their copies in the run's folder, with real files."""

import os
import threading
import time

import fsspec
import pytest

from cluster.agent import log_mark, logs
from cluster.agent.logs import Logs, cut, keep_newest
from gangway.storage.ours import NotOursError

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
    path = write(kept, "process-1-0001.log", "one\n")
    assert path == str(tmp_path / "local" / "job" / "host-0003" / "process-1-0001.log")
    assert kept.copy_of(path) == str(tmp_path / "run" / "host-0003" / "process-1-0001.log")
    kept.copy()
    write(kept, "process-1-0001.log", "two\n")
    assert kept.close(LONG_S)
    with open(kept.copy_of(path)) as copy:
        assert copy.read() == "one\ntwo\n"
    assert sorted(os.listdir(tmp_path / "run" / "host-0003")) == [log_mark.MARK, "process-1-0001.log"]
    assert told == []


def test_a_bucket_gets_copies_too(make):
    kept, told = make("memory://bucket/run/host-0003")
    write(kept, "process-1-0001.log", "text")
    assert kept.close(LONG_S)
    assert fsspec.filesystem("memory").cat_file("/bucket/run/host-0003/process-1-0001.log") == b"text"
    assert told == []


def test_only_the_end_of_a_large_log_is_copied_and_it_says_so(make, monkeypatch):
    monkeypatch.setattr(logs, "COPIED_BYTES", 10)
    kept, _ = make()
    path = write(kept, "process-1-0001.log", "x" * 90 + "0123456789")
    assert kept.close(LONG_S)
    with open(kept.copy_of(path)) as copy:
        first, last = copy.read().splitlines()
    assert first.startswith(f"[90 bytes before this are in {path} on ")
    assert last == "0123456789"


def test_what_an_agent_that_was_killed_left_is_copied_by_the_next_and_nothing_else_is_copied_again(make, monkeypatch):
    first, _ = make()
    write(first, "process-1-0001.log", "copied")
    assert first.close(LONG_S)
    left = write(first, "process-1-0002.log", "left")
    written = []
    monkeypatch.setattr(logs, "_write", lambda path, payload: written.append((path, payload)))
    second, _ = make()
    assert second.close(LONG_S)
    assert written == [(second.copy_of(left), b"left")]


def test_a_folder_that_cannot_be_written_is_reported_once_and_the_copy_is_made_when_it_can(make, tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    kept, told = make()
    path = write(kept, "process-1-0001.log", "text")
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
    write(kept, "process-1-0001.log", "text")
    kept.copy()
    assert not kept.close(0.1)
    write(kept, "process-1-0002.log", "text")
    answered.set()


def test_a_log_that_cannot_be_opened_stops_nothing(make, tmp_path):
    (tmp_path / "local").write_text("a file where the folder should be")
    kept, _ = make()
    path, trouble = kept.new("process-1-0001.log")
    assert path == os.devnull
    assert trouble.startswith(f"what the training process prints is lost: its log {tmp_path / 'local'}")
    assert kept.copy_of(path) is None


def test_a_log_that_grows_too_large_is_cut_and_its_end_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "COPIED_BYTES", 4)
    path = tmp_path / "process-1-0001.log"
    with open(path, "ab", buffering=0) as log:  # as the process has it open
        log.write(b"0123456789")
        cut(str(path), 10)
        assert path.read_bytes() == b"0123456789"
        cut(str(path), 9)
        log.write(b"more")
    assert path.read_bytes() == b"more"
    assert (tmp_path / "process-1-0001.log.1").read_bytes() == b"6789"
    cut(str(path) + ".1", 1)
    assert (tmp_path / "process-1-0001.log.1").read_bytes() == b"6789"


def aged(folder, *sizes):
    """Files of these sizes, the oldest first."""
    for number, size in enumerate(sizes):
        (folder / f"process-1-{number:04d}.log").write_bytes(b"x" * size)
        os.utime(folder / f"process-1-{number:04d}.log", (1000 + number, 1000 + number))


def names(folder):
    return sorted(name for name in os.listdir(folder) if name != log_mark.MARK)


def test_the_newest_logs_are_kept_by_number_and_by_size(tmp_path):
    aged(tmp_path, 1, 1, 1, 1)
    assert log_mark.claim(str(tmp_path))
    keep_newest(str(tmp_path), max_files=3)
    assert names(tmp_path) == ["process-1-0001.log", "process-1-0002.log", "process-1-0003.log"]
    keep_newest(str(tmp_path), max_bytes=2)
    assert names(tmp_path) == ["process-1-0002.log", "process-1-0003.log"]
    keep_newest(str(tmp_path), max_bytes=0)
    assert names(tmp_path) == ["process-1-0003.log"]


def test_copies_are_bounded_as_the_logs_are(make, tmp_path):
    (tmp_path / "run" / "host-0003").mkdir(parents=True)
    aged(tmp_path / "run" / "host-0003", *[1] * (logs.MAX_FILES + 5))
    kept, _ = make()
    write(kept, "process-9-0001.log", "text")
    assert kept.close(LONG_S)
    left = names(tmp_path / "run" / "host-0003")
    assert len(left) == logs.MAX_FILES
    assert "process-9-0001.log" in left
    assert "process-1-0000.log" not in left


@pytest.fixture
def local(tmp_path, monkeypatch):
    """The folder that `hosts.log_dir` names, with the logs of a run of long ago; tidied all the time."""
    monkeypatch.setattr(logs, "TIDY_EVERY_S", 0.01)
    folder = tmp_path / "local"
    for run in (folder / "old", folder / "old" / "host-0003"):
        assert log_mark.claim(str(run))
    aged(folder / "old" / "host-0003", 1)
    return folder


def tidied(make, local):
    """Makes the logs of the run `job`, and waits until the machine was tidied. Returns what is in the folder then."""
    kept, _ = make()
    write(kept, "process-9-0001.log", "text")
    deadline_s = time.monotonic() + LONG_S
    host = local / "job" / "host-0003"
    while (len(names(host)) > logs.MAX_FILES or not os.path.exists(local / "tidied")) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return sorted(os.listdir(local))


@pytest.fixture
def forgotten(monkeypatch, local):
    """Notes that old runs were forgotten, whatever came of it."""
    forget = logs._forget_old

    def noted(root):
        forget(root)
        (local / "tidied").touch()

    monkeypatch.setattr(logs, "_forget_old", noted)


def age(path):
    os.utime(path, (1000, 1000))


@pytest.mark.usefixtures("forgotten")
def test_a_machine_keeps_its_logs_tidy_and_forgets_runs_of_long_ago(make, local):
    for name in ("job", "other"):
        (local / name / "host-0003").mkdir(parents=True)
        assert log_mark.claim(str(local / name))
    aged(local / "job" / "host-0003", *[1] * (logs.MAX_FILES + 5))
    age(local / "old")
    assert tidied(make, local) == ["job", "other", "tidied"]
    assert len(names(local / "job" / "host-0003")) == logs.MAX_FILES


@pytest.mark.usefixtures("forgotten")
def test_what_a_user_has_beside_the_logs_stays_however_old(make, local, tmp_path):
    (local / "thesis").mkdir()
    (local / "thesis" / "host-0001.txt").write_text("all of it")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / log_mark.MARK).touch()
    (local / "linked").symlink_to(tmp_path / "elsewhere")
    (local / "old" / "notes").mkdir()
    (local / "old" / "host-0003" / "plot.log").write_text("mine")
    for path in (local / "thesis", local / "old", tmp_path / "elsewhere"):
        age(path)
    assert tidied(make, local) == ["job", "linked", "old", "thesis", "tidied"]
    assert os.listdir(local / "thesis") == ["host-0001.txt"]
    assert sorted(os.listdir(local / "old")) == [log_mark.MARK, "host-0003", "notes"]
    assert names(local / "old" / "host-0003") == ["plot.log"]  # the logs themselves are gone
    assert (tmp_path / "elsewhere" / log_mark.MARK).exists()


def test_a_run_whose_folder_a_user_has_files_in_is_never_forgotten_nor_is_his_log_cut(make, local, monkeypatch):
    """`log_dir` is a folder of projects, and one of them is called like the run."""
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 3)
    (local / "job" / "host-0003").mkdir(parents=True)
    (local / "job" / "main.py").write_text("print()")
    (local / "job" / "host-0003" / "long.log").write_text("0123456789")
    kept, _ = make()
    path = write(kept, "process-9-0001.log", "0123456789")
    assert not log_mark.is_marked(str(local / "job"))
    assert not log_mark.is_marked(os.path.dirname(path))
    for each in (local / "job", path):
        with pytest.raises(NotOursError, match=r"^\S+job\S* stays: it "):
            log_mark.delete(str(each))
    keep_newest(os.path.dirname(path), max_files=0, max_bytes=0)
    assert list(log_mark.logs_in(os.path.dirname(path))) == []
    assert sorted(os.listdir(local / "job" / "host-0003")) == ["long.log", "process-9-0001.log"]


def test_a_folder_that_an_earlier_version_left_is_marked_when_it_is_used_again(tmp_path):
    folder = tmp_path / "job" / "host-0003"
    folder.mkdir(parents=True)
    (folder / "process-77-0001.log.1").touch()
    assert log_mark.claim(str(tmp_path / "job"))
    assert log_mark.claim(str(folder))
