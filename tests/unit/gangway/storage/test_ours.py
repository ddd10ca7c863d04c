"""Deletes what carries a mark, and nothing else."""

import os

import pytest

from gangway.storage import documents, ours
from gangway.storage.opening import place_of
from gangway.storage.ours import NotOursError
from gangway.storage.store import Place
from tests.stores.contract import memory_store
from trainers.checkpoint import layout
from trainers.data import kept
from trainers.runtime import executable_files

MINE = ours.named("a thing of ours", r"thing-\d+")


def made(path, name="thing-1"):
    (path / name / "inside").mkdir(parents=True)
    (path / name / "inside" / "file").touch()
    return path / name


def test_what_carries_the_mark_is_deleted_a_folder_with_all_that_is_in_it(tmp_path):
    ours.delete(made(tmp_path), MINE)
    (tmp_path / "thing-2").touch()
    ours.delete(tmp_path / "thing-2", MINE)
    ours.delete(tmp_path / "thing-3", MINE)  # there is none
    assert os.listdir(tmp_path) == []


def test_what_lacks_it_stays_and_the_error_says_what_it_should_be(tmp_path):
    for path in (made(tmp_path, "thesis"), tmp_path / "thesis" / "inside" / "file"):
        with pytest.raises(NotOursError) as error:
            ours.delete(path, MINE)
        assert str(error.value) == (
            f"{path} stays: Gangway has not made it (it is not a thing of ours); move it away, or give another name"
        )
        assert path.exists()


def test_a_link_is_never_ours_and_what_it_leads_to_stays(tmp_path):
    target = made(tmp_path, "thesis")
    (tmp_path / "thing-1").symlink_to(target)
    with pytest.raises(NotOursError):
        ours.delete(tmp_path / "thing-1", MINE)
    made(tmp_path, "thing-2")
    (tmp_path / "thing-2" / "link").symlink_to(target)
    ours.delete(tmp_path / "thing-2", MINE)
    assert (target / "inside" / "file").exists()
    assert sorted(os.listdir(tmp_path)) == ["thesis", "thing-1"]


def test_what_cannot_be_deleted_is_reported_when_the_rest_is_gone(tmp_path, monkeypatch):
    path, unlink = made(tmp_path), os.unlink
    (path / "stays").touch()
    monkeypatch.setattr(
        os,
        "unlink",
        lambda name, **how: (_ for _ in ()).throw(PermissionError(13, "no")) if name == "stays" else unlink(name, **how),
    )
    with pytest.raises(OSError, match="no"):
        ours.delete(path, MINE)
    assert os.listdir(path) == ["stays"]


def test_an_object_of_a_bucket_needs_the_mark_too():
    bucket = Place(memory_store())
    for name in ("thing-1", "thesis", "7/notes", "8-1_0_00000000/meta.json", "8-1_0_00000000/state/a", "9/meta.json"):
        (bucket / name).put(b"")
    ours.delete(bucket / "thing-1", MINE)
    ours.delete_folder(bucket / "8-1_0_00000000", layout.UNCOMMITTED)
    for delete, name, mark in ((ours.delete, "thesis", MINE), (ours.delete_folder, "7", layout.UNCOMMITTED)):
        with pytest.raises(
            NotOursError, match=rf"memory://tests/{name} stays: Gangway has not made it \(it is not {mark.what}\)"
        ):
            delete(bucket / name, mark)
    assert [entry.name for entry in bucket.list()] == ["7/notes", "9/meta.json", "thesis"]
    with pytest.raises(NotOursError, match="it is a URL, and no path"):
        ours.delete("gs://bucket/thing-1", MINE)


EXPORT = ours.with_any_of("an export", "config.json")


def test_a_users_folder_whose_name_is_a_number_is_no_old_checkpoint(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "notes").touch()
    with pytest.raises(NotOursError, match="it is not a checkpoint"):
        ours.delete_folder(place_of(tmp_path / "7"), layout.UNCOMMITTED)
    (tmp_path / "7.saving").mkdir()
    with pytest.raises(NotOursError, match="it is not an export"):
        layout.put_in_place(tmp_path / "7.saving", tmp_path / "7", replace=EXPORT)
    assert sorted(os.listdir(tmp_path)) == ["7", "7.saving"]


def test_an_empty_folder_may_be_replaced_and_a_link_to_one_may_not(tmp_path):
    for name in ("7", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").symlink_to(tmp_path / "empty")
    layout.put_in_place(made(tmp_path), tmp_path / "7", replace=EXPORT)
    with pytest.raises(NotOursError, match="it is not an export"):
        layout.put_in_place(made(tmp_path), tmp_path / "8", replace=EXPORT)
    assert os.listdir(tmp_path / "7") == ["inside"]
    assert os.listdir(tmp_path / "empty") == []


def test_a_cache_forgets_what_it_has_made_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    for number, name in enumerate((f"{0:064x}", f"{1:064x}.json", f"{2:064x}.npy", "recipe.txt")):
        (tmp_path / name).write_text("text")
        os.utime(tmp_path / name, (1000 + number, 1000 + number))
    kept.tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [f"{2:064x}.npy", "recipe.txt"]


def test_old_programs_are_deleted_and_a_file_beside_them_is_not(tmp_path):
    digest = "0" * 24
    names = (f"train-{digest}.xla", f"train-{digest}.xla.{0:032x}.tmp", f"train-{digest}.json", f"{0:032x}.trying", "thesis.tex")
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000, 1000))
    newest = tmp_path / f"train-{'1' * 24}.xla"
    newest.touch()
    executable_files.delete_old(tmp_path, newest, None)
    assert sorted(os.listdir(tmp_path)) == ["thesis.tex", newest.name]


def test_a_document_is_deleted_and_another_file_of_the_run_is_not(tmp_path):
    (tmp_path / "state.json").touch()
    documents.delete(tmp_path / "state.json")
    (tmp_path / "thesis").touch()
    with pytest.raises(NotOursError):
        documents.delete(tmp_path / "thesis")
    assert os.listdir(tmp_path) == ["thesis"]
