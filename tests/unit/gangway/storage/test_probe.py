"""Storage that cannot do what a run needs is refused by name, before a machine is taken."""

import pytest

from gangway.storage import probe
from gangway.storage.documents import StorageError
from gangway.storage.object_store import Limits, ObjectStore
from gangway.storage.opening import open_store
from gangway.storage.probe import check_writable
from tests.stores.fake_gcs import FakeGCS
from tests.stores.fault_proxy import Fault
from tests.stores.serving import Answer


@pytest.fixture
def gcs(monkeypatch):
    fake = FakeGCS()
    with fake.serving() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield fake


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_good_bucket_passes_and_nothing_is_left_in_it(scheme, stores, monkeypatch):
    stores[scheme].set(monkeypatch)
    url = stores[scheme].url()
    check_writable(url)
    assert open_store(url).list() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/run?generation=1", r"storage: gs://bucket/run\?generation=1: it has a query"),
        ("az://bucket/run", "storage: az://bucket/run: az:// is not known"),
    ],
)
def test_a_url_that_cannot_work_is_reported(url, message):
    with pytest.raises(StorageError, match=message):
        check_writable(url)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize(
    ("match", "do", "message"),
    [
        ("^PUT", "403", r"cannot write to .*: access is refused .*; set (AWS|GOOGLE)"),
        ("^LIST", "403", "cannot list .*: access is refused"),
        ("^(DELETE|POST)", "403", "cannot delete from .*: access is refused"),
        ("^GET", "403", "cannot read from .*: access is refused"),
        ("^PUT", "503", "cannot write to .*: .*tried"),
        ("^PUT", "301", "cannot write to .*: the bucket is in another region, or at another endpoint: set AWS_REGION"),
    ],
)
def test_what_may_not_be_done_is_named(scheme, match, do, message, stores, monkeypatch):
    monkeypatch.setattr(probe, "FOR_PEOPLE", Limits(1.0, 0.05, 0.01, 0.01))
    stores[scheme].set(monkeypatch)
    stores[scheme].proxy.faults[:] = [Fault(match, do)]
    with pytest.raises(StorageError, match=f"storage: {message}.*; set storage=URL to a bucket"):
        check_writable(stores[scheme].url())


def test_a_bucket_that_is_not_there_is_named(gcs):
    gcs.absent.add("no-such-bucket")
    with pytest.raises(StorageError, match="cannot write to gs://no-such-bucket/run: there is no such bucket: create it"):
        check_writable("gs://no-such-bucket/run")


def test_a_store_that_ignores_conditions_is_refused(gcs, monkeypatch):
    monkeypatch.setattr(gcs, "_is_blocked", lambda key, generation: False)
    with pytest.raises(StorageError, match="storage: gs://bucket/run lets two processes create one file; set storage=URL"):
        check_writable("gs://bucket/run")


def test_a_store_that_lists_late_is_refused(stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    stores["gs"].proxy.faults[:] = [Fault("^LIST", "hide", names="listed")]
    with pytest.raises(StorageError, match="does not list what was just written"):
        check_writable(stores["gs"].url())


def test_a_store_that_keeps_what_is_deleted_is_refused(gcs, monkeypatch):
    monkeypatch.setattr(gcs, "_delete", lambda key, condition: Answer(204))
    with pytest.raises(StorageError, match=r"keeps what is deleted \(retention\?\)"):
        check_writable("gs://bucket/run")


def test_a_bucket_with_versions_is_refused(stores, monkeypatch):
    noted = ObjectStore._note_version
    monkeypatch.setattr(ObjectStore, "_note_version", lambda store, _: noted(store, {"version": "3HL4kqtJ"}))
    stores["s3"].set(monkeypatch)
    url = stores["s3"].url()
    with pytest.raises(StorageError, match=r"keeps old versions of its objects: .*; suspend the versioning of the bucket"):
        check_writable(url)
