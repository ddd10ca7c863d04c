"""Requests to a run in its storage: each is taken once, by the launch that is meant."""

from __future__ import annotations

import json

import pytest

from orchestrator.run_state import requests


def test_a_request_is_taken_once_by_the_launch_that_is_meant(tmp_path):
    assert requests.take(str(tmp_path), "b") == []
    early = requests.send(str(tmp_path), "stop", "a")
    path = requests.send(str(tmp_path), "save", "b")
    assert requests.is_waiting(path)
    (request,) = requests.take(str(tmp_path), "b")
    assert (request.kind, request.launch_id) == ("save", "b")
    assert "@" in request.by
    assert not requests.is_waiting(path)
    assert not requests.is_waiting(early)  # it came too late for its launch, and must not stop this one
    assert requests.take(str(tmp_path), "b") == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"kind": "stop"}', json.dumps({"kind": "format", "launch_id": "b", "by": "x", "at_s": 1})]
)
def test_what_is_no_request_is_not_done(tmp_path, text):
    (tmp_path / "requests").mkdir()
    for name in ("stop-0123456789ab.json", "notes.json"):
        (tmp_path / "requests" / name).write_text(text)
    assert requests.take(str(tmp_path), "b") == []
    assert [path.name for path in (tmp_path / "requests").iterdir()] == ["notes.json"]  # the user's own


def test_a_planted_link_is_no_request_and_holds_no_other_up(tmp_path):
    users = tmp_path / "users.json"
    users.write_text(json.dumps({"kind": "stop", "launch_id": "b", "by": "x", "at_s": 1}))
    (tmp_path / "requests" / "deeper").mkdir(parents=True)
    (tmp_path / "requests" / "stop-000000000000.json").symlink_to(users)
    (tmp_path / "requests" / "deeper" / "stop-000000000001.json").write_text(users.read_text())
    requests.send(str(tmp_path), "save", "b")
    assert [request.kind for request in requests.take(str(tmp_path), "b")] == ["save"]
    assert users.exists()
