"""Machines that come, go, and are to be left: on a local Ray cluster of several nodes."""

import time

import pytest
import ray
from ray.core.generated import autoscaler_pb2

from cluster.agent.preemption import draining_nodes
from cluster.gang.acquire import reserve
from cluster.hosts.config import HostsConfig
from cluster.placement import placement_groups
from cluster.placement.bundles import living_nodes
from tests.programs.processes import PATIENCE_S, wait_until
from tests.ray import fake

WINGS = ("cluster/gang", "cluster/placement")

pytestmark = pytest.mark.slow("starts Ray nodes")

MODULE = "tests.programs.echo_worker"


@pytest.fixture(scope="module")
def cluster():
    """Two machines with room for one host each."""
    with fake.cluster_of([fake.FakeNode(), fake.FakeNode()], log_to_driver=False) as (cluster, _):
        yield cluster


@pytest.fixture
def take(cluster, tmp_path, taken):
    def take(**hosts):
        taken.append(reserve(HostsConfig(**hosts), "run", log_dir=str(tmp_path), module=MODULE, timeout_s=PATIENCE_S))
        return taken[-1]

    return take


def add_node(cluster, num_cpus=1):
    before = len(living_nodes())
    node = cluster.add_node(num_cpus=num_cpus)
    assert wait_until(lambda: len(living_nodes()) == before + 1)
    return node


def remove_node(cluster, node):
    before = len(living_nodes())
    cluster.remove_node(node)
    assert wait_until(lambda: len(living_nodes()) == before - 1)


def joined(gang, host):
    return wait_until(lambda: any(e["ev"] == "joined" for e in ray.get(gang.call(host, "poll", 0, 1.0))["events"]))


def test_a_slot_becomes_available_when_a_machine_is_added(cluster, take):
    gang = take(min=1, max=3, wait_for_max_s=10)
    assert len(gang.members) == 2
    pending = gang.slots[2]
    gang.prepare({"tag": "as the others"})
    record = gang.record()
    assert [slot["number"] for slot in record["slots"]] == [0, 1, 2]
    node = add_node(cluster)
    try:
        assert gang.wait_available(3, 60) == gang.slots
        assert pending.node_id == node.node_id
        gang.set_members(gang.slots)
        ray.get([gang.call(host, "start", {"generation": 0}) for host in range(3)])
        assert joined(gang, 2)
        remove_node(cluster, node)
        assert wait_until(lambda: pending not in gang.refresh(members=True))
        gang.lose(pending)
        gang.set_members(gang.slots[:2])
        assert gang.wait_available(3, 0.5) == gang.slots[:2]  # no machine yet, and nothing waits for it
    finally:
        gang.release()


def test_a_lost_machine_is_made_up_for_by_one_that_comes_later(cluster, take):
    """Its bundle belongs to the group that all hosts share: Ray moves it."""
    extra = add_node(cluster)
    gang = take(count=3, spread=True)
    lost = next(slot for slot in gang.members if slot.node_id == extra.node_id)
    remove_node(cluster, extra)
    gang.lose(lost)
    assert len(gang.wait_available(3, 0.5)) == 2
    another = add_node(cluster)
    try:
        assert len(gang.wait_available(3, 60)) == 3
        assert lost.node_id == another.node_id
        gang.release()
    finally:
        remove_node(cluster, another)


def test_a_slot_goes_where_a_place_that_was_left_has_found_a_machine(cluster, take):
    """The groups of a run compete for a machine that comes; whichever has it, the host without one goes there."""
    first = add_node(cluster)
    gang = take(count=3)
    slot = next(slot for slot in gang.members if slot.node_id == first.node_id)
    second = add_node(cluster)
    gang.lose(slot, avoid_nodes=[first.node_id])
    assert gang.wait_available(3, 60) == gang.slots
    assert slot.node_id == second.node_id
    remove_node(cluster, first)
    remove_node(cluster, second)
    assert wait_until(lambda: slot not in gang.refresh(members=True))
    gang.lose(slot)
    third = add_node(cluster)
    try:
        assert gang.wait_available(3, 30) == gang.slots
        assert slot.node_id == third.node_id
        gang.release()
    finally:
        remove_node(cluster, third)


def test_a_host_leaves_a_machine_that_is_to_be_avoided_and_may_come_back(cluster, take):
    gang = take(count=1)
    slot = gang.members[0]
    first, number = slot.node_id, slot.number
    gang.lose(slot, avoid_nodes=[first])
    assert gang.wait_available(1, 60) == [slot]
    assert slot.node_id not in (first, None)
    second = slot.node_id
    gang.lose(slot, avoid_nodes=[first, second])  # there is no other
    assert gang.wait_available(1, 0.5) == []
    assert gang.clear_avoided_nodes()
    assert not gang.clear_avoided_nodes()
    assert gang.wait_available(1, 60) == [slot]
    third = slot.node_id
    assert third in (first, second)
    assert slot.number == number
    assert len(placement_groups.living()) == 1  # of a place that was left nothing is kept
    gang.lose(slot, avoid_nodes=[{first, second}.difference({third}).pop()])  # it is elsewhere already
    assert gang.wait_available(1, 60) == [slot]
    assert slot.node_id == third


def test_hosts_that_spread_do_not_share_a_machine_with_one_that_comes_later(cluster, take):
    big = add_node(cluster, num_cpus=3)
    try:
        gang = take(min=1, max=4, spread=True, wait_for_max_s=0)
        assert wait_until(lambda: len(gang.refresh()) == 3)
        assert len({slot.node_id for slot in gang.refresh()}) == 3
        assert wait_until(lambda: not gang.slots[3].available or len(gang.refresh()) == 3)
        gang.release()
    finally:
        remove_node(cluster, big)


def test_a_machine_that_ray_is_to_empty_is_known(cluster, take):
    """Last: the machine goes when the gang has left it."""
    gang = take(count=2)
    assert draining_nodes() == {}
    node = gang.members[1].node_id
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    gcs = ray._raylet.GcsClient(address=cluster.address)
    accepted, why = gcs.drain_node(node, reason, "spot", int((time.time() + 1000) * 1000))
    assert accepted, why
    assert wait_until(draining_nodes)
    assert draining_nodes().keys() == {node}
    assert 0 < draining_nodes()[node] <= 1000
    assert gang.refresh() == gang.members  # until then its agent goes on
