"""Requests to a bucket that fail are told once for each time that it is away, counted, and named in an incident of that time."""

import pytest

from gangway.storage import object_store, usage
from gangway.storage.failed_requests import HERE, FailedRequests
from gangway.storage.opening import open_store
from gangway.storage.store import StorageRefused, StorageUnavailable
from orchestrator.driver import event_handler
from orchestrator.driver.event_handler import Outages
from orchestrator.run_state.goodput import Goodput
from orchestrator.run_state.progress import Progress
from tests.stores.fault_proxy import Fault


@pytest.fixture(autouse=True)
def none_before():
    HERE.take()


def test_a_time_without_storage_is_told_at_its_beginning_and_its_end():
    told, now, progress = [], {"s": 100.0}, Progress(Goodput(0.0))
    of_run = Outages(progress, lambda message, level: told.append((level, message)), lambda: now["s"])
    assert of_run.evidence() == {}
    for host in (1, 0):
        of_run.failed(2, "s3://b/x: SlowDown", f"host {host}")
        now["s"] += 4
    HERE.add("s3://b/y: AccessDenied")
    of_run.look()
    assert of_run.evidence() == {"storage": "5 requests to it failed in 8 s: s3://b/y: AccessDenied"}
    now["s"] += event_handler.QUIET_S + 1
    of_run.look()
    of_run.look()
    assert of_run.evidence() == {}
    assert told == [
        (
            "warning",
            "requests to the storage fail (the first of host 1): s3://b/x: SlowDown; training goes on, and they are tried again",
        ),
        ("info", "the storage answers again; until then 5 requests to it failed in 8 s"),
    ]
    of_run.failed(1, "again", "host 0")
    assert (len(told), progress.failed_requests) == (3, 6)


def test_what_hosts_and_the_driver_ask_is_added_up():
    progress = Progress(Goodput(0.0))
    of_run = Outages(progress, lambda message, level: None, lambda: 0.0)
    usage.HERE.take()
    of_run.made({"put": 3, "bytes_out": 100})
    usage.HERE.add(put=2, get=1)
    of_run.look()
    of_run.look()
    assert progress.requests == {"put": 5, "bytes_out": 100, "get": 1}


def test_every_request_that_failed_is_counted_and_none_that_is_answered(stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    store = open_store(stores["gs"].url(), object_store.Limits(0.8, 60.0, 0.01, 0.02))
    assert store.get("nothing") is None
    assert store.create("a", b"0123")
    assert not store.create("a", b"4567")
    assert store.get_part("a", 9, 12) == b""
    assert HERE.take() == (0, "")
    stores["gs"].proxy.faults[:] = [Fault("^GET", "503", times=3), Fault("^GET", "hang", times=1, seconds=3.0)]
    assert store.get("a") == b"0123"
    number, why = HERE.take()
    assert number == 4
    assert why.startswith(f"{store.url}/a: ")
    stores["gs"].proxy.faults[:] = [Fault("^GET", "403", times=1), Fault("^PUT", "503")]
    with pytest.raises(StorageRefused):
        store.get("a")
    assert HERE.take()[0] == 1
    with pytest.raises(StorageUnavailable):
        open_store(store.url, object_store.Limits(1.0, 0.4, 0.01, 0.02)).put("a", b"")
    assert HERE.take()[0] >= 2


def test_what_is_taken_is_counted_once():
    failed = FailedRequests()
    failed.add("one")
    failed.add("two")
    assert [failed.take(), failed.take()] == [(2, "two"), (0, "")]
