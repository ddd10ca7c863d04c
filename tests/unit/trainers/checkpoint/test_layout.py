"""Which checkpoints may go, and whether there is room for another."""

import os

import pytest

from gangway.errors import CheckpointError
from trainers.checkpoint import layout, manifest, readers
from trainers.checkpoint.retention import Retention


def put(folder, step, *, whole=True):
    path = folder / str(step)
    path.mkdir(parents=True)
    (path / "meta.json").write_text("meta")
    files = {"meta.json": manifest.digest(path / "meta.json")}
    manifest.write(path, manifest.Manifest(step if isinstance(step, int) else None, 0.0, files))
    if not whole:
        (path / "meta.json").write_text("shorter or longer")
    return path


def test_the_old_goes_only_for_whole_newer_ones(tmp_path):
    for step, whole in ((1, True), (2, False), (3, True)):
        put(tmp_path, step, whole=whole)
    assert layout.delete_old(tmp_path, 3, (), Retention(2)) == []
    assert layout.steps(tmp_path) == [1, 2, 3]
    put(tmp_path, 4)
    layout.delete_old(tmp_path, 4, (), Retention(2))
    assert layout.steps(tmp_path) == [3, 4]


def test_what_is_being_read_stays_until_its_last_reader_has_ended(tmp_path):
    for step in (1, 2, 3):
        put(tmp_path, step)
    readers.begin(tmp_path / "1")
    readers.begin(str(tmp_path / "1"))
    for left in ([1, 3], [1, 3], [3]):
        layout.delete_old(tmp_path, 3, (), Retention(1), is_read=readers.is_read)
        assert layout.steps(tmp_path) == left
        readers.end(tmp_path / "1")


def test_one_that_training_has_left_behind_keeps_no_place(tmp_path):
    for step in (1, 2, 8, 9):
        put(tmp_path, step)
    layout.delete_old(tmp_path, 2, {8, 9}, Retention(2))
    assert layout.steps(tmp_path) == [1, 2, 8, 9]


def test_half_of_a_deleted_one_is_never_listed(tmp_path, monkeypatch):
    put(tmp_path, 1)

    def stops(path, mark):
        raise OSError("killed here")

    monkeypatch.setattr(layout.ours, "delete", stops)
    with pytest.raises(OSError, match="killed here"):
        layout.delete(tmp_path / "1")
    assert layout.steps(tmp_path) == []
    assert [path.name.split("-")[0] for path in layout.on_the_way(tmp_path)] == ["1.deleted"]


def test_a_new_one_takes_the_place_of_an_old_one_only_when_reported_to(tmp_path):
    put(tmp_path, 5)
    work = put(tmp_path, "5.saving-a")
    (work / "new").touch()
    with pytest.raises(OSError, match="not empty"):
        layout.put_in_place(work, tmp_path / "5", replace=None)
    layout.put_in_place(work, tmp_path / "5", replace=layout.CHECKPOINT)
    assert (tmp_path / "5" / "new").exists()
    assert os.listdir(tmp_path) == ["5"]


def test_only_steps_are_checkpoints(tmp_path):
    for name in ("3", "12", "7.saving-abc", "8.deleted-abc", "9.replaced-abc", "x", ".probe-1", "4.tmp"):
        (tmp_path / name).mkdir()
    assert layout.steps(tmp_path) == [3, 12]
    assert [path.name for path in layout.on_the_way(tmp_path)] == ["7.saving-abc", "8.deleted-abc", "9.replaced-abc"]
    assert layout.steps(tmp_path / "nothing") == []
    assert layout.on_the_way(tmp_path / "nothing") == []


def test_room_is_looked_for_where_the_folder_lies(tmp_path):
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    assert layout.obstacle(tmp_path, 1000) == ""
    assert os.listdir(tmp_path) == []
    assert "no room in" in layout.obstacle(tmp_path, free)
    assert "MiB free; free some, or lower save_total_limit" in layout.obstacle(tmp_path, free)
    assert "is gone: bring the storage back" in layout.obstacle(tmp_path / "nothing", 0)


def test_a_url_is_refused_with_what_to_do():
    with pytest.raises(CheckpointError, match="not gs://bucket/run: mount the bucket"):
        layout.local("gs://bucket/run")


@pytest.mark.parametrize(
    ("retention", "looks"),
    [(Retention(None), 0), (Retention(None, best=2), 0), (Retention(2, every_steps=1), 2), (Retention(1, best=100), 1)],
)
def test_the_work_after_a_save_does_not_grow_with_what_stays(tmp_path, monkeypatch, retention, looks):
    looked = []
    monkeypatch.setattr(layout, "is_whole", lambda path: looked.append(path) or True)
    monkeypatch.setattr(retention.__class__, "score", lambda self, meta: 0.0)
    monkeypatch.setattr(manifest, "read_meta", lambda path: looked.append(path) or {})
    seen = layout.Seen()
    per_save = []
    for step in range(1, 41):
        put(tmp_path, step)
        looked.clear()
        layout.delete_old(tmp_path, step, (), retention, seen=seen)
        per_save.append(len(looked))
    assert len(layout.steps(tmp_path)) == 40
    # Of each that is looked at, its files and, if scores count, its score.
    assert set(per_save[5:]) == {looks * (2 if retention.best else 1)}
