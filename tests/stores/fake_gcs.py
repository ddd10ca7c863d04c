"""Google Cloud Storage in memory, with right preconditions and consistent lists.

It has the part of the JSON API that tensorstore and gcsfs use, and the part of the XML API that obstore uses. Requests are taken
one after the other, so each is atomic.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.sax.saxutils import escape

from tests.stores.serving import Answer, Handler, Request, served

WHEN = "2026-01-01T00:00:00.000Z"
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")
_API = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?")
_XML = re.compile(r"/([^/]+)(?:/(.*))?", re.S)


class FakeGCS:
    """All buckets; those in `absent` are not there."""

    page = 1000
    """The most that one answer lists."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.absent: set[str] = set()
        self._uploads: dict[str, tuple[str, str, str | None, bytearray]] = {}
        self._parts: dict[str, dict[int, bytes]] = {}
        self._generation = 1_700_000_000_000_000
        self._lock = threading.Lock()

    @contextmanager
    def serving(self) -> Iterator[str]:
        fake = self

        class One(Handler):
            def answer(self, request: Request) -> Answer:
                with fake._lock:
                    return fake.answer(request)

        with served(One) as url:
            yield url

    def answer(self, request: Request) -> Answer:
        path = request.path
        if match := _UPLOAD.fullmatch(path):
            return self._absent(match[1], False) or self._upload(request, match[1])
        if match := _API.fullmatch(path):
            return self._absent(match[1], False) or self._api(request, match[1], match[2])
        if match := _XML.fullmatch(path):
            return self._absent(match[1], True) or self._xml(request, match[1], match[2])
        return _refused(400, "notUnderstood")

    def _absent(self, bucket: str, xml: bool) -> Answer | None:
        if bucket not in self.absent:
            return None
        if not xml:
            return _refused(404, "The specified bucket does not exist.")
        text = "<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist.</Message></Error>"
        return Answer(404, text.encode(), {"Content-Type": "application/xml"})

    def _is_blocked(self, key: tuple[str, str], generation: str | None) -> bool:
        """Whether a condition (0: there is no object) does not hold."""
        return generation is not None and int(generation) != (self.objects[key][1] if key in self.objects else 0)

    def _store(self, key: tuple[str, str], data: bytes, generation: str | None) -> Answer:
        if self._is_blocked(key, generation):
            return _refused(412, "conditionNotMet")
        self._generation += 1
        self.objects[key] = (data, self._generation)
        return _json(self._meta(key))

    def _meta(self, key: tuple[str, str]) -> dict[str, Any]:
        data, generation = self.objects[key]
        return {
            **{"kind": "storage#object", "bucket": key[0], "name": key[1], "size": str(len(data)), "etag": str(generation)},
            **{"generation": str(generation), "metageneration": "1", "contentType": "application/octet-stream"},
            **{"md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(), "timeCreated": WHEN, "updated": WHEN},
        }

    def _upload(self, request: Request, bucket: str) -> Answer:
        query = request.query
        kind, condition = query.get("uploadType"), query.get("ifGenerationMatch")
        if kind == "media":
            return self._store((bucket, query["name"]), request.body, condition)
        if kind == "multipart":
            name, data = _two_parts(request)
            return self._store((bucket, query.get("name") or name), data, condition)
        if "upload_id" not in query:
            name, ident = query.get("name") or json.loads(request.body)["name"], uuid.uuid4().hex
            self._uploads[ident] = (bucket, name, condition, bytearray())
            where = f"http://{request.headers['Host']}{request.path}?uploadType=resumable&upload_id={ident}"
            return Answer(200, b"{}", {"Location": where})
        bucket, name, condition, held = self._uploads[query["upload_id"]]
        held += request.body
        total = request.headers.get("Content-Range", f"/{len(held)}").rpartition("/")[2]
        if total == "*" or int(total) > len(held):
            return Answer(308, b"", {"Range": f"bytes=0-{len(held) - 1}"} if held else {})
        return self._store((bucket, name), bytes(held), condition)

    def _listing(self, bucket: str, query: dict[str, str]) -> tuple[list[str], list[str], str]:
        """Returns names, folders, and where the next page begins."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        after = query.get("pageToken") or query.get("continuation-token") or query.get("start-after") or ""
        limit = min(int(query.get("maxResults") or query.get("max-keys") or self.page), self.page)
        end = query.get("endOffset")
        names = sorted(
            name
            for where, name in self.objects
            if where == bucket and name.startswith(prefix) and name > after
            if name >= query.get("startOffset", "") and not (end and name >= end)
        )
        found: list[str] = []
        folders: list[str] = []
        last = ""
        for name in names:
            if len(found) >= limit:
                return found, folders, last
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                found.append(name)
            elif name[: cut + 1] not in folders:
                folders.append(name[: cut + 1])
            last = name
        return found, folders, ""

    def _api(self, request: Request, bucket: str, name: str | None) -> Answer:
        query, key = request.query, (bucket, name or "")
        if not name:
            if not request.path.rstrip("/").endswith("/o"):
                return _json({"kind": "storage#bucket", "name": bucket, "timeCreated": WHEN})
            names, folders, token = self._listing(bucket, query)
            page = {"kind": "storage#objects", "items": [self._meta((bucket, one)) for one in names], "prefixes": folders}
            return _json(page | ({"nextPageToken": token} if token else {}))
        if key not in self.objects:
            return _refused(404, "notFound")
        if request.method == "DELETE":
            return self._delete(key, query.get("ifGenerationMatch"))
        if query.get("alt") == "media":
            return self._content(request, key)
        return _json(self._meta(key)) if request.method == "GET" else _refused(501, "notImplemented")

    def _xml(self, request: Request, bucket: str, name: str | None) -> Answer:
        key = (bucket, name or "")
        if not name:
            return self._xml_listing(bucket, request.query)
        if "uploads" in request.query or "uploadId" in request.query:
            return self._xml_parts(request, key)
        if request.method == "PUT":
            answer = self._store(key, request.body, request.headers.get("x-goog-if-generation-match"))
            if answer.status != 200:
                return answer
            generation = str(self.objects[key][1])
            return Answer(200, b"", {"ETag": f'"{generation}"', "x-goog-generation": generation})
        if key not in self.objects:
            return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {"Content-Type": "application/xml"})
        return self._delete(key, None) if request.method == "DELETE" else self._content(request, key)

    def _xml_parts(self, request: Request, key: tuple[str, str]) -> Answer:
        """Takes an object in parts: begun, each part sent, and completed."""
        query, head = request.query, {"Content-Type": "application/xml"}
        if "uploads" in query:
            ident = uuid.uuid4().hex
            self._parts[ident] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{ident}</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, text.encode(), head)
        parts = self._parts[query["uploadId"]]
        if request.method == "PUT":
            parts[int(query["partNumber"])] = request.body
            return Answer(200, b"", {"ETag": f'"{query["partNumber"]}"'})
        self._store(key, b"".join(parts[number] for number in sorted(parts)), None)
        return Answer(200, f'<R><ETag>"{self.objects[key][1]}"</ETag></R>'.encode(), head)

    def _xml_listing(self, bucket: str, query: dict[str, str]) -> Answer:
        names, folders, token = self._listing(bucket, query)
        rows = [
            f"<Contents><Key>{escape(name)}</Key><LastModified>{WHEN}</LastModified><Size>{len(self.objects[bucket, name][0])}"
            f'</Size><ETag>"{self.objects[bucket, name][1]}"</ETag></Contents>'
            for name in names
        ]
        rows += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders]
        rows += [f"<NextContinuationToken>{escape(token)}</NextContinuationToken>"] if token else []
        text = f'<?xml version="1.0"?><ListBucketResult>{"".join(rows)}</ListBucketResult>'
        return Answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _delete(self, key: tuple[str, str], condition: str | None) -> Answer:
        if self._is_blocked(key, condition):
            return _refused(412, "conditionNotMet")
        del self.objects[key]
        return Answer(204)

    def _content(self, request: Request, key: tuple[str, str]) -> Answer:
        data, generation = self.objects[key]
        headers = {
            **{"ETag": f'"{generation}"', "x-goog-generation": str(generation), "x-goog-metageneration": "1"},
            **{"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Content-Type": "application/octet-stream"},
        }
        query = request.query
        if query.get("ifGenerationNotMatch") == str(generation) or request.headers.get("If-None-Match") == headers["ETag"]:
            return Answer(304, b"", headers)
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            return _refused(412, "conditionNotMet")
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
            if first >= len(data):
                return Answer(416, b"<Error><Code>InvalidRange</Code></Error>", {"Content-Type": "application/xml"})
            return Answer(206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})
        return Answer(200, data, headers, declared=len(data))


def _two_parts(request: Request) -> tuple[str, bytes]:
    """Returns the name and the contents of an upload in two parts."""
    match = re.search(r"boundary=['\"]?([^'\";]+)", request.headers["Content-Type"])
    assert match
    parts = request.body.split(f"--{match[1]}".encode())[1:3]
    head, data = (part.replace(b"\r\n\r\n", b"\n\n", 1).partition(b"\n\n")[2] for part in parts)
    return json.loads(head).get("name", ""), data.removesuffix(b"\n").removesuffix(b"\r")


def _json(document: dict[str, Any]) -> Answer:
    return Answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})


def _refused(status: int, why: str) -> Answer:
    error = {"error": {"code": status, "message": why, "errors": [{"reason": why}]}}
    return Answer(status, json.dumps(error).encode(), {"Content-Type": "application/json"})
