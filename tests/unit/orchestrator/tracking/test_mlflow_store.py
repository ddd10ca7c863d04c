"""The store of MLflow in the storage of a run: where its artifacts are when the storage was moved. Without MLflow."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from orchestrator.tracking import mlflow_store

TABLES = (
    "create table experiments (experiment_id int, artifact_location text)",
    "create table runs (run_uuid text, artifact_uri text)",
)


@pytest.fixture
def store(tmp_path):
    def made(location, *runs):
        with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
            for table in TABLES:
                database.execute(table)
            database.executemany(
                "insert into experiments values (?, ?)", [(0, f"{location}/0"), (1, location), (2, "s3://bucket/a")]
            )
            database.executemany("insert into runs values (?, ?)", [(run, run) for run in runs])
        return tmp_path / "mlflow.db"

    return made


def places(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        locations = [row[0] for row in database.execute("select artifact_location from experiments order by experiment_id")]
        return locations, sorted(row[0] for row in database.execute("select artifact_uri from runs"))


@pytest.mark.parametrize("before", ["/old storage/mlartifacts", "file:///old%20storage/mlartifacts"])
def test_what_was_beside_the_database_is_beside_it_again(store, tmp_path, before):
    path = store(before, f"{before}/a/artifacts", "/old storage/mlartifacts-2/b", "/elsewhere/mlartifacts/c", "s3://bucket/d")
    artifacts = mlflow_store.prepare(f"sqlite:///{path}", is_own=True)
    assert artifacts == (tmp_path / "mlartifacts").as_uri()
    locations, runs = places(path)
    assert locations == [f"{artifacts}/0", artifacts, "s3://bucket/a"]
    assert runs == sorted(
        [f"{artifacts}/a/artifacts", "/old storage/mlartifacts-2/b", "/elsewhere/mlartifacts/c", "s3://bucket/d"]
    )


@pytest.mark.parametrize("location", ["s3://bucket/mlartifacts", "/data/mine"])
def test_a_store_that_was_made_otherwise_is_left_as_it_is(store, location):
    path = store(location, f"{location}/a")
    before = places(path)
    mlflow_store.prepare(f"sqlite:///{path}", is_own=True)
    assert places(path) == before


def test_a_store_that_the_user_names_or_reaches_through_a_link_is_left_as_it_is(store, tmp_path):
    path = store("/old/mlartifacts", "/old/mlartifacts/a")
    before = places(path)
    mlflow_store.prepare(f"sqlite:///{path}", is_own=False)
    assert places(path) == before
    (tmp_path / "link").symlink_to(tmp_path)
    mlflow_store.relocate(str(path), f"file://{tmp_path}/mlartifacts")
    now = places(path)
    assert now != before
    mlflow_store.prepare(f"sqlite:///{tmp_path}/link/mlflow.db", is_own=True)
    assert places(path) == now
