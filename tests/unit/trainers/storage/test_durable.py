"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os

import pytest

from trainers.storage import durable


@pytest.mark.parametrize(
    "write", [lambda path, data: durable.write(path, data.decode()), lambda path, data: durable.write_shared(path, data, 0o600)]
)
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, write):
    path = tmp_path / "a"
    durable.write(path, "first")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, b"second")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "first"


def test_two_may_write_at_the_same_time(tmp_path, monkeypatch):
    path, sync = tmp_path / "a", os.fsync

    def overtaken(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        durable.write_shared(path, b"of the other", 0o600)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", overtaken)
    durable.write_shared(path, b"first", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "first"
