"""The store of MLflow in the storage of a run: it is made whole or not at all, and is moved with the storage."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gangway.storage import durable, ours

ARTIFACTS = "mlartifacts"
UNFINISHED = ours.named("an unfinished database", r".+\.unfinished")
PLACES = (("experiments", "artifact_location"), ("runs", "artifact_uri"), ("logged_models", "artifact_location"))
"""Tables and columns in which MLflow keeps where artifacts are."""


def prepare(uri: str, *, is_own: bool) -> str:
    """Makes the database if it is missing, so that a database is either complete or absent; returns where artifacts go.

    MLflow makes its tables one migration at a time: two processes that do it at once, or one that dies in the middle, leave
    a database that no MLflow can open. So it is made under a lock, in a file that gets its name when it is complete. `is_own`: it
    belongs to the storage of the run; if it was moved or copied with that, it learns where its artifacts are now.
    """
    path = os.path.abspath(uri.removeprefix("sqlite:///").partition("?")[0])
    folder = os.path.dirname(path)
    # As a URL: MLflow takes a path for one, and decodes it.
    artifacts = Path(os.path.realpath(folder), ARTIFACTS).as_uri()
    os.makedirs(folder, exist_ok=True)
    with locked(path + ".lock"):
        if not os.path.exists(path):
            _make(path, artifacts)
        elif is_own:
            relocate(path, artifacts)
    return artifacts


def relocate(path: str, artifacts: str) -> None:
    """Changes the places of artifacts that the database names, if it was made in another folder, to those beside it."""
    with closing(sqlite3.connect(path, timeout=30.0)) as database, database:
        # That of MLflow's own experiment is what the database was made with.
        row = database.execute("select artifact_location from experiments where experiment_id = 0").fetchone()
        before = str(row[0]).removesuffix("/0") if row else ""
        if not before.endswith(f"/{ARTIFACTS}") or _same_place(before, artifacts):
            return
        tables = {row[0] for row in database.execute("select name from sqlite_master where type = 'table'")}
        for table, column in PLACES:
            if table in tables:
                change = (
                    f"update {table} set {column} = ? || substr({column}, ?) where {column} = ? or substr({column}, 1, ?) = ?"
                )
                inside = f"{before}/"
                database.execute(change, (artifacts, len(before) + 1, before, len(inside), inside))


def _same_place(before: str, now: str) -> bool:
    """Returns whether two places, paths or URLs of files, have the same parent. Those of a server are left as they are."""
    places = [urlsplit(place) for place in (before, now)]
    if any(place.scheme not in ("", "file") for place in places):
        return True
    try:
        return os.path.samefile(*(os.path.dirname(unquote(place.path)) for place in places))
    except OSError:
        return False


def _make(path: str, artifacts: str) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    unfinished = path + ".unfinished"
    # Of a process that died half-way: no MLflow could go on with it.
    ours.delete(unfinished, UNFINISHED)
    # From the folder: the name alone means the same as a part of a URL.
    before = os.getcwd()
    os.chdir(os.path.dirname(path))
    try:
        SqlAlchemyStore(f"sqlite:///{os.path.basename(unfinished)}", artifacts).engine.dispose()
    finally:
        os.chdir(before)
    os.replace(unfinished, path)


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Waits for, and holds, a lock that the kernel gives back if this process dies."""
    with durable.appending(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
