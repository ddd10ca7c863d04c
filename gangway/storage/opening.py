"""The one way to open the storage of a run: a path or a URL becomes a store, and a client of a bucket is made once. Without JAX.

Keys, regions and endpoints come from the environment, as the tools of the clouds read it. A URL that cannot work is refused by
name, before anything is asked over a network.
"""

from __future__ import annotations

import configparser
import errno
import functools
import json
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from gangway.storage import usage
from gangway.storage.local_store import LocalStore
from gangway.storage.object_store import LIMITS, Limits, ObjectStore
from gangway.storage.store import Place, StorageRefused, Store, checked_name

BULK_TRIES = 5
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.S)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_INSTEAD = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}
"""Other names of the schemes."""
_ADVICE = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role that may read, write, "
    "list and delete",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`, or give the machine an account "
    "that may read, write, list and delete",
}


class BucketURL(NamedTuple):
    scheme: str
    bucket: str
    prefix: str
    """Without a slash at its ends; empty for the whole bucket."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def is_url(path: str | os.PathLike[str] | Place) -> bool:
    """True for `gs://bucket/run`; a local or mounted path has no scheme."""
    return "://" in str(path)


def parse(url: str) -> BucketURL:
    """Returns the parts of the URL of a bucket. Raises StorageRefused, which says what to write instead."""

    def refused(why: str) -> StorageRefused:
        return StorageRefused(errno.EINVAL, f"{why}; a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX is expected", url)

    match = _URL.fullmatch(url)
    if not match:
        raise refused("it is no URL")
    scheme, rest = match[1], match[2]
    if scheme not in _ADVICE:
        instead = _INSTEAD.get(scheme.lower(), scheme.lower())
        hint = f": write {instead}://{rest}" if instead in _ADVICE else ""
        raise refused(f"{scheme}:// is not known{hint}")
    if found := next((sign for sign in "?#" if sign in rest), None):
        what = "a query" if found == "?" else "a fragment"
        raise refused(f"it has {what} ({found}{rest.partition(found)[2]}), which a bucket does not take: leave it out")
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise refused(f"{bucket!r} is no name of a bucket")
    prefix = prefix.rstrip("/")
    try:
        return BucketURL(scheme, bucket, checked_name(prefix) if prefix else "")
    except ValueError as error:
        raise refused(str(error)) from error


def open_store(url: str | os.PathLike[str], limits: Limits | None = None) -> Store:
    """Returns the store of a path or a URL; `limits` are by default LIMITS. Nothing is asked of it yet. Raises StorageRefused if
    the URL cannot work."""
    limits = limits or LIMITS
    where = os.fspath(url)
    if not is_url(where):
        return LocalStore(where)
    parts = parse(where)
    in_bucket = _in_bucket(parts.scheme, parts.bucket, limits, _settings(parts.scheme, os.environ), os.getpid())
    return in_bucket(str(parts), prefix=parts.prefix)


def place_of(path: str | os.PathLike[str] | Place, limits: Limits | None = None) -> Place:
    """Returns the place of a path or a URL; the store of a URL is the whole bucket, that of a path the folder around it. `limits`
    are as for `open_store`."""
    if not isinstance(path, str | os.PathLike):
        return path
    where = os.fspath(path)
    if not is_url(where):
        folder, name = os.path.split(os.path.abspath(where))
        return Place(LocalStore(folder), name)
    parts = parse(where)
    return Place(open_store(f"{parts.scheme}://{parts.bucket}", limits), parts.prefix)


def place_of_run(run_folder: str | os.PathLike[str] | Place, limits: Limits | None = None) -> Place:
    """Returns the place of a run, for what is kept in it: of a folder, nothing in it is reached through a link, which whoever may
    write there may have planted. `limits` are as for `open_store`. Raises StorageRefused for a URL that cannot work."""
    place = place_of(run_folder, limits)
    return Place(LocalStore(place.url, follows_links=False)) if place.store.is_local else place


@functools.lru_cache(maxsize=32)
def _in_bucket(
    scheme: str, bucket: str, limits: Limits, settings: tuple[tuple[str, str], ...], process: int
) -> functools.partial[ObjectStore]:
    """Returns what makes a store in a bucket, of clients that are made once in a process: a fork must not share connections.
    Raises StorageRefused."""
    try:
        from obstore.store import GCSStore, S3Store
    except ImportError as error:
        message = f"{scheme}:// needs obstore, which is not installed: install gangway[cloud] on every host"
        raise StorageRefused(errno.ENOPKG, message, f"{scheme}://{bucket}") from error
    maker: Any = S3Store if scheme == "s3" else GCSStore
    config: dict[str, Any] = dict(settings)
    options: dict[str, Any] = {
        "timeout": f"{limits.request_s:g}s",
        "connect_timeout": f"{min(5.0, limits.request_s):g}s",
        "allow_http": True,
    }

    def with_tries(number: int) -> Any:
        retry = {"max_retries": number, "retry_timeout": timedelta(seconds=limits.patience_s)}
        return maker(bucket, client_options=options, retry_config=retry, **config)

    try:
        clients = {"client": with_tries(0), "bulk": with_tries(BULK_TRIES), "usage": usage.Usage(usage.HERE)}
    except Exception as error:  # obstore raises what its layers raise: a key file that is not there, a bad region
        message = f"the client cannot be made ({' '.join(str(error).split())[:300]}); {_ADVICE[scheme]}"
        raise StorageRefused(errno.EINVAL, message, f"{scheme}://{bucket}") from error
    return functools.partial(ObjectStore, limits=limits, advice=_ADVICE[scheme], **clients)


def _settings(scheme: str, environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns what the client is given beside what obstore reads of the environment by itself."""
    if scheme == "gs":
        where = environ.get("STORAGE_EMULATOR_HOST", "")
        url = where if "://" in where else f"http://{where}"
        key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        return (("service_account_key", json.dumps(key)),) if where else ()
    profile = {} if environ.get("AWS_ACCESS_KEY_ID") else _profile(environ)
    keys = profile if {"aws_access_key_id", "aws_secret_access_key"} <= profile.keys() else {}
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or profile.get("region")
    # obstore would ask the machine all the same, where there are no keys.
    asks_nobody = environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    found = {
        "endpoint": environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None,
        "access_key_id": keys.get("aws_access_key_id"),
        "secret_access_key": keys.get("aws_secret_access_key"),
        "token": keys.get("aws_session_token"),
        "region": region or "us-east-1",
        "metadata_endpoint": "http://127.0.0.1:9" if asks_nobody else None,
    }
    return tuple((name, value) for name, value in found.items() if value is not None)


def _profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the keys and the region of the profile in the files of the AWS tools; empty if there is none."""
    name = environ.get("AWS_PROFILE", "default")
    home = Path(environ.get("HOME") or os.sep)
    found: dict[str, str] = {}
    files = (("AWS_CONFIG_FILE", "config", f"profile {name}"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name))
    for variable, file, section in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(environ.get(variable) or home / ".aws" / file)
        except (configparser.Error, UnicodeDecodeError):
            continue
        for one in (section, name):
            if parser.has_section(one):
                found.update(parser.items(one))
                break
    return found
