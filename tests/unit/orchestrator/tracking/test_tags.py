from __future__ import annotations

import os
import subprocess
import threading

from orchestrator.tracking import tags


def git(folder, *words):
    about = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *about, "-C", folder, *words], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_the_folder_and_whether_it_was_changed(tmp_path):
    git(tmp_path, "init", "-q", "-b", "work")
    assert tags.of_code(tmp_path) == {}  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    clean = {"mlflow.source.git.commit": commit, "mlflow.source.git.branch": "work", "mlflow.source.git.dirty": "false"}
    assert tags.of_code(tmp_path) == clean
    (tmp_path / "b").write_text("2")
    assert tags.of_code(tmp_path) == clean | {"mlflow.source.git.dirty": "true"}
    assert tags.reading_code(tmp_path)() == clean | {"mlflow.source.git.dirty": "true"}


def test_without_git_or_a_repository_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert tags.of_code(tmp_path) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tags.of_code(os.getcwd()) == {}


def test_a_repository_whose_state_is_not_known_is_not_called_clean(tmp_path, monkeypatch):
    git = tmp_path / "git"
    git.write_text('#!/bin/sh\ncase "$*" in *status*) exit 1;; *) echo abc;; esac\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tags.of_code(tmp_path) == {"mlflow.source.git.commit": "abc", "mlflow.source.git.branch": "abc"}


def test_a_user_without_a_name_is_a_number(monkeypatch):
    def fail():
        raise KeyError("no such user")

    monkeypatch.setattr("getpass.getuser", fail)
    assert tags.of_user(["/bin/gangway", "run"]) == {
        "mlflow.user": str(os.getuid()),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": "gangway",
    }


def test_versions_are_tags_and_are_told_with_the_code():
    found = tags.of_versions({"jax": "0.10"})
    assert found == {"version.jax": "0.10"}
    found |= {"mlflow.source.git.commit": "a" * 40, "mlflow.source.git.branch": "work", "mlflow.user": "me"}
    assert tags.made_with(found) == ["commit aaaaaaaaaaaa (work), perhaps changed", "jax 0.10"]
    dirty = found | {"mlflow.source.git.dirty": "true"}
    assert tags.made_with(dirty)[0] == "commit aaaaaaaaaaaa (work), with changes that are not committed"
    assert tags.made_with({"mlflow.user": "me"}) == []


def test_the_code_is_read_beside_what_else_begins(monkeypatch):
    monkeypatch.setattr(tags, "of_code", lambda folder: {folder: threading.current_thread().name})
    assert tags.reading_code("here")() == {"here": "code"}
