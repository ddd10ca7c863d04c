"""What code and which packages a run was made with, as tags of MLflow: they show which run can be made again."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 5.0


def of_code(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the commit of the folder and whether files differ from it, by the names that MLflow shows; nothing where there is
    no Git, no commit, or no answer in time. Reads alone: it takes no lock of the repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    branch, changed = _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), _git(folder, "status", "--porcelain")
    tags = {"mlflow.source.git.commit": commit, "mlflow.source.git.branch": branch or ""}
    # No answer is none: a repository whose state is not known is not called clean.
    return tags | ({} if changed is None else {"git.dirty": str(bool(changed)).lower()})


def of_user(command: list[str]) -> dict[str, str]:
    """Returns who has started the run, and by which program."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry and without a name
        user = str(os.getuid())
    return {"mlflow.user": user, "mlflow.source.name": Path(command[0]).name if command else ""}


def of_versions(versions: Mapping[str, str]) -> dict[str, str]:
    return {f"version.{name}": version for name, version in versions.items()}


def _git(folder: str | os.PathLike[str], *words: str) -> str | None:
    """Returns what Git answers; None if it does not."""
    command = ["git", "--no-optional-locks", "-C", os.fspath(folder), *words]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()
