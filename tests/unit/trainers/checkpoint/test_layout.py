"""Which checkpoints may go, and whether there is room for another."""

import os

import pytest

from gangway.errors import CheckpointError
from gangway.storage import local_store, ours
from gangway.storage.opening import place_of
from gangway.storage.row import Kept, WriterTerm
from trainers.checkpoint import layout, manifest
from trainers.checkpoint.retention import Retention

TERM = WriterTerm(1, 0)


@pytest.fixture
def folder(tmp_path):
    """Of a run that a driver has."""
    folder = place_of(tmp_path / "run") / "checkpoints"
    layout.row_of(folder).take_over({})
    return folder


def put(folder, step, *, whole=True):
    place = folder / layout.name_for(step, TERM, f"{step:08x}")
    (place / "meta.json").put(b"meta")
    digest = manifest.write(place, manifest.Manifest(step, 0.0, {"meta.json": manifest.digest(place / "meta.json")}))
    if not whole:
        (place / "meta.json").put(b"shorter or longer")
    layout.row_of(folder).commit(TERM, step, Kept(place.name, digest))
    return place


def remove(folder, step):
    layout.row_of(folder).remove(TERM, [step])


def delete_old(folder, newest, superseded, retention, **how):
    return layout.delete_old(folder, newest, superseded, retention, remove=remove, **how)


def test_the_old_goes_only_for_whole_newer_ones(folder):
    for step, whole in ((1, True), (2, False), (3, True)):
        put(folder, step, whole=whole)
    assert delete_old(folder, 3, (), Retention(2)) == []
    assert layout.steps(folder) == [1, 2, 3]
    put(folder, 4)
    delete_old(folder, 4, (), Retention(2))
    assert layout.steps(folder) == [3, 4]


def test_what_is_being_read_stays_until_its_last_reader_has_ended(folder):
    first, *_ = [put(folder, step) for step in (1, 2, 3)]
    layout.readers(first, 1)
    layout.readers(str(first), 1)
    for left in ([1, 3], [1, 3], [3]):
        delete_old(folder, 3, (), Retention(1), is_read=layout.readers)
        assert layout.steps(folder) == left
        layout.readers(first, -1)


def test_one_that_training_has_left_behind_keeps_no_place(folder):
    for step in (1, 2, 8, 9):
        put(folder, step)
    delete_old(folder, 2, {8, 9}, Retention(2))
    assert layout.steps(folder) == [1, 2, 8, 9]


def test_half_of_a_deleted_one_is_never_listed_and_goes_later(folder, monkeypatch):
    place = put(folder, 1)

    def stops(path, mark):
        raise OSError("killed here")

    remove(folder, 1)
    with monkeypatch.context() as patched:
        patched.setattr(local_store.ours, "delete", stops)
        with pytest.raises(OSError, match="killed here"):
            ours.delete_folder(place, layout.UNCOMMITTED)
    assert layout.steps(folder) == []
    assert [name.partition("-")[0] for name in folder.folders()] == ["1"]
    layout.delete_left(folder, WriterTerm(1, 1))
    assert folder.folders() == []


def test_what_older_generations_have_left_goes_and_what_is_written_now_stays(folder):
    kept, now = put(folder, 3), folder / "5-1_1_00000000"
    for place in (folder / "4-1_0_00000000", now, folder / "a folder of the user's"):
        (place / "meta.json").put(b"meta")
    layout.delete_left(folder, WriterTerm(1, 1))
    assert folder.folders() == [kept.name, now.name, "a folder of the user's"]


def test_a_new_folder_takes_the_place_of_an_old_one_only_when_told_to(tmp_path):
    old, work = tmp_path / "out", tmp_path / "out.saving-a"
    mark = ours.with_any_of("an export", "meta.json")
    for path in (old, work):
        path.mkdir()
        (path / "meta.json").touch()
    (work / "new").touch()
    with pytest.raises(OSError, match="not empty"):
        layout.put_in_place(work, old, replace=None)
    layout.put_in_place(work, old, replace=mark)
    assert (old / "new").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_only_what_a_record_names_is_a_checkpoint(folder):
    put(folder, 12)
    for name in ("3", "7.saving-abc", "8-1_0_00000000", "9-1_0_00000000.deleted-00000000", "x", "4.tmp"):
        (folder / name).make(around=True)
    assert layout.steps(folder) == [12]
    assert layout.unfinished(folder) == [(8, folder / "8-1_0_00000000")]
    assert layout.steps(folder.with_name("nothing")) == []
    assert layout.unfinished(folder.with_name("nothing")) == []


def test_best_is_a_checkpoint_where_a_run_is_and_else_a_name_like_others(folder):
    run = folder.parent
    assert layout.named(run / "best") == run / "best"  # nothing is saved
    put(folder, 1)
    with pytest.raises(CheckpointError, match="no whole checkpoint of this run has a score"):
        layout.named(run / "best")
    assert layout.named(run.parent / "best") == run.parent / "best"
    (run / "best").make()
    assert layout.named(run / "best") == run / "best"


def test_room_is_looked_for_where_the_folder_lies(tmp_path):
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    assert layout.obstacle(place_of(tmp_path), 1000) == ""
    assert os.listdir(tmp_path) == []
    assert "no room in" in layout.obstacle(place_of(tmp_path), free)
    assert "MiB free; free some, or lower save_total_limit" in layout.obstacle(place_of(tmp_path), free)
    assert "is gone: bring the storage back" in layout.obstacle(place_of(tmp_path / "nothing"), 0)


def test_a_url_is_refused_with_what_to_do():
    with pytest.raises(CheckpointError, match="not gs://bucket/run: mount the bucket"):
        layout.local("gs://bucket/run")


@pytest.mark.parametrize(
    ("retention", "looks"),
    [(Retention(None), 0), (Retention(None, best=2), 0), (Retention(2, every_steps=1), 2), (Retention(1, best=100), 1)],
)
def test_the_work_after_a_save_does_not_grow_with_what_stays(folder, monkeypatch, retention, looks):
    looked = []
    monkeypatch.setattr(layout, "is_whole", lambda path: looked.append(path) or True)
    monkeypatch.setattr(retention.__class__, "score", lambda self, meta: 0.0)
    monkeypatch.setattr(manifest, "read_meta", lambda path: looked.append(path) or {})
    seen = layout.Seen()
    per_save = []
    for step in range(1, 41):
        put(folder, step)
        looked.clear()
        delete_old(folder, step, (), retention, seen=seen)
        per_save.append(len(looked))
    assert len(layout.steps(folder)) == 40
    # Of each that is looked at, its files and, if scores count, its score.
    assert set(per_save[5:]) == {looks * (2 if retention.best else 1)}
