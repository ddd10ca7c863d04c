"""A run is the same wherever its folder is; a copy is another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gangway.storage import identity
from gangway.storage.object_store import Limits


def test_a_run_that_is_moved_or_reached_through_a_link_is_the_same(tmp_path):
    run = tmp_path / "storage" / "run"
    run.mkdir(parents=True)
    first = identity.of(run)
    assert identity.of(run) == first
    (tmp_path / "link").symlink_to(tmp_path / "storage")
    assert identity.of(tmp_path / "link" / "run") == first
    (tmp_path / "storage").rename(tmp_path / "elsewhere")
    assert identity.of(tmp_path / "elsewhere" / "run") == first
    assert first.notes == ()


def test_a_copy_is_a_run_of_its_own_and_says_so_once(tmp_path):
    first = identity.of(made(tmp_path / "run"))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = identity.of(tmp_path / "copy")
    assert copy.id != first.id
    assert f"{tmp_path / 'copy'} is a copy of {tmp_path / 'run'}, which is still there" in copy.notes[0]
    assert identity.of(tmp_path / "copy") == (copy.id, ())
    assert identity.of(tmp_path / "run") == first


def test_copies_of_a_run_that_is_moved_then_are_runs_of_their_own(tmp_path):
    first = identity.of(made(tmp_path / "run"))
    for name in ("copy", "copy-2"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    (tmp_path / "run").rename(tmp_path / "moved")
    copies = [identity.of(tmp_path / name) for name in ("copy", "copy-2")]
    assert len({first.id, *(copy.id for copy in copies)}) == 3
    assert f"{tmp_path / 'copy'} is a copy of a run that was at {tmp_path / 'run'} and has gone from there" in copies[0].notes[0]
    assert identity.of(tmp_path / "moved") == first
    assert [identity.of(tmp_path / name) for name in ("copy", "copy-2")] == [(copy.id, ()) for copy in copies]


def test_so_is_a_copy_beside_its_original_in_storage_that_is_renamed(tmp_path):
    (tmp_path / "storage").mkdir()
    first = identity.of(made(tmp_path / "storage" / "run"))
    shutil.copytree(tmp_path / "storage" / "run", tmp_path / "storage" / "copy")
    (tmp_path / "storage").rename(tmp_path / "renamed")
    assert identity.of(tmp_path / "renamed" / "copy").id != first.id
    assert identity.of(tmp_path / "renamed" / "run") == first


@pytest.mark.parametrize("disk", ["another", "of a mounted bucket"])
def test_a_run_that_was_moved_to_another_disk_is_the_same(tmp_path, monkeypatch, disk):
    if disk == "of a mounted bucket":
        table = tmp_path / "mounts"
        table.write_text(f"36 35 98:0 / {tmp_path} rw - fuse.sshfs server rw\n")
        monkeypatch.setattr(identity, "TABLE", table)
    first = identity.of(made(tmp_path / "run"))
    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    shutil.rmtree(tmp_path / "run")
    if disk == "another":
        monkeypatch.setattr(identity, "_disk", lambda folder: [1, 2, 3])
    assert identity.of(tmp_path / "moved") == first


def test_gangs_of_copies_have_names_of_their_own(tmp_path):
    names = {identity.name_in_cluster("mine", folder, "0123") for folder in (tmp_path / "run", tmp_path / "copy", "gs://b/run")}
    assert len(names) == 3
    (tmp_path / "link").symlink_to(tmp_path)
    assert identity.name_in_cluster("mine", tmp_path / "link" / "run", "0123") in names


def test_another_run_at_the_old_place_makes_no_copy_of_one_that_was_moved(tmp_path):
    first = identity.of(made(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert identity.of(made(tmp_path / "run")) != first
    assert identity.of(tmp_path / "moved") == first


def test_a_path_inside_a_run_goes_with_it(tmp_path):
    run = str(made(tmp_path / "run"))
    path = f"{run}/checkpoints/8"
    assert identity.inside(path, run) == "checkpoints/8"
    assert identity.outside("checkpoints/8", "/elsewhere/run") == "/elsewhere/run/checkpoints/8"
    (tmp_path / "link").symlink_to(run)
    assert identity.inside(path, str(tmp_path / "link")) == "checkpoints/8"
    assert identity.inside(str(tmp_path / "mine" / "8"), run) == "../mine/8"
    assert identity.outside("../mine/8", "/elsewhere/run") == "/elsewhere/mine/8"
    for elsewhere in ("/data/checkpoints/8", f"{tmp_path}-2/8", "gs://bucket/8"):
        assert identity.outside(identity.inside(elsewhere, run), "/elsewhere") == elsewhere


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_run_whose_old_place_cannot_be_asked_is_taken_for_moved_soon_and_says_so(tmp_path, monkeypatch):
    variables = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    brief, asked, place_of = Limits(request_s=0.1, patience_s=0.2), [], identity.place_of
    monkeypatch.setattr(identity, "BRIEFLY", brief)
    monkeypatch.setattr(identity, "place_of", lambda path, limits=None: asked.append((path, limits)) or place_of(path, brief))
    run = made(tmp_path / "run")
    first = identity.of(run)
    identity.KIND.write(run / identity.KIND.name, {"id": first.id, "folder": "s3://bucket-of-before/run"})
    found = identity.of(run)
    assert found.id == first.id
    assert ("s3://bucket-of-before/run", brief) in asked
    assert "was at s3://bucket-of-before/run before, where nobody can look now" in found.notes[0]
    assert identity.of(run) == first  # it is asked, and told, once
