"""A path or a URL becomes a store, or is refused by name."""

import os

import pytest

from gangway.storage import opening
from gangway.storage.opening import is_url, open_store, parse, place_of
from gangway.storage.store import StorageRefused


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket/run?versionId=3", r"it has a query \(\?versionId=3\), which a bucket does not take: leave it out"),
        ("gs://bucket/run#1", r"it has a fragment \(#1\)"),
        ("gcs://bucket/run", "gcs:// is not known: write gs://bucket/run"),
        ("s3a://bucket/run", "s3a:// is not known: write s3://bucket/run"),
        ("S3://bucket/run", "S3:// is not known: write s3://bucket/run"),
        ("file:///tmp/run", "file:// is not known; a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX is expected"),
        ("az://bucket/run", "az:// is not known"),
        ("https://storage.googleapis.com/b/run", "https:// is not known"),
        ("s3://", "'' is no name of a bucket"),
        ("s3:///run", "'' is no name of a bucket"),
        ("gs://Bucket/run", "'Bucket' is no name of a bucket"),
        ("s3://bucket/a//b", "is no name in a store"),
        ("s3://bucket/../b", "is no name in a store"),
        ("s3:/bucket/run", "it is no URL"),
    ],
)
def test_a_url_that_cannot_work_is_refused_by_name(url, why):
    with pytest.raises(StorageRefused, match=why) as error:
        parse(url)
    assert error.value.filename == url
    if is_url(url):
        with pytest.raises(StorageRefused):
            open_store(url)
        with pytest.raises(StorageRefused):
            place_of(url)


def test_a_folder_may_have_any_name(tmp_path):
    assert open_store(tmp_path / "a?b#c%d").url == f"{tmp_path}/a?b#c%d"
    place = place_of(tmp_path / "a?b" / "c.json")
    assert (place.url, place.key, place.store.url) == (f"{tmp_path}/a?b/c.json", "c.json", f"{tmp_path}/a?b")
    assert place_of(place) is place
    assert not is_url(place)


def test_the_same_bucket_has_one_client(monkeypatch):
    one, other = open_store("s3://bucket/a/"), place_of("s3://bucket/a/b.json")
    assert one.usage is other.store.usage
    assert (one.url, other.url, other.name, is_url(other)) == ("s3://bucket/a", "s3://bucket/a/b.json", "b.json", True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert open_store("s3://bucket/a").usage is not one.usage
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert open_store("s3://bucket/a").usage is not one.usage


def test_keys_and_region_come_from_the_profile_where_the_environment_has_none(tmp_path):
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = K\naws_secret_access_key = S%\naws_session_token = T\n")
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-west-1\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "AWS_CONFIG_FILE": str(tmp_path / "config")}
    found = dict(opening._settings("s3", files | {"AWS_PROFILE": "lab"}))
    assert found == {"access_key_id": "K", "secret_access_key": "S%", "token": "T", "region": "eu-west-1"}
    assert dict(opening._settings("s3", files | {"AWS_ACCESS_KEY_ID": "E", "AWS_PROFILE": "lab"})) == {"region": "us-east-1"}
    (tmp_path / "credentials").write_text("no file of that form")
    assert dict(opening._settings("s3", files)) == {"region": "us-east-1"}


def test_a_key_file_that_is_not_there_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(StorageRefused, match=r"none\.json.*; set GOOGLE_APPLICATION_CREDENTIALS"):
        open_store("gs://other-bucket/run")


def test_without_the_library_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(StorageRefused, match=r"gs:// needs obstore, which is not installed: install gangway\[cloud\]"):
        open_store("gs://third-bucket/run")
