"""What a power cut may leave of what was written: only what the disk was told to keep (fsync), under such names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gangway.storage import documents, json_text
from gangway.storage.opening import place_of
from orchestrator.run_state.run_folder import RunFolder
from tests import in_folder
from trainers.checkpoint import layout, manifest


class Disk:
    """A disk that forgets everything but what it was told to keep. Of renames it may also keep one too early: a new name can then
    lie on a file that is empty."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.contents: dict[int, bytes] = {}
        """By inode."""
        self.names: dict[str, dict[str, int]] = {}
        """By folder."""
        self.too_early: list[str] = []
        """Names given to files whose contents could still be lost."""
        monkeypatch.setattr(os, "fsync", in_folder(folder, self._fsync, os.fsync))
        for name in ("replace", "rename", "link"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, in_folder(folder, self._naming(real), real))

    def kept(self, path: Path) -> str | None:
        """What a power cut would leave in that file; None: there would be none of this name."""
        inode = self.names.get(str(path.parent), {}).get(path.name)
        return None if inode is None else self.contents.get(inode, b"").decode()

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self.names[str(path)] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.contents[os.fstat(descriptor).st_ino] = path.read_bytes()

    def _naming(self, give):
        def give_and_look(source, target):
            if Path(source).is_file() and self.contents.get(os.stat(source).st_ino) != Path(source).read_bytes():
                self.too_early.append(str(target))
            give(source, target)

        return give_and_look


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(tmp_path, monkeypatch)


def test_a_manifest_outlives_a_power_cut(tmp_path, disk):
    manifest.write(place_of(tmp_path), manifest.Manifest(12, 100.0, {}))
    assert disk.too_early == []
    assert json_text.unseal(disk.kept(tmp_path / manifest.MANIFEST_FILE))["step"] == 12


def test_a_checkpoint_that_was_put_in_its_place_is_there_after_a_power_cut(tmp_path, disk):
    work = tmp_path / "12.saving-a"
    work.mkdir()
    layout.put_in_place(work, tmp_path / "12", replace=None)
    assert list(disk.names[str(tmp_path)]) == ["12"]


@pytest.mark.parametrize("write", [documents.write_text, documents.create_text])
def test_a_document_of_the_driver_is_never_found_empty(tmp_path, disk, write):
    path = tmp_path / "launch.json"
    write(path, '{"driver_term": 3}')
    assert disk.too_early == []
    assert json.loads(disk.contents[path.stat().st_ino]) == {"driver_term": 3}


def test_lines_that_were_added_are_there_after_a_power_cut(tmp_path, disk):
    folder = RunFolder(str(tmp_path))
    for text in ("first\n", "second\n"):
        folder.append("incidents.jsonl", text)
    assert disk.contents[(tmp_path / "incidents.jsonl").stat().st_ino] == b"first\nsecond\n"
