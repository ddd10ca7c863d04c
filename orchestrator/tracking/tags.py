"""What code and which packages a run was made with, as tags of MLflow: they show which run can be made again."""

from __future__ import annotations

import getpass
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

TIMEOUT_S = 5.0
COMMIT, BRANCH, DIRTY = "mlflow.source.git.commit", "mlflow.source.git.branch", "mlflow.source.git.dirty"
VERSION = "version."
REPORT = "report"
"""The folder of the report among the artifacts."""


def of_code(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the commit of the folder and whether files differ from it, by the names that MLflow shows; nothing where there is
    no Git, no commit, or no answer in time. Reads alone: it takes no lock of the repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    branch, changed = _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), _git(folder, "status", "--porcelain")
    tags = {COMMIT: commit, BRANCH: branch or ""}
    # No answer is none: a repository whose state is not known is not called clean.
    return tags | ({} if changed is None else {DIRTY: str(bool(changed)).lower()})


def reading_code(folder: str | os.PathLike[str]) -> Callable[[], dict[str, str]]:
    """Begins to read `of_code`, which takes seconds in a large repository, and returns a function that waits for it."""
    found: dict[str, str] = {}
    thread = threading.Thread(target=lambda: found.update(of_code(folder)), name="code", daemon=True)
    thread.start()

    def result() -> dict[str, str]:
        thread.join()
        return found

    return result


def made_with(tags: Mapping[str, str]) -> list[str]:
    """Returns what the tags of a run say of its code and its packages, for people."""
    dirty = {"true": ", with changes that are not committed", "false": ""}.get(tags.get(DIRTY, ""), ", perhaps changed")
    code = [f"commit {tags[COMMIT][:12]} ({tags.get(BRANCH, '')}){dirty}"] if COMMIT in tags else []
    versions = sorted((name, version) for name, version in tags.items() if name.startswith(VERSION))
    return code + [f"{name.removeprefix(VERSION)} {version}" for name, version in versions]


def of_user(command: list[str]) -> dict[str, str]:
    """Returns who has started the run, and by which program."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry and without a name
        user = str(os.getuid())
    return {"mlflow.user": user, "mlflow.source.type": "LOCAL", "mlflow.source.name": Path(command[0]).name if command else ""}


def of_versions(versions: Mapping[str, str]) -> dict[str, str]:
    return {f"{VERSION}{name}": version for name, version in versions.items()}


def _git(folder: str | os.PathLike[str], *words: str) -> str | None:
    """Returns what Git answers; None if it does not."""
    command = ["git", "--no-optional-locks", "-C", os.fspath(folder), *words]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()
