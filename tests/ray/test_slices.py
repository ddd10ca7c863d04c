"""TPU slices that are Ray nodes with the labels and resources of TPU hosts."""

import time
from contextlib import contextmanager

import pytest
import ray
from ray._private.accelerators import tpu as ray_tpu

from cluster.gang.acquire import GangTimeout, adopt, clear, reserve
from cluster.hosts.config import HostsConfig, chips_per_host, num_hosts, pod_type
from cluster.placement import placement_groups
from cluster.placement.bundles import living_nodes
from tests.programs.processes import wait_until
from tests.ray import fake
from tests.ray.machines import everything_is_free

WINGS = ("cluster/placement", "cluster/hosts", "cluster/gang")

MODULE = "tests.programs.echo_worker"
LABELS = ("ray.io/tpu-slice-name", "ray.io/tpu-worker-id")


def tpu(slices=1, **more):
    shape = {"accelerator": "v4", "topology": "2x2x2", "slices": slices}
    return HostsConfig(kind="tpu", **shape, env={"JAX_PLATFORMS": "cpu"}, wait_for_max_s=30.0, **more)


@pytest.fixture(scope="module")
def cluster():
    """Two slices of two hosts; the order of Ray's nodes is not that of the workers."""
    slice_a, slice_b = (fake.slice_nodes(tpu(), name) for name in ("slice-a", "slice-b"))
    with fake.cluster_of([slice_b[1], slice_a[1], slice_a[0], slice_b[0]], log_to_driver=False) as (cluster, nodes):
        yield cluster, nodes


@pytest.fixture
def take(cluster, tmp_path, taken):
    def take(config, name="run", timeout_s=60, **options):
        taken.append(reserve(config, name, log_dir=str(tmp_path), module=MODULE, timeout_s=timeout_s, **options))
        return taken[-1]

    return take


def workers(gang):
    return [tuple(each["labels"][label] for label in LABELS) for each in gang.descriptions]


def environments(gang):
    """What the training processes see, in host order."""
    gang.prepare({})
    count = len(gang.members)
    common = {"generation": 0, "num_hosts": count}
    ray.get([gang.call(host, "start", {**common, "host": host, **gang.orders(host)}) for host in range(count)])
    return [joined(gang, host) for host in range(len(gang.members))]


def joined(gang, host):
    def events():
        return [event["env"] for event in ray.get(gang.call(host, "poll", 0, 1.0))["events"] if event["ev"] == "joined"]

    assert wait_until(events)
    return events()[0]


@pytest.mark.slow("waits for slices of Ray nodes")
def test_the_arithmetic_of_slices_is_rays():
    for accelerator, topologies in ray_tpu.VALID_TPU_TOPOLOGY.items():
        for topology in topologies:
            config = HostsConfig(kind="tpu", accelerator=accelerator, topology=topology)
            assert chips_per_host(config) == ray_tpu.get_chips_per_host(topology, accelerator), (accelerator, topology)
            assert pod_type(config) == ray_tpu.infer_tpu_pod_type_from_topology(topology, f"TPU-{accelerator.upper()}")


@pytest.mark.slow("starts Ray nodes")
def test_process_ids_follow_worker_ids_in_one_slice(take):
    gang = take(tpu())
    names = {name for name, _ in workers(gang)}
    assert [worker for _, worker in workers(gang)] == ["0", "1"]
    assert len(names) == 1
    for env, (name, worker) in zip(environments(gang), workers(gang), strict=True):
        assert (env["TPU_NAME"], env["TPU_WORKER_ID"]) == (name, worker)
        assert not [variable for variable in env if variable.startswith("MEGASCALE_")]
        assert env["JAX_PLATFORMS"] == "cpu"


@pytest.mark.slow("waits for slices of Ray nodes")
def test_two_slices_are_counted_slice_by_slice_and_find_each_other(take):
    gang = take(tpu(slices=2))
    assert num_hosts(gang.config) == 4
    assert workers(gang) == [("slice-a", "0"), ("slice-a", "1"), ("slice-b", "0"), ("slice-b", "1")]
    envs = environments(gang)
    assert [env["MEGASCALE_SLICE_ID"] for env in envs] == ["0", "0", "1", "1"]
    assert {env["MEGASCALE_NUM_SLICES"] for env in envs} == {"2"}
    assert {env["MEGASCALE_COORDINATOR_ADDRESS"] for env in envs} == {gang.descriptions[0]["host_ip"]}
    assert {env["MEGASCALE_PORT"] for env in envs} == {"8081"}
    assert [gang.orders(host)["slice"] for host in range(4)] == [0, 0, 1, 1]
    assert gang.orders(3)["slice"] == 1


@pytest.mark.slow("waits for slices of Ray nodes")
def test_two_runs_get_a_slice_each(take):
    first, second = take(tpu(), "first"), take(tpu(), "second")
    assert {name for gang in (first, second) for name, _ in workers(gang)} == {"slice-a", "slice-b"}
    with pytest.raises(GangTimeout, match=r"slice-a: in use, slice-b: in use\); 1 slice\(s\) missing"):
        take(tpu(), "third", timeout_s=1)


@pytest.mark.slow("waits for slices of Ray nodes")
def test_more_slices_than_there_are(take):
    with pytest.raises(GangTimeout, match=r"asked for 3 slice\(s\) 2x2x2 of v4 .*has 2 \(.*\); 1 slice\(s\) missing"):
        take(tpu(slices=3), timeout_s=1)
    assert wait_until(everything_is_free)


@pytest.mark.slow("waits for slices of Ray nodes")
def test_a_request_to_stop_ends_the_wait_for_slices(take):
    class StopAsked(Exception):
        pass

    began_s = time.monotonic()

    def stop():
        assert not placement_groups.living()  # who has not enough holds nothing
        if time.monotonic() - began_s > 3:
            raise StopAsked

    with pytest.raises(StopAsked):
        take(tpu(slices=3), timeout_s=600, check_stop=stop)
    assert wait_until(everything_is_free)


@pytest.mark.slow("waits for slices of Ray nodes")
def test_slices_of_another_shape(take):
    with pytest.raises(GangTimeout, match=r"the cluster has none; TPU types it has: v4-16"):
        take(HostsConfig(kind="tpu", accelerator="v4", topology="2x2x4"), timeout_s=1)


@pytest.mark.slow("waits for slices of Ray nodes")
def test_a_slice_with_a_host_to_avoid_is_not_used(take):
    first = take(tpu())
    name = workers(first)[0][0]
    avoid = first.descriptions[1]["node_id"]
    first.release()
    assert wait_until(everything_is_free)
    second = take(tpu(), avoid_nodes=[avoid])
    assert workers(second)[0][0] != name


@pytest.mark.slow("waits for slices of Ray nodes")
def test_a_lost_agent_is_replaced_on_its_own_worker(take):
    gang = take(tpu(slices=2))
    gang.prepare({})
    slot, old = gang.members[2], gang.members[2].agent
    gang.lose(slot, avoid_nodes=[slot.node_id])  # there is no other slice for it
    assert len(gang.wait_available(4, 60)) == 4
    assert gang.members[2].agent != old
    assert workers(gang)[2] == ("slice-b", "0")
    ray.get(gang.call(2, "start", {"generation": 0, **gang.orders(2)}))
    assert joined(gang, 2)["MEGASCALE_SLICE_ID"] == "1"
    assert gang.orders(2)["cache_dir"] is None


@pytest.mark.slow("waits for slices of Ray nodes")
def test_slices_are_adopted_by_the_next_driver_and_cleared_away(take, tmp_path):
    first = take(tpu(slices=2))
    environments(first)
    assert names_of_groups() == {"run-slot-0-0-0", "run-slot-2-0-1"}
    second = adopt(first.config, "run", first.record(), log_dir=str(tmp_path), driver_term=1, module=MODULE)
    assert [lead["generation"] for lead in second.leads] == [0, 0, 0, 0]
    assert workers(second) == [("slice-a", "0"), ("slice-a", "1"), ("slice-b", "0"), ("slice-b", "1")]
    assert names_of_groups() <= set(clear("run"))
    assert wait_until(everything_is_free)


@pytest.mark.slow("waits for slices of Ray nodes")
def test_slices_of_one_host(cluster, take):
    shape = HostsConfig(kind="tpu", accelerator="v6e", topology="2x4", slices=1)
    node = cluster[0].add_node(
        num_cpus=1, resources={"TPU": 8}, labels=dict(fake.slice_nodes(shape, "small")[0].labels), env_vars={"TPU_NAME": "small"}
    )
    try:
        gang = take(shape)
        assert workers(gang) == [("small", "0")]
        gang.release()
    finally:
        cluster[0].remove_node(node)


@pytest.mark.slow("starts Ray nodes")
def test_a_slice_that_has_lost_a_host_is_left_for_another(cluster, take):
    gang = take(tpu())
    (name, _), pids = workers(gang)[1], [about["pid"] for about in gang.descriptions]
    lost = gang.members[1]
    with without(cluster, lost.node_id, name):
        gang.lose(lost, fill=False)
        assert gang.refresh() == []  # half a slice is none
        gang.fill_unassigned()
        assert len(gang.wait_available(2, 60)) == 2
        assert {slice_name for slice_name, _ in workers(gang)} == OTHER[name]
        assert [worker for _, worker in workers(gang)] == ["0", "1"]
        assert not {about["pid"] for about in gang.descriptions} & set(pids)
        assert wait_until(lambda: len(placement_groups.living()) == 1)
        assert set(gang.record()["groups"]) == set(placement_groups.living())
        gang.release()


@pytest.mark.slow("waits for slices of Ray nodes")
def test_of_two_slices_the_whole_one_keeps_its_hosts(cluster, take):
    """A run of one slice or two, which has lost a machine."""
    gang = take(tpu(min_slices=1, max_slices=2))
    assert len(gang.members) == 4
    assert [gang.orders(host)["slice"] for host in range(4)] == [0, 0, 1, 1]
    (name, _), lost, kept = workers(gang)[3], gang.members[3], gang.members[:2]
    pids = [about["pid"] for about in gang.descriptions[:2]]
    with without(cluster, lost.node_id, name):
        gang.lose(lost)
        assert gang.wait_available(2, 60) == kept
        gang.set_members(kept)
        assert [about["pid"] for about in gang.descriptions] == pids
        assert gang.orders(1)["env"] == {}  # one slice has nobody to find
    assert wait_until(lambda: len(gang.refresh()) == 4)  # it is whole again
    assert [slot.number for slot in gang.refresh()] == [0, 1, 2, 3]


@pytest.mark.slow("waits for slices of Ray nodes")
def test_a_spare_slice_is_there_at_once(cluster, take):
    gang = take(tpu(spares=1))
    assert len(gang.members) == 2
    assert wait_until(lambda: len(gang.refresh()) == 4)
    spare = [slot for slot in gang.slots if slot not in gang.members]
    name, lost = workers(gang)[0][0], gang.members[0]
    with without(cluster, lost.node_id, name):
        gang.lose(lost, fill=False)
        assert gang.refresh() == spare
        gang.set_members(spare)
        assert {slice_name for slice_name, _ in workers(gang)} == OTHER[name]
        gang.fill_unassigned()
        assert gang.refresh() == spare
    assert wait_until(lambda: len(gang.refresh()) == 4)


@pytest.mark.slow("waits for slices of Ray nodes")
def test_a_gang_that_has_lost_a_host_waits_until_its_slice_is_whole_or_another_is(cluster, take):
    gang, other = take(tpu()), take(tpu(), "other")
    (name, _), lost = workers(gang)[1], gang.members[1]
    with without(cluster, lost.node_id, name):
        gang.lose(lost)
        assert gang.wait_available(2, 3) == []  # the other slice is in use, and what it has of its own is not given away
        assert gang.members[0].description["labels"][LABELS[0]] == name
        other.release()
        assert len(gang.wait_available(2, 60)) == 2
        assert {slice_name for slice_name, _ in workers(gang)} == OTHER[name]
        gang.release()


@pytest.mark.slow("waits for slices of Ray nodes")
def test_slots_without_a_slice_are_adopted_too(take, tmp_path):
    first = take(tpu(slices=2, spares=1))
    environments(first)
    second = adopt(first.config, "run", first.record(), log_dir=str(tmp_path), driver_term=1, module=MODULE)
    assert [slot.number for slot in second.refresh()] == [0, 1, 2, 3]
    assert len(second.slots) == 6
    second.release()


@pytest.mark.slow("starts Ray nodes")
def test_groups_that_were_removed_are_asked_for_anew(take):
    """Agents that hear from no driver leave, and take the groups along; the driver was only away."""
    gang = take(tpu())
    placement_groups.remove([gang.members[0].bundle.group])
    gang.lose(*gang.members)
    assert len(gang.wait_available(2, 60)) == 2
    assert set(gang.record()["groups"]) == set(placement_groups.living())


OTHER = {"slice-a": {"slice-b"}, "slice-b": {"slice-a"}}


def names_of_groups():
    return {info["name"] for info in placement_groups.living().values()}


@contextmanager
def without(cluster, node_id, name):
    """One machine of this slice is lost, and comes back."""
    (worker,) = [int(node.labels[LABELS[1]]) for node in living_nodes() if node.node_id == node_id]
    cluster[0].remove_node(next(node for node in ray_nodes(cluster) if node.node_id == node_id))
    assert wait_until(lambda: len(living_nodes()) == 4)
    try:
        yield
    finally:
        fake._add(cluster[0], fake.slice_nodes(tpu(), name)[worker])
        assert wait_until(lambda: len(living_nodes()) == 5)


def ray_nodes(cluster):
    return cluster[0].list_all_nodes()


@pytest.mark.slow("starts Ray nodes")
def test_a_slice_that_has_lost_a_host_is_left_alone(cluster, take):
    """Last: the host does not come back."""
    labels = {"ray.io/tpu-slice-name": "slice-b", "ray.io/tpu-worker-id": "1"}  # its head is still there
    gone = next(node.node_id for node in living_nodes() if labels.items() <= node.labels.items())
    cluster[0].remove_node(next(node for node in ray_nodes(cluster) if node.node_id == gone))
    assert wait_until(lambda: len(living_nodes()) == 4)
    gang = take(tpu())
    assert workers(gang) == [("slice-a", "0"), ("slice-a", "1")]
    with pytest.raises(GangTimeout, match=r"slice-a: in use, slice-b: worker 1 missing"):
        take(tpu(), "other", timeout_s=1)
