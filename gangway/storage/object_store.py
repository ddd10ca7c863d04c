"""A bucket as the storage of a run, by obstore: s3:// and gs://. Without JAX.

obstore itself tries nothing again here. Each request is one attempt, counted, with a limit; what may pass is tried again with
growing waits until the patience ends. So a request whose answer was lost is known for what it is.
"""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gangway.storage import durable, failed_requests
from gangway.storage.store import Entry, StorageFull, StorageProblem, StorageRefused, StorageUnavailable, Store, checked_name
from gangway.storage.usage import Usage
from gangway.waits import pause

T = TypeVar("T")
PART_BYTES = 16 << 20
"""What one request of a download fetches, and of an upload sends."""
PARTS_AT_ONCE = 4
DELETED_AT_ONCE = 1000
"""Objects: what one request of S3 takes."""
NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist", re.I)
_STATUS = re.compile(r"status code: (\d{3})|\b(4\d\d|5\d\d) [A-Z][a-z]+")
_FULL = re.compile(r"StorageFull|QuotaExceeded|InsufficientStorage|NotEnoughSpace", re.I)
_NO_CREDENTIALS = re.compile(r"169\.254\.169\.254|/latest/api/token|/latest/meta-data|computeMetadata|metadata\.google")
_PASSES = re.compile(r"RequestTimeout|SlowDown|ConditionalRequestConflict|OperationAborted")
"""Codes of answers in the 400s that pass."""
ELSEWHERE = "the bucket is in another region, or at another endpoint: set AWS_REGION, or AWS_ENDPOINT_URL"
NO_FAILURE = frozenset({errno.ERANGE, errno.ENOTSUP})
"""What an answer of these means was asked for."""
PASSES = frozenset({408, 409, 425, 429, *range(500, 600)} - {501, 505, 507})
"""The statuses of answers that may be others a moment later."""


@dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds."""

    request_s: float = 20.0
    """For the answer to one request; also for each part of a file."""
    patience_s: float = 60.0
    """From the first try on; then the storage counts as unavailable."""
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0


LIMITS = Limits()
FOR_PEOPLE = Limits(request_s=10.0, patience_s=15.0)
"""For somebody who waits at a terminal."""
BRIEFLY = Limits(request_s=5.0, patience_s=5.0)
"""For what a run can begin without."""


class ObjectStore(Store):
    """The objects of a bucket below `prefix`, through a client of obstore that tries nothing again."""

    is_local, tags_last = False, True

    def __init__(
        self,
        url: str,
        client: Any,
        prefix: str,
        limits: Limits = LIMITS,
        *,
        advice: str = "",
        bulk: Any = None,
        usage: Usage | None = None,
    ):
        """`advice` says what to do about credentials, for messages. `bulk` is a client for large files, which may try a part of
        one again by itself. `usage` is that of all stores of the bucket."""
        self.url, self.limits, self.usage = url.rstrip("/"), limits, usage or Usage()
        self._bulk = client if bulk is None else bulk
        self._client, self._prefix, self._advice = client, f"{prefix}/" if prefix else "", advice
        self.keeps_versions = False
        """Whether a write has shown that the bucket keeps what is replaced and deleted; only S3 says so."""

    def get(self, name: str) -> bytes | None:
        data = self._ask("get", name, lambda key: bytes(self._client.get(key).bytes()))
        self.usage.add(bytes_in=len(data or b""))
        return data

    def get_part(self, name: str, start: int, stop: int) -> bytes | None:
        if stop <= start:
            return None if self.entry(name) is None else b""
        try:
            data = self._ask("get", name, lambda key: bytes(self._client.get_range(key, start=start, end=stop)))
        except StorageRefused as error:
            if error.errno == errno.ERANGE:  # it ends before `start`
                return b""
            raise
        self.usage.add(bytes_in=len(data or b""))
        return data

    def entry(self, name: str) -> Entry | None:
        found = self._ask("head", name, self._client.head)
        if found is None and self._ask("get", name, self._client.get) is not None:
            found = self._ask("head", name, self._client.head)
        # The answer to HEAD has no body: it does not tell whether the object is not there, or the whole bucket. That of GET does.
        return None if found is None else self._entry(found)

    def put(self, name: str, data: bytes, *, makes_folder: bool = True) -> None:
        answer = self._ask("put", name, lambda key: self._client.put(key, data, use_multipart=False), may_be_absent=False)
        self._note_version(answer)
        self.usage.add(bytes_out=len(data))

    def create(self, name: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        attempts = _Attempts(self, "put", name)
        was_lost = False
        while True:
            try:
                answer = attempts.once(lambda key: self._client.put(key, data, mode="create", use_multipart=False))
            except (AlreadyExistsError, PreconditionError) as error:
                there = self.get(name)
                if there is not None:
                    # Equal bytes are ours only if the answer to one of our requests was lost: else another writer's are equal.
                    return was_lost and there == data
                # Two writers at one moment (409): nobody has written, and nobody may ever.
                attempts.wait(StorageUnavailable(errno.EIO, f"two writers at one moment: {_line(error)}", self._where(name)))
            except StorageUnavailable as error:
                was_lost = True
                attempts.wait(error)
            else:
                self._note_version(answer)
                self.usage.add(bytes_out=len(data))
                return True

    def list(self, prefix: str = "", after: str = "") -> Sequence[Entry]:
        offset = self._prefix + after if after else None

        def all_pages(key: str) -> list[Any]:
            return [item for page in self._client.list(key or None, offset=offset) for item in page]

        found = self._ask("list", prefix, all_pages, may_be_absent=False)
        # Again: a store that ignores where to begin begins at the beginning.
        return sorted(entry for item in found or [] if (entry := self._entry(item)).name > after)

    def has_folder(self, prefix: str) -> bool:
        def first_page(key: str) -> bool:
            return any(len(page) for page in self._client.list(key or None, chunk_size=1))

        return bool(self._ask("list", prefix, first_page, may_be_absent=False))

    def folders(self, prefix: str = "") -> Sequence[str]:
        found = self._ask("list", prefix, lambda key: self._client.list_with_delimiter(key or None), may_be_absent=False)
        assert found is not None
        return sorted({each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"]})

    def delete(self, name: str) -> None:
        self._ask("delete", name, self._client.delete)

    def delete_all(self, prefix: str) -> None:
        checked_name(prefix)
        keys = [self._prefix + entry.name for entry in self.list(prefix)]
        for begin in range(0, len(keys), DELETED_AT_ONCE):
            self._delete_some(prefix, keys[begin : begin + DELETED_AT_ONCE])

    def _delete_some(self, prefix: str, keys: Sequence[str]) -> None:
        self._ask("delete", prefix, lambda _: self._client.delete(keys))
        if not self.url.startswith("s3://"):  # which takes all in one request
            self.usage.add(delete=len(keys) - 1)

    def upload(self, name: str, path: Path) -> None:
        size = path.stat().st_size
        if size <= PART_BYTES:
            self.put(name, path.read_bytes())
            return

        def send(key: str) -> Any:
            with open(path, "rb") as file:
                return self._bulk.put(key, file, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

        self._note_version(self._ask("put", name, send, may_be_absent=False))
        self.usage.add(bytes_out=size, put=-(-size // PART_BYTES) + 1)

    def download(self, name: str, path: Path) -> None:
        if (found := self.entry(name)) is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self._where(name))
        starts = range(0, found.size, PART_BYTES)
        with durable.whole(path) as file, ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            for begin in range(0, len(starts), PARTS_AT_ONCE):  # only so many parts are in memory
                some = starts[begin : begin + PARTS_AT_ONCE]
                for part in threads.map(lambda start: self.get_part(name, start, min(start + PART_BYTES, found.size)), some):
                    if part is None:
                        raise FileNotFoundError(errno.ENOENT, "the object was deleted meanwhile", self._where(name))
                    file.write(part)
            if file.tell() != found.size:
                raise StorageUnavailable(errno.EIO, "the object was replaced while it was read", self._where(name))

    def room(self) -> int | None:
        return None

    def make_folder(self, prefix: str, *, around: bool = False) -> None:
        pass

    def settle(self, prefix: str) -> None:
        pass

    def delete_left(self, prefix: str) -> None:
        pass

    def around(self) -> Store:
        raise ValueError(f"{self.url}: nothing is known of what is around a bucket")

    def _key(self, name: str) -> str:
        return self._prefix + checked_name(name) if name else self._prefix.rstrip("/")

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _entry(self, item: Mapping[str, Any]) -> Entry:
        name, tag = item["path"].removeprefix(self._prefix), item["e_tag"] or item["version"] or ""
        return Entry(name, item["size"], tag, item["last_modified"].timestamp())

    def _note_version(self, answer: Any) -> None:
        # Of Google every object has a generation, whether old ones are kept or not.
        if self.url.startswith("s3://") and answer and answer.get("version") not in (None, "", "null"):
            self.keeps_versions = True

    def _ask(self, kind: str, name: str, work: Callable[[str], T], *, may_be_absent: bool = True) -> T | None:
        """Calls `work` with the key until it has an answer. Returns None if there is no such object."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        attempts = _Attempts(self, kind, name)
        while True:
            try:
                return attempts.once(work)
            except (AlreadyExistsError, PreconditionError) as error:  # so obstore calls a 409, of whatever request
                attempts.wait(StorageUnavailable(errno.EIO, _line(error), self._where(name)))
            except FileNotFoundError as error:
                if may_be_absent:
                    return None
                raise StorageRefused(errno.ENOENT, _line(error), self._where(name)) from error
            except StorageUnavailable as error:
                attempts.wait(error)

    def problem_of(self, error: Exception, name: str) -> StorageProblem:
        """Returns an error of obstore as one of the three kinds."""
        from obstore import exceptions

        text, line, status = str(error), _line(error), _status(str(error))
        denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or status in (401, 403)
        elsewhere = status in (301, 307, 308) or "Received redirect" in text
        passes = status is None or status in PASSES or _PASSES.search(text)
        # The first that holds counts.
        kinds: list[tuple[Any, type[StorageProblem], int, str]] = [
            (_NO_CREDENTIALS.search(text), StorageRefused, errno.EACCES, f"no credentials were found; {self._advice}"),
            (NO_BUCKET.search(text), StorageRefused, errno.ENOENT, "there is no such bucket: create it, or correct the name"),
            # Before `denied`: some stores say so with 403.
            (_FULL.search(text) or status == 507, StorageFull, errno.ENOSPC, line),
            (denied, StorageRefused, errno.EACCES, f"access is refused ({line}); {self._advice}"),
            (status == 416 or "Invalid range" in text, StorageRefused, errno.ERANGE, line),
            (elsewhere, StorageRefused, errno.EINVAL, ELSEWHERE),
            (isinstance(error, exceptions.NotSupportedError | NotImplementedError), StorageRefused, errno.ENOTSUP, line),
            (passes, StorageUnavailable, errno.EIO, line),
        ]
        kind, number, message = next((row[1:] for row in kinds if row[0]), (StorageRefused, errno.EINVAL, line))
        return kind(number, message.rstrip("; "), self._where(name))


class _Attempts:
    """The tries of one call: each is counted, and they end with the patience."""

    def __init__(self, store: ObjectStore, kind: str, name: str):
        self._store, self._kind, self._name = store, kind, name
        self._key = store._key(name) if kind == "list" else store._key(checked_name(name))
        self._began_s = time.monotonic()
        self._wait_s = store.limits.first_wait_s
        self._tries = 0

    def once(self, work: Callable[[str], T]) -> T:
        """Raises FileNotFoundError, AlreadyExistsError or PreconditionError of obstore as they are, and all else as one of the
        three kinds."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        self._tries += 1
        self._store.usage.add(**{self._kind: 1}, again=int(self._tries > 1))
        try:
            return work(self._key)
        except (AlreadyExistsError, PreconditionError, StorageProblem):
            raise
        except FileNotFoundError as error:
            if NO_BUCKET.search(str(error)):
                raise self._store.problem_of(error, self._name) from error
            raise
        except (BaseError, OSError, ValueError, NotImplementedError) as error:
            problem = self._store.problem_of(error, self._name)
            if problem.errno not in NO_FAILURE:
                failed_requests.HERE.add(f"{problem.filename}: {problem.strerror}")
            raise problem from error

    def wait(self, error: StorageUnavailable) -> None:
        """Waits before the next try. Raises the error if the patience has ended."""
        limits, passed_s = self._store.limits, time.monotonic() - self._began_s
        if passed_s + self._wait_s > limits.patience_s:
            message = f"{error.strerror} (tried {self._tries} times in {passed_s:.0f} s)"
            raise StorageUnavailable(error.errno, message, error.filename) from error
        # Not all hosts at the same moment.
        pause(self._wait_s * (0.5 + random.random() / 2))
        self._wait_s = min(2 * self._wait_s, limits.longest_wait_s)


def _status(text: str) -> int | None:
    """Returns the status of the answer that a message of obstore tells of; None if there was no answer."""
    with suppress(StopIteration):
        return int(next(number for match in _STATUS.finditer(text) for number in match.groups() if number))
    return None


def _line(error: Exception) -> str:
    """Returns what is of use of a message of obstore, in one line."""
    text = re.sub(r"\s+", " ", str(error).partition("Debug source")[0]).strip()
    code = re.search(r"<Code>(.*?)</Code>(?:<Message>(.*?)</Message>)?", text)
    if code:
        text = f"{text.partition('<')[0].rstrip(': ')}: {code[1]}" + (f" ({code[2]})" if code[2] else "")
    return text if len(text) <= 300 else text[:297] + "..."
