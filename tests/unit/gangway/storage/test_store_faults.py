"""What a store says on bad days: unavailable, refused or full, and never that there is nothing."""

import errno
import os
import time

import pytest
from obstore.exceptions import PermissionDeniedError

from gangway.storage.local_store import LocalStore, problem_of
from gangway.storage.object_store import Limits
from gangway.storage.opening import open_store
from gangway.storage.store import StorageFull, StorageRefused, StorageUnavailable
from tests.stores.contract import QUICK, memory_store, store_of
from tests.stores.fake_gcs import FakeGCS
from tests.stores.fault_proxy import Fault

ASKS = {
    "get": lambda store: store.get("a"),
    "get_part": lambda store: store.get_part("a", 0, 1),
    "entry": lambda store: store.entry("a"),
    "put": lambda store: store.put("a", b"1"),
    "create": lambda store: store.create("b", b"1"),
    "list": lambda store: store.list(),
    "folders": lambda store: store.folders(),
    "delete": lambda store: store.delete("a"),
    "delete_all": lambda store: store.delete_all("f"),
}


@pytest.fixture(params=["gs", "s3"])
def scheme(request):
    return request.param


@pytest.fixture
def store(scheme, stores, tmp_path, monkeypatch):
    store = store_of(scheme, stores, tmp_path, monkeypatch)
    store.put("f/1", b"1")
    store.put("a", b"0123456789")
    return store


@pytest.fixture
def faults(scheme, stores, store):
    """The faults that are to come, once the store has its objects."""
    return stores[scheme].proxy.faults


@pytest.mark.parametrize("status", [500, 503, 429, 409])
def test_what_passes_is_tried_again(store, faults, status):
    for name, ask in ASKS.items():
        faults[:] = [Fault(".", str(status), times=2)]
        store.usage.take()
        ask(store)
        assert store.usage.take()["again"] >= 2, name


def test_what_does_not_pass_in_time_is_unavailable_and_never_absent(store, faults, monkeypatch):
    monkeypatch.setattr(store, "limits", Limits(1.0, 0.06, 0.01, 0.02))
    faults[:] = [Fault(".", "503")]
    for name, ask in ASKS.items():
        began_s = time.monotonic()
        with pytest.raises(StorageUnavailable, match=r"503.*\(tried \d+ times") as error:
            ask(store)
        assert error.value.filename.startswith(store.url), name
        assert time.monotonic() - began_s < 30  # half of what it would be without these limits


def test_what_is_refused_is_not_asked_again(store, faults, scheme, stores):
    for name, ask in ASKS.items():
        stores[scheme].proxy.counted()
        faults[:] = [Fault(".", "403")]
        with pytest.raises(StorageRefused, match=r"access is refused .*403.*; set "):
            ask(store)
        assert sum(number for kind, number in stores[scheme].proxy.counted().items() if "bytes" not in kind) == 1, name


def test_an_answer_that_does_not_come_is_waited_for_so_long_and_asked_for_again(stores, scheme, tmp_path, monkeypatch):
    store = store_of(scheme, stores, tmp_path, monkeypatch, Limits(request_s=0.8, patience_s=60, first_wait_s=0.01))
    store.put("a", b"1")
    stores[scheme].proxy.faults[:] = [Fault("^GET", "hang", times=1, seconds=3.0)]
    began_s = time.monotonic()
    assert store.get("a") == b"1"
    assert time.monotonic() - began_s > 0.75


def test_an_answer_that_is_cut_is_asked_for_again(store, faults):
    faults[:] = [Fault("^GET", "cut", times=2)]
    assert store.get("a") == b"0123456789"
    faults[:] = [Fault("^LIST", "cut", times=2)]
    assert [entry.name for entry in store.list()] == ["a", "f/1"]


def test_a_create_whose_answer_is_lost_was_made(store, faults):
    faults[:] = [Fault("^PUT", "lost", times=1)]
    assert store.create("row/1", b"mine")
    faults[:] = [Fault("^PUT", "lost", times=3)]
    assert not store.create("row/1", b"another's")
    assert store.get("row/1") == b"mine"


def test_a_create_that_meets_another_at_one_moment_is_tried_again(store, faults):
    faults[:] = [Fault("^PUT", "409", times=2)]
    assert store.create("row/1", b"mine")
    assert store.get("row/1") == b"mine"
    faults[:] = [Fault("^PUT", "409", times=2)]
    assert not store.create("row/1", b"another's")


def test_a_bucket_that_is_gone_is_no_empty_one(stores, monkeypatch):
    stores["s3"].set(monkeypatch)
    store = open_store("s3://no-such-bucket/run", QUICK)
    for ask in ASKS.values():
        with pytest.raises(StorageRefused, match="there is no such bucket: create it, or correct the name"):
            ask(store)


def test_a_bucket_of_google_that_is_gone_is_no_empty_one(monkeypatch):
    fake = FakeGCS()
    fake.absent.add("no-such-bucket")
    with fake.serving() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        store = open_store("gs://no-such-bucket/run", QUICK)
        for ask in ASKS.values():
            with pytest.raises(StorageRefused, match="there is no such bucket"):
                ask(store)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_without_credentials_it_is_said_what_to_set(scheme, monkeypatch):
    for name in [
        name for name in os.environ if name.startswith(("AWS_ACCESS", "AWS_SECRET", "GOOGLE_", "STORAGE_", "AWS_ENDPOINT"))
    ]:
        monkeypatch.delenv(name)
    store = open_store(f"{scheme}://gangway-tests/{scheme}", QUICK)
    with pytest.raises(
        StorageRefused, match=r"no credentials were found; set (AWS_ACCESS_KEY_ID|GOOGLE_APPLICATION_CREDENTIALS)"
    ):
        store.get("a")


def test_a_server_that_is_away_is_unavailable(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageUnavailable, match="tried"):
        open_store("s3://gangway-tests/run", Limits(1.0, 0.3, 0.01, 0.1)).get("a")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, StorageUnavailable),
        (errno.ESTALE, StorageUnavailable),
        (errno.ETIMEDOUT, StorageUnavailable),
        (errno.ENOTCONN, StorageUnavailable),
        (errno.EACCES, StorageRefused),
        (errno.EROFS, StorageRefused),
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
    ],
)
def test_the_errors_of_a_folder_are_of_the_same_three_kinds(number, kind, tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    assert type(problem_of(OSError(number, os.strerror(number)), "a")) is kind

    def fail(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    for name in ("open", "stat", "scandir", "makedirs", "statvfs"):
        monkeypatch.setattr(os, name, fail)
    asks = {**ASKS, "room": lambda store: store.room()}
    for ask in (ask for name, ask in asks.items() if not name.startswith("delete")):
        with pytest.raises(kind, match=os.strerror(number)):
            ask(store)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("status code: 507 Insufficient Storage: <Code>XMinioStorageFull</Code>", StorageFull),
        # Some stores answer so, and no other credentials would help.
        ("status code: 403 Forbidden: <Code>QuotaExceeded</Code>", StorageFull),
        ('status code: 403 Forbidden: {"reason": "quotaExceeded"}', StorageFull),
        ("status code: 403 Forbidden: <Code>AccessDenied</Code>", StorageRefused),
    ],
)
def test_a_bucket_whose_quota_is_used_up_is_full(answer, kind):
    assert type(memory_store().problem_of(PermissionDeniedError(f"Server returned non-2xx {answer}"), "a")) is kind


def test_what_was_asked_is_counted():
    store = memory_store()
    store.put("a", b"12345")
    store.get("a")
    store.list()
    store.create("a", b"")
    assert store.usage.take() == {"put": 2, "bytes_out": 5, "get": 2, "bytes_in": 10, "list": 1}
