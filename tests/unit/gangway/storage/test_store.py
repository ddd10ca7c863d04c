"""What every store keeps to, whatever it is made of."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gangway.storage import object_store
from gangway.storage.local_store import LocalStore
from gangway.storage.store import Place, StorageRefused, checked_name
from tests.stores.contract import store_of
from tests.stores.fake_gcs import FakeGCS

WEED = pytest.param("weed", marks=pytest.mark.slow("starts a real store"))
KINDS = ("local", "memory", "gs", "s3", WEED)
WRITERS, ROUNDS = 8, 5


@pytest.fixture(params=KINDS)
def store(request, stores, tmp_path, monkeypatch):
    return store_of(request.param, stores, tmp_path, monkeypatch)


def test_what_is_put_is_got_replaced_and_deleted(store):
    assert store.get("a/b.json") is None
    assert store.entry("a/b.json") is None
    store.put("a/b.json", b"one")
    assert (store.get("a/b.json"), store.entry("a/b.json").size) == (b"one", 3)
    before = store.entry("a/b.json").tag
    store.put("a/b.json", b"")
    assert (store.get("a/b.json"), store.entry("a/b.json").size) == (b"", 0)
    assert store.entry("a/b.json").tag not in ("", before)
    store.delete("a/b.json")
    store.delete("a/b.json")
    assert store.get("a/b.json") is None


def test_a_part_ends_where_the_object_ends(store):
    store.put("a", b"0123456789")
    parts = {(2, 5): b"234", (8, 20): b"89", (10, 12): b"", (30, 40): b"", (4, 4): b"", (5, 4): b""}
    assert {bounds: store.get_part("a", *bounds) for bounds in parts} == parts
    assert store.get_part("b", 0, 3) is None
    assert store.get_part("b", 3, 3) is None


def test_what_is_listed_is_below_the_folder_in_order_and_after_a_name(store):
    for name in ("f/2", "f/10", "f/deep/1", "f2/1", "top", "f/é %+&?#"):
        store.put(name, name.encode())
    assert [entry.name for entry in store.list("f")] == ["f/10", "f/2", "f/deep/1", "f/é %+&?#"]
    assert [entry.name for entry in store.list("f", "f/2")] == ["f/deep/1", "f/é %+&?#"]
    assert [(entry.name, entry.size) for entry in store.list()][-1] == ("top", 3)
    assert [entry.tag for entry in store.list("f")] == [store.entry(entry.name).tag for entry in store.list("f")]
    assert (store.folders(), store.folders("f"), store.folders("top-not")) == (["f", "f2"], ["deep"], [])
    assert store.list("nothing") == []
    assert store.get("f/é %+&?#") == "f/é %+&?#".encode()


def test_all_of_a_folder_is_deleted_and_nothing_beside_it(store):
    for name in ("f/2", "f/deep/1", "f2/1", "f.txt"):
        store.put(name, b"x")
    store.delete_all("f")
    store.delete_all("f")
    assert [entry.name for entry in store.list()] == ["f.txt", "f2/1"]
    with pytest.raises(ValueError, match="is no name in a store"):
        store.delete_all("")


def test_one_of_many_creators_wins_and_its_bytes_are_there(store):
    def create(number, name, gate):
        gate.wait()
        return store.create(name, json.dumps({"writer": number}).encode())

    with ThreadPoolExecutor(WRITERS) as threads:
        for turn in range(ROUNDS):
            gate, name = threading.Barrier(WRITERS), f"row/{turn}"
            won = [n for n, made in enumerate(threads.map(lambda n: create(n, name, gate), range(WRITERS))) if made]  # noqa: B023
            assert len(won) == 1
            assert json.loads(store.get(name)) == {"writer": won[0]}
    assert not store.create("row/0", b"{}")
    assert len(store.list("row")) == ROUNDS


def test_equal_bytes_of_two_writers_are_created_once(store):
    assert [store.create("a", b"equal"), store.create("a", b"equal")] == [True, False]


def test_files_go_up_and_come_down_whole(store, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)  # the least that S3 takes
    here, there = tmp_path / "here", tmp_path / "there"
    for size in (0, 1000, (11 << 20) + 7):
        here.write_bytes(os.urandom(size))
        store.upload("files/big", here)
        assert store.entry("files/big").size == size
        store.download("files/big", there)
        assert there.read_bytes() == here.read_bytes()
    with pytest.raises(FileNotFoundError):
        store.download("files/none", tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        store.upload("files/none", tmp_path / "no such file")
    assert not (tmp_path / "none").exists()
    assert sorted(os.listdir(tmp_path)) == sorted({"here", "there", *(["store"] if store.is_local else [])})


def test_a_page_of_a_listing_is_not_all_of_it(store, monkeypatch):
    monkeypatch.setattr(FakeGCS, "page", 10)
    for number in range(25):
        store.put(f"many/{number:04}/a", b"")
    assert len(store.list("many")) == 25
    assert len(store.folders("many")) == 25
    store.delete_all("many")
    assert store.list("many") == []


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/..", ".", "a\0b"])
def test_a_name_that_leads_elsewhere_is_none(store, name):
    with pytest.raises(ValueError, match="is no name in a store"):
        checked_name(name)
    with pytest.raises(ValueError, match="is no name in a store"):
        store.put(name, b"")


def test_a_place_is_no_path(store):
    place = Place(store) / "run" / "a.json"
    for misuse in (Path, os.fspath, os.stat, os.path.exists, open, os.listdir):
        with pytest.raises(TypeError):
            misuse(place)
    assert (place.name, place.parent.name, place.key) == ("a.json", "run", "run/a.json")
    assert place.url == f"{store.url}/run/a.json"
    if store.is_local:
        assert Place(store).parent.url == os.path.dirname(store.url)
    else:
        with pytest.raises(ValueError, match="around a bucket"):
            _ = Place(store).parent


def test_a_place_does_what_its_store_does(store):
    place = Place(store) / "run"
    (place / "a").put(b"1")
    assert (place / "b/c").create(b"2")
    assert [entry.name for entry in place.list()] == ["a", "b/c"]
    assert [entry.name for entry in place.list("a")] == ["b/c"]
    assert (place.folders(), place.is_dir(), place.exists()) == (["b"], True, False)
    assert ((place / "a").get(), (place / "a").exists(), (place / "a").is_dir()) == (b"1", True, False)


def test_there_is_room_that_can_be_asked_for_in_a_folder_alone(store):
    room = store.room()
    assert room > 0 if store.is_local else room is None


def test_below_a_file_there_is_nothing_and_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    store = LocalStore(tmp_path)
    assert (store.get("file/a"), store.entry("file/a"), store.list("file"), store.folders("file")) == (None, None, [], [])
    for write in (store.put, store.create):
        with pytest.raises(StorageRefused, match="Not a directory"):
            write("file/a", b"")
    (tmp_path / "folder").mkdir()
    assert store.entry("folder") is None
    for write in (store.put, store.get):
        with pytest.raises(StorageRefused, match=r"it is no file|Is a directory"):
            write("folder", *([b""] if write == store.put else []))


def test_a_file_that_is_being_written_is_no_object_of_a_folder(tmp_path):
    (tmp_path / f"a.json.{'0' * 32}.tmp").touch()
    (tmp_path / "b.tmp").touch()
    assert [entry.name for entry in LocalStore(tmp_path).list()] == ["b.tmp"]
