"""Settings of the driver and of its Ray: each reaches what it is for."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import ray

from orchestrator.config.job import ConfigError, build
from orchestrator.driver import ray_cluster
from orchestrator.driver.driver import Driver
from orchestrator.driver.precompile import Precompilations
from orchestrator.run_state.goodput import Goodput
from orchestrator.run_state.progress import Progress
from tests.unit.driving import STORAGE


def job(driver=None, **sections):
    sections = {
        "name": "a",
        "storage": str(STORAGE),
        "global_batch_size": 32,
        "max_num_steps": 1,
        "driver": driver or {},
        **sections,
    }
    return build(sections)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What Ray was started or joined with."""
    calls = []
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    monkeypatch.setattr(ray_cluster, "private_folder", lambda: str(tmp_path))
    monkeypatch.setattr(ray, "init", lambda *address, **about: calls.append((*address, about)))
    return calls


def test_the_address_of_a_running_cluster_is_joined_and_supervises_the_driver(started):
    assert ray_cluster.connect(job({"address": "10.0.0.7:6379"})) is True
    [(address, about)] = started
    assert address == "10.0.0.7:6379"
    assert "num_cpus" not in about


@pytest.mark.parametrize("supervise", [True, False])
def test_a_ray_of_the_runs_own_supervises_the_driver_on_request(started, supervise):
    assert ray_cluster.connect(job({"supervise": supervise})) is supervise


@pytest.mark.parametrize("dashboard", [True, False])
def test_a_ray_of_the_runs_own_has_a_dashboard_on_request(started, dashboard):
    ray_cluster.connect(job({"dashboard": dashboard}))
    [(address, about)] = started
    assert (address, about["include_dashboard"]) == ("local", dashboard)


def test_a_ray_of_the_runs_own_has_the_cpus_of_all_hosts_of_the_spares_and_of_the_driver(started):
    ray_cluster.connect(job(hosts={"count": 2, "spares": 3, "cpus_per_host": 2.0}))
    assert started[0][1]["num_cpus"] == 11


def driver_of(config):
    """Of the driver only what reads its configuration."""
    driver = object.__new__(Driver)
    driver.config = config
    progress = Progress(Goodput(0.0), checkpoint_step=25)
    driver.launch = SimpleNamespace(run_dir=str(STORAGE / "a"), lease=SimpleNamespace(driver_term=3), progress=progress)
    return driver


def test_agents_are_given_the_lease_of_the_settings():
    assert driver_of(job({"agent_lease_s": 33.0}))._agent_options()["lease_s"] == 33.0


@pytest.mark.parametrize(
    ("console_hosts", "shown"),
    [([], [0, 0, 0, 0]), ([1], [0, 100, 0, 0]), ([0, 3], [50, 0, 0, 50]), ("all", [25, 25, 25, 25])],
)
def test_the_hosts_whose_lines_the_console_shows(console_hosts, shown):
    driver = job({"console_hosts": console_hosts}, hosts={"count": 4}).driver
    assert [driver.shown_lines(host, 4) for host in range(4)] == shown


def test_a_host_that_is_not_there_cannot_be_shown():
    with pytest.raises(ConfigError, match=r"driver.console_hosts = \[0, 4\]: there is no host 4; expected 0 to 3, or all"):
        job({"console_hosts": [0, 4]}, hosts={"count": 4})


def test_a_replay_has_the_segments_of_its_file(tmp_path):
    path = tmp_path / "lineage.json"
    path.write_text(json.dumps({"lineage": [{"batch_index": 0, "num_hosts": 2}, {"batch_index": 20, "num_hosts": 4}]}))
    driver = driver_of(job({"replay": str(path)}))
    driver.replay_plan = driver._replay_plan()
    assert driver._segment().num_hosts == 4


@pytest.mark.parametrize(
    ("kind", "precompile", "expected"),
    [("cpu", None, True), ("cpu", False, False), ("gpu", None, False), ("gpu", True, True)],
)
def test_who_compiles_ahead(kind, precompile, expected):
    config = job({"precompile": precompile}, hosts={"kind": kind})
    asked = []
    made = Precompilations(config, None, None, None)
    made._begin = asked.append
    made._start_next = lambda: None
    made.poll(SimpleNamespace(training=True, number=1))
    assert bool(asked) is expected
