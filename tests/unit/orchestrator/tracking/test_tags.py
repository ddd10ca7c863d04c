from __future__ import annotations

import os
import subprocess

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
    clean = {"mlflow.source.git.commit": commit, "mlflow.source.git.branch": "work", "git.dirty": "false"}
    assert tags.of_code(tmp_path) == clean
    (tmp_path / "b").write_text("2")
    assert tags.of_code(tmp_path) == clean | {"git.dirty": "true"}


def test_without_git_or_a_repository_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert tags.of_code(tmp_path) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tags.of_code(os.getcwd()) == {}


def test_a_user_without_a_name_is_a_number(monkeypatch):
    def fail():
        raise KeyError("no such user")

    monkeypatch.setattr("getpass.getuser", fail)
    assert tags.of_user(["/bin/gangway", "run"]) == {"mlflow.user": str(os.getuid()), "mlflow.source.name": "gangway"}


def test_versions_are_tags():
    assert tags.of_versions({"jax": "0.10"}) == {"version.jax": "0.10"}
