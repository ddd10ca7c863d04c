import os
import threading
import uuid

import fsspec
import pytest

from orchestrator import storage
from orchestrator.storage import StorageError


def test_write_read_replace(tmp_path):
    path = tmp_path / "deep" / "er" / "a.json"
    assert storage.read_json(path) is None
    assert not storage.exists(path)
    storage.write_json(path, {"a": 1})
    storage.write_json(str(path), {"a": [1, 2]})
    assert storage.read_json(path) == {"a": [1, 2]}
    assert storage.exists(path)
    assert os.listdir(path.parent) == ["a.json"]  # No temporary file stays behind.


def test_a_damaged_document_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(StorageError, match=r"a\.json: damaged: expected a JSON document .*delete or repair it"):
        storage.read_json(tmp_path / "a.json")


def test_of_many_creators_one_wins(tmp_path):
    won = []
    barrier = threading.Barrier(8)

    def create(number):
        barrier.wait()
        if storage.create_json(tmp_path / "claim.json", number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(won) == 1
    assert storage.read_json(tmp_path / "claim.json") == won[0]
    assert os.listdir(tmp_path) == ["claim.json"]


def test_a_bucket_takes_the_same_calls():
    """Through the code for URLs, on a filesystem of fsspec's that needs no network."""
    folder = f"memory://bucket-{uuid.uuid4().hex}"
    url = storage.join(folder, "run", "a.json")
    assert storage.is_url(url)
    assert storage.read_json(url) is None
    assert storage.create_json(url, {"a": 1})
    assert not storage.create_json(url, {"a": 2})
    assert storage.read_json(url) == {"a": 1}
    storage.write_json(url, {"a": 3})
    assert storage.read_json(url) == {"a": 3}
    assert storage.exists(url)
    names = fsspec.filesystem("memory").ls(storage.join(folder, "run"), detail=False)
    assert [name.rpartition("/")[2] for name in names] == ["a.json"]
    storage.check_writable(folder)
    storage.delete(url)
    assert not storage.exists(url)


def test_check_writable_makes_the_folder_and_leaves_nothing(tmp_path):
    storage.check_writable(tmp_path / "run")
    assert os.listdir(tmp_path / "run") == []


def test_unwritable_storage_says_where_why_and_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    message = rf"storage: cannot write to {tmp_path}/file/run: Not a directory; set storage=PATH to a folder or bucket"
    with pytest.raises(StorageError, match=message):
        storage.check_writable(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_forbidden_storage(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match=r"cannot write to .*: Permission denied; set storage=PATH"):
        storage.check_writable(tmp_path / "run")


def test_a_verdict_holds_for_its_launch_only(tmp_path):
    assert storage.read_verdict(tmp_path, "a") is None
    storage.write_verdict(tmp_path, {"launch_id": "a", "status": "failed"})
    assert storage.read_verdict(tmp_path, "a") == {"launch_id": "a", "status": "failed"}
    assert storage.read_verdict(tmp_path, "b") is None
