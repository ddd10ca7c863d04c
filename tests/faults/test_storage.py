"""Storage that is full, read-only or gone: the save fails at once and is told, and a later save makes it good."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from gangway.storage.row import WriterTerm
from tests.programs import checkpointing
from tests.unit.training import trainer
from trainers import runtime
from trainers.checkpoint import layout
from trainers.checkpoint.array_io import ArrayFiles
from trainers.loop import saver

# When one array cannot be written, the writers of the others call back to a loop that Orbax has closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROWS = 40_000
"""Two arrays of 2.5 MB each: a fraction of the small file system."""
SIZE_MB = 24


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = mount("-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder))
    if mounted.returncode:
        pytest.skip(f"this machine lets nobody mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def mount(*arguments):
    return subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)


def fill(folder, leave_mb):
    space = os.statvfs(folder)
    with open(folder / "ballast", "wb") as file:
        file.write(bytes(space.f_bavail * space.f_frsize - leave_mb * 2**20))


def check_made_good(manager, step):
    """The next save succeeds, and a new process takes it up."""
    state = manager.save_now(step, ROWS)
    assert not manager.failing
    assert manager.saved[-1] == step
    again = checkpointing.manager(manager.folder)
    assert checkpointing.same(again.restore(checkpointing.abstract(state)).state, state)


def test_a_full_disk_is_seen_before_anything_is_written(small_disk):
    manager = checkpointing.manager(small_disk / "checkpoints")
    manager.save_now(1, ROWS)
    fill(small_disk, leave_mb=6)
    manager.save_now(2, ROWS)
    assert manager.saved == [1]
    assert manager.failed[0][1].startswith("no room in")
    assert manager.failing
    assert checkpointing.names(manager.folder) == ["1"]
    (small_disk / "ballast").unlink()
    check_made_good(manager, 2)


def test_a_disk_that_fills_while_saving_costs_that_save_only(small_disk, monkeypatch):
    monkeypatch.setattr(layout, "obstacle", lambda folder, num_bytes: "")  # there was room when it was looked for
    manager = checkpointing.manager(small_disk / "checkpoints")
    manager.save_now(1, ROWS)
    fill(small_disk, leave_mb=1)
    manager.save_now(2, ROWS)
    assert manager.saved == [1]
    assert "No space left on device" in manager.failed[0][1]
    assert checkpointing.names(manager.folder) == ["1"]
    (small_disk / "ballast").unlink()
    check_made_good(manager, 2)


def test_room_is_looked_for_before_the_first_step_and_what_a_killed_save_has_left_is_in_nobodys_way(small_disk):
    driven = checkpointing.manager(small_disk / "checkpoints", term=WriterTerm(2, 1))
    shapes = checkpointing.abstract(checkpointing.state(1, ROWS))
    assert driven.no_room(shapes) == ""
    fill(small_disk, leave_mb=6)
    assert re.match(rf"no room in {driven.folder}: 9\.\d MiB needed, [56]\.\d MiB free; free some", driven.no_room(shapes))
    # As a process leaves it that was killed while it saved; the next generation finds it.
    left = small_disk / "checkpoints" / "3-2_1_00000000"
    left.mkdir()
    os.rename(small_disk / "ballast", left / "state")
    later = checkpointing.manager(small_disk / "checkpoints", term=WriterTerm(2, 2))
    assert (later.no_room(shapes), left.exists()) == ("", False)


def test_a_run_waits_for_room_before_its_first_step_and_with_its_last_state_and_trains_no_step_twice(small_disk, monkeypatch):
    monkeypatch.setattr(saver, "LOOK_EVERY_S", 0.01)
    told, waits = [], []

    def send(event):
        told.append(event)
        if event == {**event, "ev": "phase", "phase": "hold"}:
            waits.append([event["ev"] for event in told if event["ev"] in ("first_step", "save_failed")])
            (small_disk / "ballast").unlink()
        elif event["ev"] == "first_step":
            fill(small_disk, leave_mb=3)

    before = runtime.current()
    runtime.install(runtime.Runtime(send))
    try:
        fill(small_disk, leave_mb=3)
        made = trainer(small_disk, max_num_steps=6, checkpoint={})
        made.train()
    finally:
        runtime.install(before)
    assert made.output.checkpoint_path
    assert [event["step"] for event in told if event["ev"] in ("first_step", "saved")] == [1, 6]
    assert [event["error"][:7] for event in told if event["ev"] == "save_failed"] == ["no room"]
    assert waits == [[], ["first_step", "save_failed"]]


def test_a_disk_that_became_read_only_is_named(small_disk):
    manager = checkpointing.manager(small_disk / "checkpoints")
    manager.save_now(1, ROWS)
    assert mount("-o", "remount,ro", str(small_disk)).returncode == 0
    manager.save_now(2, ROWS)
    assert f"cannot write to {manager.folder}: Read-only file system" in manager.failed[0][1]
    assert mount("-o", "remount,rw", str(small_disk)).returncode == 0
    check_made_good(manager, 2)


def test_another_full_disk_is_nobodys_business(small_disk, tmp_path, monkeypatch):
    fill(small_disk, leave_mb=0)
    monkeypatch.chdir(small_disk)
    check_made_good(checkpointing.manager(tmp_path / "checkpoints"), 1)


def test_a_folder_that_is_gone_is_not_made_anew_on_the_wrong_disk(tmp_path):
    storage = tmp_path / "storage"
    manager = checkpointing.manager(storage / "checkpoints")
    manager.save_now(1)
    storage.rename(tmp_path / "away")
    manager.save_now(2)
    assert "is gone: bring the storage back" in manager.failed[0][1]
    assert not storage.exists()
    (tmp_path / "away").rename(storage)
    check_made_good(manager, 2)


def test_a_folder_that_goes_while_saving_costs_that_save_only(tmp_path, monkeypatch):
    storage, merge = tmp_path / "storage", ArrayFiles.merge
    manager = checkpointing.manager(storage / "checkpoints")
    manager.save_now(1)

    def gone(self, folder):
        storage.rename(tmp_path / "away")
        merge(self, folder)

    monkeypatch.setattr(ArrayFiles, "merge", gone)
    manager.save_now(2)
    assert [step for step, _ in manager.failed] == [2]
    assert manager.failing
    monkeypatch.undo()
    (tmp_path / "away").rename(storage)
    check_made_good(manager, 2)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    manager = checkpointing.manager(tmp_path / "file" / "checkpoints")
    manager.save_now(1)
    assert "Not a directory; make it writable" in manager.failed[0][1]
