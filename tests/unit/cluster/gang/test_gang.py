"""The gang of very many hosts, counted in calls to Ray; and what it makes of answers. Ray is a stand-in here."""

import time
from collections import Counter

import ray

from cluster.gang import gang as gangs
from cluster.gang.gang import Gang
from cluster.gang.lease_keeper import LeaseKeeper
from cluster.gang.probes import PROBES_PER_S
from cluster.hosts.config import HostsConfig
from cluster.placement import bundles, placement_groups
from cluster.placement.bundles import Bundle

HOSTS = 512


class Group:
    def __init__(self, name, count):
        self.name, self.count = name, count
        self.id = self

    def hex(self):
        return self.name


class Agent:
    def __init__(self, cluster, name):
        self.cluster, self.name, self.fate = cluster, name, "lives"
        self.prepared = []

    def __getattr__(self, method):
        return Method(self, method)


class Method:
    def __init__(self, agent, name):
        self.agent, self.name = agent, name

    def remote(self, *arguments, driver_term):
        self.agent.cluster.counts[self.name] += 1
        return self.agent, self.name, self.agent.cluster.counts["calls"]


class Cluster:
    """Ray, as far as a gang asks it; and the maker of agents. Every group has its machines at once."""

    def __init__(self, config):
        self.config, self.run_name, self.driver_term, self.lease_s, self.cache_dir = config, "run", 0, 120.0, ""
        self.now_s, self.counts, self.groups, self.dead_nodes = 100.0, Counter(), {}, set()

    def create(self, place, number):
        self.counts["create"] += 1
        name = f"agent-{number}-{self.counts['create']}"
        agent = Agent(self, name)
        agent.node_id = self.node_ids(place.group).get(place.index)
        return name, agent

    def hire_steward(self):
        self.counts["hired"] += 1
        return "steward", Agent(self, "steward")

    def keep(self, agent):
        raise AssertionError("its thread is not started here")

    def wait(self, refs, num_returns, timeout):
        self.counts["wait"] += len(refs)
        return [ref for ref in refs if ref[0].fate != "frozen" and ref[0].node_id], []

    def get(self, ref):
        agent = ref[0]
        if agent.fate == "dies":
            raise ray.exceptions.ActorDiedError
        if agent.fate == "cut off":
            raise ray.exceptions.ActorUnavailableError("", None)
        return {"node_id": agent.node_id}

    def kill(self, agent):
        agent.fate = "dies"

    def nodes(self):
        self.counts["nodes"] += 1
        seen = {node for group in self.groups.values() for node in self._nodes_of(group)}
        return [{"NodeID": node, "Alive": node not in self.dead_nodes} for node in seen]

    def living(self):
        self.counts["living"] += 1
        return dict.fromkeys(self.groups)

    def node_ids(self, group):
        self.counts["node_ids"] += 1
        return dict(enumerate(self._nodes_of(group))) if group.name in self.groups else {}

    def _nodes_of(self, group):
        return [f"{group.name}/{index}" for index in range(group.count)]

    def placement_group(self, bundles, *, strategy, name, lifetime, bundle_label_selector):
        assert name not in self.groups, "its name is taken"
        self.groups[name] = Group(name, len(bundles))
        return self.groups[name]

    def remove(self, group):
        self.groups.pop(group.name, None)


def gang_of(monkeypatch, spares=0, **hosts):
    """A gang as `reserve` leaves it, all slots available, and its cluster."""
    config = HostsConfig(**hosts)
    cluster = Cluster(config)
    monkeypatch.setattr(time, "monotonic", lambda: cluster.now_s)
    for name in ("wait", "get", "kill", "nodes"):
        monkeypatch.setattr(ray, name, getattr(cluster, name))
    for name in ("living", "node_ids"):
        monkeypatch.setattr(placement_groups, name, getattr(cluster, name))
    monkeypatch.setattr(bundles, "placement_group", cluster.placement_group)
    monkeypatch.setattr(bundles, "remove_placement_group", cluster.remove)
    monkeypatch.setattr(gangs, "LeaseKeeper", lambda *about: LeaseKeeper(*about, start=False))
    gang = Gang(cluster)
    monkeypatch.setattr(placement_groups, "wait_ready", lambda *about: None)
    slots = [gang._add_slot(bundle) for bundle in gang._bundles.take_base(0.0, ())]
    for _ in range(spares):
        gang._add_slot(gang._bundles.ask_for_bundle(len(gang.slots), ()))
    assert len(gang.refresh()) == len(gang.slots)
    gang.set_members(slots)
    cluster.counts.clear()
    return gang, cluster


def let_pass(gang, cluster, seconds, **how):
    for _ in range(seconds):
        cluster.now_s += 1
        gang.refresh(**how)


def test_only_idle_hosts_are_asked_whether_they_are_there(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=HOSTS, spares=3)
    let_pass(gang, cluster, 20)
    assert cluster.counts["describe"] == 3 * 10
    assert cluster.counts["wait"] <= 3 * 20
    assert cluster.counts.keys() <= {"describe", "wait"}


def test_between_generations_nobody_else_asks_the_hosts(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=HOSTS)
    let_pass(gang, cluster, 20, members=True)
    assert HOSTS * 5 <= cluster.counts["describe"] <= 20 * PROBES_PER_S


def test_the_version_changes_with_the_record(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=4, spares=1)
    lost, spare = gang.slots[1], gang.slots[4]

    def replace_spare():
        spare.agent.fate = "dies"
        let_pass(gang, cluster, 3)

    changes = [
        lambda: gang.lose(lost, avoid_nodes=[lost.node_id]),
        lambda: gang.lose(lost, fill=False),
        gang.fill_unassigned,
        lambda: gang.set_members(gang.members[2:]),
        replace_spare,
    ]
    for change in changes:
        version, record = gang.version, gang.record()
        let_pass(gang, cluster, 20)
        assert (gang.version, gang.record()) == (version, record)
        change()
        assert gang.version != version
    assert gang.record() != record


def test_the_loss_of_many_hosts_looks_at_the_cluster_once(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=HOSTS)
    gang.lose(*gang.members[:64], avoid_nodes=["elsewhere"], fill=False)
    assert cluster.counts == {"nodes": 1, "living": 1, "node_ids": 1}
    cluster.counts.clear()
    gang.fill_unassigned()
    assert cluster.counts["create"] == 64


def test_groups_that_were_removed_are_asked_for_anew(monkeypatch):
    """Agents that hear from no driver leave, and take the groups along; the driver was only away."""
    gang, cluster = gang_of(monkeypatch, min=3, max=5, spares=2)
    left = gang.members[1]
    gang.lose(left, avoid_nodes=[left.node_id], fill=False)  # its bundle stays unassigned
    old, cluster.groups = cluster.groups, {}
    gang.lose(*gang.members)
    assert cluster.groups.keys() >= {"run-gang", left.bundle.group.name}
    assert cluster.counts["hired"] == 1  # what looked after the groups has gone with them
    assert all(cluster.groups.get(slot.bundle.group.name) is slot.bundle.group for slot in gang.members)
    assert all(bundle.group is cluster.groups["run-gang"] is not old["run-gang"] for bundle in gang._bundles.unassigned)
    assert len(gang.refresh()) == 5  # spares that nobody has lost yet seem to be there still
    for slot in gang.slots[3:]:
        slot.agent.fate = "dies"
    let_pass(gang, cluster, 5)
    assert len(gang.refresh()) == 5
    assert {group.hex() for group in gang._bundles.groups} == cluster.groups.keys()


def test_a_host_in_a_removed_group_takes_those_along_that_sat_with_it(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=3)
    cluster.groups = {}
    gang.lose(gang.members[0])
    assert [slot.lost for slot in gang.members] == [True] * 3
    assert gang.refresh() == gang.members


def test_an_agent_that_cannot_be_reached_just_now_is_not_dead(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=1, spares=1)
    spare = gang.slots[1]
    spare.agent.fate = "cut off"
    let_pass(gang, cluster, 5)
    assert not spare.available
    spare.agent.fate = "lives"
    let_pass(gang, cluster, 5)
    assert spare.available
    assert cluster.counts["create"] == 0


def test_an_answer_that_came_while_the_driver_slept_is_looked_at_before_silence_is(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=1, spares=2)
    gang.slots[1].agent.fate = "frozen"
    let_pass(gang, cluster, 3)
    cluster.now_s += 1000
    available = gang.refresh()
    assert gang.slots[1] not in available
    assert gang.slots[2] in available


def test_the_watchs_members_are_replaced_by_who_polls_them(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=2)
    first, agent = gang.members[0], gang.members[0].agent
    agent.fate = "dies"
    let_pass(gang, cluster, 10)
    assert first.agent is agent
    let_pass(gang, cluster, 10, members=True)
    assert first.agent is not agent
    assert first.available


def test_hosts_that_spread_part_when_they_come_to_one_machine(monkeypatch):
    gang, cluster = gang_of(monkeypatch, count=2, spread=True)
    shared = gang.members[0].node_id
    monkeypatch.setattr(
        cluster, "_nodes_of", lambda group: [shared if "slot" in group.name else f"{group.name}/{i}" for i in range(2)]
    )
    late = gang._add_slot(gang._bundles.ask_for_bundle(2, ()))
    gang.refresh()
    assert not late.available
    assert shared in late.avoid_nodes
    assert gang.members[0].available


def test_a_place_is_known_by_its_record():
    assert Bundle(Group("a", 1), 0, alone=True).record() == {"group": "a", "bundle": 0, "alone": True}
