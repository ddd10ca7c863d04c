import errno
import json
import os
import threading

import pytest

from gangway.storage import documents, durable, opening
from gangway.storage.documents import DamagedDocument, DocumentKind, StorageError
from gangway.storage.local_store import LocalStore
from gangway.storage.ours import NotOursError
from gangway.storage.probe import check_writable
from orchestrator.run_state.outcome import read_outcome, write_outcome
from tests import in_folder

KIND = DocumentKind("a.json", dict[str, int], "it is new")


def create(path, data):
    return documents.create_text(path, json.dumps(data))


def test_write_read_replace(tmp_path):
    path = tmp_path / "deep" / "er" / "a.json"
    assert documents.read_json(path) is None
    assert not documents.exists(path)
    documents.write_json(path, {"a": 1})
    documents.write_json(str(path), {"a": [1, 2]})
    assert documents.read_json(path) == {"a": [1, 2]}
    assert documents.exists(path)
    assert os.listdir(path.parent) == ["a.json"]  # No temporary file stays behind.


def test_a_damaged_document_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(StorageError, match=r"a\.json: damaged: expected a JSON document .*delete or repair it"):
        documents.read_json(tmp_path / "a.json")


def test_one_of_which_a_part_was_seen_is_read_again(tmp_path, monkeypatch):
    """As a file server shows it while another machine writes it."""
    kind = DocumentKind("a.json", dict, "nothing")
    kind.write(tmp_path / "a.json", {"a": 1})
    whole, seen = documents.read_bytes(tmp_path / "a.json"), []

    def read_bytes(path):
        seen.append(path)
        return whole[: 9 * len(seen)] if len(seen) < 3 else whole

    monkeypatch.setattr(documents, "read_bytes", read_bytes)
    assert kind.read(tmp_path / "a.json") == {"a": 1}
    assert len(seen) == 3
    whole = whole[:-5]
    with pytest.raises(documents.DamagedDocument):
        kind.read(tmp_path / "a.json")


def test_of_many_creators_one_wins(tmp_path):
    won = []
    barrier = threading.Barrier(8)

    def claim(number):
        barrier.wait()
        if create(tmp_path / "claim.json", number):
            won.append(number)

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(won) == 1
    assert documents.read_json(tmp_path / "claim.json") == won[0]
    assert os.listdir(tmp_path) == ["claim.json"]


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket_takes_the_same_calls(scheme, stores, monkeypatch):
    stores[scheme].set(monkeypatch)
    folder = stores[scheme].url()
    url = documents.join(folder, "run", "a.json")
    assert documents.is_url(url)
    assert documents.read_json(url) is None
    assert create(url, {"a": 1})
    assert not create(url, {"a": 2})
    assert documents.read_json(url) == {"a": 1}
    documents.write_json(url, {"a": 3})
    assert documents.read_json(opening.place_of(url)) == {"a": 3}
    assert documents.exists(url)
    assert documents.exists(documents.join(folder, "run"))
    assert not documents.exists(documents.join(folder, "ru"))
    documents.delete(url)
    assert not documents.exists(url)
    with pytest.raises(NotOursError, match="is not a document of a run"):
        documents.delete(documents.join(folder, "run", "thesis"))


def test_a_damaged_document_of_a_bucket_is_set_aside(stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    place = opening.place_of(stores["gs"].url()) / "a.json"
    for number, text in enumerate((b"{", b"[", b"{"), 1):
        place.put(text)
        with pytest.raises(DamagedDocument) as error:
            KIND.read(place)
        aside = f"{place.url}.damaged" + (f"-{number}" if number == 2 else "")
        told = KIND.set_aside(place, error.value)
        assert told.startswith(f"{place.url}: damaged: expected a JSON document")
        assert told.endswith(f"; set aside as {aside}: it is new")
        assert (place.get(), opening.place_of(aside).get()) == (None, text)
    assert documents.set_aside(place) is None


def test_check_writable_makes_the_folder_and_leaves_nothing(tmp_path):
    check_writable(tmp_path / "run")
    assert os.listdir(tmp_path / "run") == []


def test_unwritable_storage_says_where_why_and_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    message = rf"storage: cannot write to {tmp_path}/file/run: Not a directory; set storage=PATH to a folder or bucket"
    with pytest.raises(StorageError, match=message):
        check_writable(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_forbidden_storage(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match=r"cannot write to .*: Permission denied; set storage=PATH"):
        check_writable(tmp_path / "run")


def test_an_outcome_holds_for_its_launch_only(tmp_path):
    assert read_outcome(tmp_path, "a") is None
    write_outcome(tmp_path, {"launch_id": "a", "status": "failed"})
    assert read_outcome(tmp_path, "a") == {"launch_id": "a", "status": "failed"}
    assert read_outcome(tmp_path, "b") is None


def refuse(number, *, only=lambda *arguments: True, real=None):
    """In place of a call that a file system does not offer."""

    def refused(*arguments, **how):
        if only(*arguments):
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return real(*arguments, **how)

    return refused


@pytest.fixture(params=[errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP], ids=["EPERM", "ENOSYS", "EOPNOTSUPP"])
def no_links(request, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", in_folder(tmp_path, refuse(request.param), os.link))


def test_without_hard_links_one_of_many_creators_wins(tmp_path, no_links):
    check_writable(tmp_path)
    test_of_many_creators_one_wins(tmp_path)


def test_without_hard_links_a_document_that_cannot_be_finished_holds_no_place(tmp_path, no_links, monkeypatch):
    sync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:  # the first is that of the temporary file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", in_folder(tmp_path, full, sync))
    with pytest.raises(OSError, match="No space left"):
        create(tmp_path / "claim.json", 1)
    assert os.listdir(tmp_path) == []
    assert create(tmp_path / "claim.json", 2)


def test_a_bucket_that_tells_late_who_came_first_is_believed(tmp_path, no_links, monkeypatch):
    sync, calls = os.fsync, []

    def stale(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            (tmp_path / "claim.json").write_text("1")
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", in_folder(tmp_path, stale, sync))
    assert not create(tmp_path / "claim.json", 2)
    assert documents.read_json(tmp_path / "claim.json") == 1


def test_a_link_whose_answer_was_lost_was_made(tmp_path, monkeypatch):
    link = os.link

    def lost(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))

    monkeypatch.setattr(os, "link", in_folder(tmp_path, lost, link))
    assert create(tmp_path / "claim.json", 1)
    assert not create(tmp_path / "claim.json", 2)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_temporary_file_that_is_deleted_meanwhile_costs_no_creator_its_document(tmp_path, monkeypatch, is_made):
    """By a driver that deletes what killed processes left. `is_made`: the server has made the link, and its answer was lost."""
    link, deleted = os.link, []

    def interrupted(source, target):
        if deleted:
            link(source, target)
            return
        if is_made:
            link(source, target)
        deleted.append(source)
        durable.delete_left(tmp_path)
        link(source if not is_made else target, target)

    monkeypatch.setattr(os, "link", in_folder(tmp_path, interrupted, link))
    assert create(tmp_path / "claim.json", 1)
    assert deleted
    assert not create(tmp_path / "claim.json", 2)
    assert documents.read_json(tmp_path / "claim.json") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["claim.json"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_fsync_is_no_obstacle(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", in_folder(tmp_path, refuse(number), os.fsync))
    check_writable(tmp_path)
    durable.write(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_fsync_is_a_failed_write(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", in_folder(tmp_path, refuse(number), os.fsync))
    with pytest.raises(OSError, match=os.strerror(number)):
        durable.write(tmp_path / "a", "text")
    with pytest.raises(StorageError, match=rf"cannot write to .*: {os.strerror(number)}"):
        check_writable(tmp_path)


def test_what_a_file_system_cannot_do_is_named(tmp_path, monkeypatch):
    replaces = refuse(errno.EOPNOTSUPP, only=lambda source, target: os.path.exists(target), real=os.replace)
    monkeypatch.setattr(os, "replace", replaces)
    with pytest.raises(StorageError, match=r"storage: cannot replace a file in .*: Operation not supported; set storage=PATH"):
        check_writable(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(os, "rename", refuse(errno.EOPNOTSUPP))
    with pytest.raises(StorageError, match=r"storage: cannot rename a folder in .*: Operation not supported; set storage=PATH"):
        check_writable(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(LocalStore, "create", lambda store, name, data: True)
    with pytest.raises(StorageError, match="lets two processes create one file"):
        check_writable(tmp_path)
    assert os.listdir(tmp_path) == []


def test_whether_a_document_exists_is_never_guessed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "stat", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        documents.exists(tmp_path / "a.json")
    monkeypatch.undo()
