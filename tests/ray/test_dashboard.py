"""Grafana's dashboard on a real run: a Prometheus scrapes it by Ray's own list of nodes, and every query has an answer."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from types import SimpleNamespace

import pytest
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

from cluster.agent import machine
from tests import ROOT
from tests.programs.processes import PATIENCE_S

WINGS = ("orchestrator/driver", "orchestrator/reporting", "cluster/gang", "cluster/agent")

PROMETHEUS = ROOT / "build" / "prometheus" / "usr" / "bin" / "prometheus"
pytestmark = [
    pytest.mark.slow("trains while a Prometheus looks on"),
    pytest.mark.skipif(not PROMETHEUS.exists(), reason="there is no Prometheus here: `make build/prometheus` gets it from apt"),
]

BOARD = json.loads((ROOT / "docs" / "grafana" / "gangway.json").read_text())
QUERIES = [query["expr"] for panel in BOARD["panels"] for query in panel.get("targets", ())]
NOT_OF_PROCESSORS = "device_memory"
"""Processors do not count the memory of a device."""
COMMAND = (sys.executable, "-m", "orchestrator.run", "configs/tiny.yaml", "tracking.mlflow=false", "max_num_steps=100000")
SETTINGS = ("metrics.peak_flops_per_s=1e12", "evaluation.every_steps=50", "publish_every_steps=10")


@pytest.fixture(scope="module")
def nodes():
    """A Ray with its dashboard, and the file in which it lists what to scrape."""
    ports = {name: machine.free_port() for name in ("dashboard_port", "dashboard_agent_listen_port", "metrics_export_port")}
    often = {"metrics_report_interval_ms": 1000}
    arguments = {"num_cpus": 4, "include_dashboard": True, "_system_config": often, **ports}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        yield SimpleNamespace(address=cluster.address, listed=f"{get_default_ray_temp_dir()}/prom_metrics_service_discovery.json")
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def prometheus(nodes, tmp_path_factory):
    """Answers queries about the run."""
    folder, port = tmp_path_factory.mktemp("prometheus"), machine.free_port()
    scraped = {"job_name": "ray", "file_sd_configs": [{"files": [nodes.listed], "refresh_interval": "1s"}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}
    (folder / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
    arguments = (f"--config.file={folder / 'prometheus.json'}", f"--storage.tsdb.path={folder / 'data'}")
    process = subprocess.Popen(
        (PROMETHEUS, *arguments, f"--web.listen-address=127.0.0.1:{port}"),
        stderr=(folder / "log").open("w"),
        env={"GOMAXPROCS": "1"},
    )

    def ask(path, **parameters):
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        return json.load(urllib.request.urlopen(url))["data"]

    try:
        until(lambda: ask("status/buildinfo"), OSError)
        yield ask
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def run(nodes, prometheus, tmp_path_factory):
    """A run of which one process was killed, and which trains again. Gives when it began."""
    began_s, log = time.time(), tmp_path_factory.mktemp("log") / "console"
    command = (*COMMAND, *SETTINGS, f"storage={tmp_path_factory.mktemp('runs')}", f"driver.address={nodes.address}")
    with log.open("w") as console:
        process = subprocess.Popen(command, cwd=ROOT, stdout=console, stderr=subprocess.STDOUT)

    def shown(expression):
        until(lambda: prometheus("query", query=expression)["result"], OSError)

    try:
        shown("ray_gangway_checkpoint_step > 0")
        os.kill(int(re.search(r"training processes .*?(\d+) \(host 1\)", log.read_text()).group(1)), signal.SIGKILL)
        shown("ray_workload_disruptions > 0 and on () ray_gangway_state{state='training'} == 1")
        shown("ray_gangway_eval_loss")
        yield began_s
    finally:
        process.terminate()  # it saves, and stops
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        process.kill()


def until(work, *errors):
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(*errors):
            if (answer := work()) not in ([], None):
                return answer
        time.sleep(0.5)
    raise AssertionError(f"nothing within {PATIENCE_S} s")


@pytest.fixture
def lines(run, prometheus):
    """Returns the lines that a query draws: the numbers of each, by its labels."""

    def lines(expression):
        for name, chosen in (("$run", "tiny"), ("$session", ".*"), ("$window", "1m")):
            expression = expression.replace(name, chosen)
        drawn = prometheus("query_range", query=expression, start=run, end=time.time(), step=1)["result"]
        numbers = {tuple(sorted(line["metric"].items())): [float(value) for _, value in line["values"]] for line in drawn}
        return {labels: values for labels, values in numbers.items() if any(map(math.isfinite, values))}

    return lines


def test_the_dashboard_finds_its_run(run, prometheus):
    for name, label in (("session", "SessionName"), ("run", "run")):
        (query,) = (variable["query"] for variable in BOARD["templating"]["list"] if variable["name"] == name)
        metric, asked = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()
        found = prometheus(f"label/{asked}/values", **{"match[]": metric.replace("$session", ".*")})
        assert asked == label
        assert len(found) == 1


@pytest.mark.parametrize("expression", QUERIES)
def test_a_query_has_data(lines, expression):
    if NOT_OF_PROCESSORS in expression:
        pytest.skip("processors do not count the memory of a device")
    assert until(lambda: lines(expression) or None)


def test_the_numbers_are_those_of_the_run(lines):
    def newest(expression):
        (values,) = lines(expression).values()
        return values[-1]

    assert newest('max(ray_gangway_incidents_total{kind="process_crash"})') == 1
    assert newest("max(ray_workload_disruptions)") == 1
    assert newest("max(ray_gangway_hosts)") == 2
    assert 0 < newest("max(ray_gangway_goodput_ratio)") < 1
    assert 0 < newest("max(ray_gangway_step)") < newest("max(ray_gangway_max_steps)") == 100000
    states = {dict(labels)["state"] for labels in lines("max by (state) (ray_gangway_state) == 1")}
    assert {"training", "recovering"} <= states
    elapsed, parts = newest("max(ray_workload_total_elapsed_time)"), newest("sum(max by (category) (ray_gangway_time_seconds))")
    assert parts == pytest.approx(elapsed)
