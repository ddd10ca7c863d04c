"""Machines that are drained or lost, on a cluster of several: real Ray nodes that this machine stands in for."""

from __future__ import annotations

import time

import pytest
import ray
from ray.core.generated import autoscaler_pb2

from tests.ray.fake import FakeNode, cluster_of
from tests.ray.jobs import run_job, settings
from tests.strikes import Folder, Striking, checkpoint

WINGS = ("cluster/agent", "cluster/placement", "cluster/gang", "orchestrator/driver")

pytestmark = pytest.mark.slow("trains on several Ray nodes")

HOSTS = {"count": 2, "spread": True, "cpus_per_host": 1}


@pytest.fixture
def nodes():
    with cluster_of([FakeNode(), FakeNode(), FakeNode()], log_to_driver=False) as (cluster, handles):
        yield cluster, handles


def job(tmp_path, folder, **changes):
    return settings(tmp_path, max_num_steps=24, checkpoint={"save_steps": 4}, hosts={**HOSTS, "env": folder.env}, **changes)


def node_of(folder, host):
    """The id of the node that a host's agent is on; asked as the run's first driver asks."""
    agents = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "-host-" in actor["name"]]
    about = ray.get([ray.get_actor(name, namespace="gangway").describe.remote(driver_term=1) for name in agents])
    return next(each["node_id"] for each in about if each["pid"] == folder.agent(host).pid)


def test_a_drained_node_is_left_with_all_steps_saved(tmp_path, nodes):
    cluster, _ = nodes
    folder = Folder(tmp_path / "faults", step_s=0.2)
    drained = []

    def drain():
        drained.append(node_of(folder, 1))
        client = ray._raylet.GcsClient(address=cluster.address)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client.drain_node(drained[0], reason, "the spot market", (time.time_ns() // 1_000_000) + 60_000)

    board = Striking((checkpoint(4), drain))
    summary = run_job(job(tmp_path, folder), board)
    assert summary["status"] == "finished"
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["host"], incident["action"]) == ("preemption", 1, "replace")
    assert incident["resumed_step"] == incident["step"]
    assert "drained" in incident["evidence"]["summary"]
    assert summary["goodput"]["replay"] == 0.0


def test_a_node_that_dies_is_replaced_by_another(tmp_path, nodes):
    cluster, handles = nodes
    folder = Folder(tmp_path / "faults", step_s=0.2)

    def kill():
        lost = node_of(folder, 1)
        cluster.remove_node(next(handle for handle in handles if handle.node_id == lost), allow_graceful=False)

    summary = run_job(job(tmp_path, folder), Striking((checkpoint(4), kill)))
    assert summary["status"] == "finished"
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["host"], incident["action"]) == ("host_lost", 1, "replace")
    assert incident["resumed_step"] >= 4
