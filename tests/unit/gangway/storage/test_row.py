"""Of several drivers one has the run; what it has committed, no older one changes."""

import dataclasses
import json
import os
import random
import threading
import time

import pytest

from gangway.storage import row as row_module
from gangway.storage.documents import DamagedDocument
from gangway.storage.local_store import LocalStore
from gangway.storage.opening import open_store
from gangway.storage.row import NO_DRIVER, Kept, OvertakenError, Record, Row, WriterTerm
from gangway.storage.store import Place, StorageUnavailable
from tests.stores.attack import attack, faults
from tests.stores.contract import memory_store, store_of
from tests.stores.fake_gcs import FakeGCS
from tests.stores.fault_proxy import Fault

ROUNDS = 500
KEPT = Kept("10-1_0_ab", "f" * 64)


@pytest.fixture(params=("local", "memory", "gs", "s3"))
def folder(request, stores, tmp_path, monkeypatch):
    return Place(store_of(request.param, stores, tmp_path, monkeypatch)) / "row"


def test_a_row_tells_who_has_the_run_and_what_stands(folder):
    assert Row(folder).newest() == Record()
    row = Row(folder)
    assert row.take_over({"hostname": "a"}, above_term=6).term == (7, 0)
    row.claim(WriterTerm(7, 2))
    row.commit(WriterTerm(7, 2), 10, KEPT)
    row.commit(WriterTerm(7, 2), 20, KEPT)
    record = row.remove(WriterTerm(7, 2), [20, 99])
    assert record == Row(folder).newest()
    assert (record.number, record.what, record.term, record.step) == (5, "removal", (7, 2), 20)
    assert (record.of("checkpoints"), record.holder) == ({10: KEPT}, {"hostname": "a"})


def test_what_is_kept_in_another_folder_is_counted_apart(folder):
    row = Row(folder)
    term = row.take_over({}).term
    row.commit(term, 10, KEPT)
    row.commit(term, 90, KEPT, "models")
    assert row.remove(term, [10], "models").kept == {"checkpoints": {10: KEPT}, "models": {90: KEPT}}
    assert Row(folder).newest().step == 10


def test_a_driver_that_finds_another_since_its_look_looks_again(folder):
    one, other = Row(folder), Row(folder)
    seen = one.newest()
    assert other.take_over({"hostname": "b"}, seen=other.newest()).term == (1, 0)
    with pytest.raises(OvertakenError, match="driver term 1, generation 0 on b"):
        one.take_over({"hostname": "a"}, seen=seen)
    assert one.take_over({"hostname": "a"}, seen=one.newest()).term == (2, 0)


def test_an_older_driver_and_an_older_generation_change_nothing(folder):
    first, second = Row(folder), Row(folder)
    old = first.take_over({"hostname": "a"}).term
    first.commit(old, 10, KEPT)
    new = second.take_over({"hostname": "b"}).term
    before = second.claim(WriterTerm(new.driver_term, 1))
    for change in (
        lambda: first.commit(old, 20, KEPT),
        lambda: first.remove(old, [10]),
        lambda: first.claim(WriterTerm(old.driver_term, 5)),
        lambda: second.commit(new, 20, KEPT),
    ):
        with pytest.raises(OvertakenError, match=r"the run belongs to driver term 2, generation 1 on b since record 4; this is"):
            change()
    assert Row(folder).newest() == before
    assert second.claim(before.term) == before  # again: nothing new is recorded


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["local", "memory", "gs"])
def test_four_drivers_that_sleep_leave_a_row_in_order(kind, stores, tmp_path, monkeypatch):
    store = store_of(kind, stores, tmp_path, monkeypatch)
    chance = random.Random(7)

    def connected() -> Place:
        return Place(store if kind == "memory" else LocalStore(store.url) if kind == "local" else open_store(store.url)) / "row"

    counts = attack(connected, ROUNDS, lambda: time.sleep(chance.choice((0, 0, 0.001, 0.01))))
    assert faults(connected()) == []
    records = len(connected().list())
    assert records >= ROUNDS / 2
    assert counts["refused"] >= 20  # the attack did take place


def test_the_same_attack_finds_a_store_that_ignores_conditions(monkeypatch):
    fake, chance = FakeGCS(), random.Random(7)
    monkeypatch.setattr(fake, "_is_blocked", lambda key, generation: False)
    with fake.serving() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        attack(lambda: Place(open_store("gs://bucket/run")) / "row", 100, lambda: time.sleep(chance.choice((0, 0.001, 0.01))))
        assert faults(Place(open_store("gs://bucket/run")) / "row")


@pytest.mark.parametrize("do", ["lost", "409", "503"])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_commit_whose_answer_is_lost_is_known_as_its_own(scheme, do, stores, tmp_path, monkeypatch):
    folder = Place(store_of(scheme, stores, tmp_path, monkeypatch)) / "row"
    row = Row(folder)
    term = row.take_over({}).term
    for number in range(2, 5):
        stores[scheme].proxy.faults[:] = [Fault("^PUT", do, times=2)]
        assert row.commit(term, number, KEPT) is None
        assert row.newest().number == number
    assert Row(folder).newest().of("checkpoints") == dict.fromkeys((2, 3, 4), KEPT)


def test_a_listing_that_lags_lets_no_old_driver_through(stores, tmp_path, monkeypatch):
    folder = Place(store_of("gs", stores, tmp_path, monkeypatch)) / "row"
    old, new = Row(folder), Row(folder)
    term = old.take_over({"hostname": "a"}).term
    new.take_over({"hostname": "b"})
    stores["gs"].proxy.faults[:] = [Fault("^LIST", "hide", names="0000000[2-9]")]
    with pytest.raises(OvertakenError):
        old.commit(term, 10, KEPT)
    with pytest.raises(OvertakenError):
        Row(folder).commit(term, 10, KEPT)
    assert Row(folder).newest().number == 2


def test_a_record_that_another_has_created_and_that_cannot_be_read_is_waited_for(tmp_path):
    folder = Place(memory_store()) / "row"
    slept = []
    row = Row(folder, sleep=slept.append)
    term = row.take_over({}).term
    other = Row(folder)
    other.take_over({"hostname": "b"})
    read = row_module.KIND.read
    hidden = [None] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_module, "KIND", _Hiding(read, hidden))
        with pytest.raises(OvertakenError):
            row.commit(term, 10, KEPT)
    assert (slept, hidden) == ([row_module.PAUSE_S] * 2, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_module, "KIND", _Hiding(read, [None] * 10_000))
        stale = Row(folder, sleep=slept.append)
        stale._newest = Record(number=1, term=term)
        with pytest.raises(StorageUnavailable, match="it was created by another writer, and cannot be read"):
            stale.commit(term, 10, KEPT)


class _Hiding:
    """Reads nothing, so many times."""

    text = row_module.KIND.text

    def __init__(self, read, hidden):
        self._read, self._hidden = read, hidden

    def read(self, place):
        return self._hidden.pop() if self._hidden else self._read(place)


def test_a_damaged_record_that_was_brought_back_counts_again(folder):
    row = Row(folder)
    term = row.take_over({}).term
    row.commit(term, 10, KEPT)
    seen, newest = Row(folder, sleep=lambda _: None), folder / "00000002.json"
    whole = newest.content()
    newest.put(b"{}")
    assert seen.newest().damaged
    newest.put(whole)
    assert seen.newest() == row.newest()
    assert seen.newest().step == 10


def test_a_record_that_is_being_written_is_read_again_and_a_damaged_one_is_reported(tmp_path):
    folder = Place(LocalStore(tmp_path))
    Row(folder).take_over({})
    path = tmp_path / "00000001.json"
    whole = path.read_text()
    path.write_text(whole[:20])
    restore = threading.Timer(0.15, path.write_text, [whole])
    restore.start()
    assert Row(folder).newest().number == 1
    path.write_text(json.dumps(json.loads(whole) | {"driver_term": 9}))
    newest = Row(folder, sleep=lambda _: None).newest()
    assert (newest.number, newest.term, newest.unreadable) == (1, NO_DRIVER, 1)
    assert "00000001.json: damaged: its contents do not have the digest" in newest.damaged


@pytest.mark.parametrize("how", ["text", "folder", "pipe"])
def test_after_damage_nothing_is_committed_until_a_driver_takes_the_run_over(tmp_path, how):
    folder = Place(LocalStore(tmp_path))
    row = Row(folder, sleep=lambda _: None)
    term = row.take_over({"hostname": "a"}).term
    row.commit(term, 10, KEPT)
    row.commit(term, 20, KEPT)
    path = tmp_path / "00000003.json"
    path.unlink()
    if how == "text":
        path.write_text("{}")
    elif how == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    other = Row(folder, sleep=lambda _: None)
    for change in (lambda: other.commit(term, 30, KEPT), lambda: other.claim(term), lambda: other.remove(term, [10])):
        with pytest.raises(DamagedDocument, match=r"00000003\.json: damaged"):
            change()
    taken = other.take_over({"hostname": "b"})
    assert (taken.number, taken.term, taken.of("checkpoints")) == (4, (3, 0), {10: KEPT})
    with pytest.raises(OvertakenError):
        row.commit(term, 40, KEPT)
    assert (
        other.commit(taken.term, 20, dataclasses.replace(KEPT, folder="20-2")) is None
    )  # its record is damaged: nobody knows of it
    assert other.commit(taken.term, 20, KEPT) == dataclasses.replace(KEPT, folder="20-2")
    assert other.newest().number == 6
