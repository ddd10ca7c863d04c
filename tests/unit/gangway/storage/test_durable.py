"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os

import pytest

from gangway.storage import durable
from tests import in_folder


@pytest.mark.parametrize(
    "write", [lambda path, data: durable.write(path, data.decode()), lambda path, data: durable.write_shared(path, data, 0o600)]
)
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, write):
    path = tmp_path / "a"
    durable.write(path, "first")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", in_folder(tmp_path, full, os.fsync))
    with pytest.raises(OSError, match="No space left"):
        write(path, b"second")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "first"


def test_two_may_write_at_the_same_time(tmp_path, monkeypatch):
    path, sync = tmp_path / "a", os.fsync

    def overtaken(descriptor):
        monkeypatch.undo()
        durable.write_shared(path, b"of the other", 0o600)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", in_folder(tmp_path, overtaken, sync))
    durable.write_shared(path, b"first", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "first"


def left_in(folder, name):
    path = durable.beside(folder / name)
    path.write_text("half")
    return path


def test_what_killed_processes_left_is_deleted_and_nothing_else(tmp_path):
    names = ["00000001.json", "mine.tmp", "notes.0123.tmp", "a.tmp.json"]
    for name in names:
        (tmp_path / name).write_text("mine")
    left_in(tmp_path, "00000002.json")
    names.append(durable.beside(tmp_path / "a_folder").name)
    (tmp_path / names[-1]).mkdir()
    durable.delete_left(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    durable.delete_left(tmp_path / "absent")


def test_a_file_whose_temporary_one_is_deleted_as_left_behind_is_written_again(tmp_path, monkeypatch):
    replace, deleted = os.replace, []

    def replaced(source, target):
        if not deleted:
            deleted.append(source)
            durable.delete_left(tmp_path)
        replace(source, target)

    monkeypatch.setattr(os, "replace", in_folder(tmp_path, replaced, replace))
    durable.write_shared(tmp_path / "a", b"whole", 0o600)
    assert deleted
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "whole")]


def test_a_folder_that_is_gone_is_an_error_and_not_made_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        durable.write_shared(tmp_path / "gone" / "a", b"whole", 0o600)
    assert not list(tmp_path.iterdir())
