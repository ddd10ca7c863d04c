"""Who could train, and who will: the two must agree, or a gang restarts for hosts that it does not take."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

from cluster.hosts.config import HostsConfig
from orchestrator.driver.membership import Membership, NoHosts
from orchestrator.policies.quarantine import Quarantine
from trainers.config.arguments import TrainingArguments


def membership(present, available, most=4, **hosts):
    slots = {number: SimpleNamespace(number=number, node_id=f"node-{number}", lost=False) for number in {*present, *available}}
    there = [slots[number] for number in available]
    gang = SimpleNamespace(
        members=[slots[number] for number in present],
        slots=list(slots.values()),
        refresh=lambda: list(there),
        lose=lambda *slots, avoid_nodes, fill: [there.remove(slot) for slot in slots],
        set_members=lambda members: setattr(gang, "members", members),
    )
    config = HostsConfig(**(hosts or {"min": 2, "max": most}), start_timeout_s=0.1)
    training = TrainingArguments(name="run", max_num_steps=1, global_batch_size=48)
    return Membership(SimpleNamespace(hosts=config, training=training), gang)


SLICES = {"kind": "tpu", "accelerator": "v4", "topology": "2x2x2", "min_slices": 1, "max_slices": 3, "spares": 1}
"""Of two hosts each."""


@pytest.mark.parametrize(
    ("present", "available", "lost", "avoid", "members"),
    [
        ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6, 7), (3,), (), (0, 1, 6, 7, 4, 5)),  # a spare slice, whole, in its ranks
        ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5), (3,), (), (0, 1, 4, 5)),
        ((0, 1, 2, 3), (0, 1, 2, 3, 5), (), (), (0, 1, 2, 3)),  # half a slice is none
        ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5), (), (2,), (0, 1, 4, 5)),  # who avoids one host of a slice avoids the slice
    ],
)
def test_tpu_hosts_come_and_go_by_slices(present, available, lost, avoid, members):
    made = membership(present, available, **SLICES)
    made.form([present.index(slot) for slot in lost], avoid=Quarantine(dict.fromkeys(avoid, "it has failed")))
    assert tuple(slot.number for slot in made.gang.members) == members


@pytest.mark.parametrize(
    ("present", "available", "leaving", "avoid", "count"),
    [
        ((0, 1, 2), (0, 1, 2), (), (), 3),
        ((0, 1, 2), (0, 1, 2, 3), (), (), 4),
        ((0, 1, 2), (0, 1, 2, 3, 4), (), (), 4),
        ((0, 2, 3), (0, 1, 2, 3), (), (1,), 3),  # one that was put out for its failures is there, and stays out
        ((0, 1, 2), (0, 1, 2), (2,), (), 2),
        ((0, 1), (0, 1), (), (0, 1), 2),  # without them there would be too few
    ],
)
def test_as_many_are_possible_as_would_be_taken(present, available, leaving, avoid, count):
    made, quarantine = membership(present, available), Quarantine(dict.fromkeys(avoid, "it has failed"))
    made.leaving = dict.fromkeys(leaving, "its node is drained")
    assert made.possible(quarantine) == count
    assert made.form(avoid=quarantine).after == len(made.gang.members) == count


def test_where_too_few_are_left_none_are_possible():
    assert membership((0, 1), (0,)).possible(Quarantine()) == 0


class StopAsked(Exception):
    pass


class Waiting:
    """A roster of two hosts that has one. Time passes while it waits: another comes at `comes_s`, after `lifted_s` too if that is
    when the machines to avoid were allowed."""

    def __init__(self, comes_s=math.inf, avoided=False, **hosts):
        self.now_s, self.comes_s, self.avoided, self.lifted_s, self.told = 0.0, comes_s, avoided, None, []
        made = membership((0, 1), (0,))
        config = SimpleNamespace(hosts=HostsConfig(count=2, **hosts), training=made.config.training)
        self.membership = Membership(config, made.gang, clock=lambda: self.now_s)
        made.gang.fill_unassigned, made.gang.missing = lambda: None, lambda: "1 host missing"
        made.gang.wait_available, made.gang.clear_avoided_nodes = self.wait_available, self.lift

    def wait_available(self, count, timeout_s, check_stop):
        assert self.now_s < 1e6, "it would wait for ever"
        end_s = self.now_s + timeout_s
        while self.now_s < end_s and not self.has_come():
            check_stop()
            self.now_s += 1
        return self.membership.gang.slots if self.has_come() else self.membership.gang.slots[:1]

    def has_come(self):
        return self.now_s >= self.comes_s and (not self.avoided or self.lifted_s is not None)

    def lift(self):
        self.lifted_s = self.now_s
        return True

    def form(self, **how):
        return self.membership.form(avoid=Quarantine(), waiting=lambda missing: self.told.append((self.now_s, missing)), **how)


def test_a_run_waits_for_machines_as_long_as_it_takes_and_says_what_is_missing():
    wait = Waiting(comes_s=100_000, start_timeout_s=120)
    assert wait.form().after == 2
    times = [at_s for at_s, _ in wait.told]
    assert max(after - before for before, after in itertools.pairwise(times)) <= 30
    assert {missing for _, missing in wait.told} == {"1 hosts are left; 1 host missing"}


def test_a_wait_for_machines_may_be_limited():
    wait = Waiting(start_timeout_s=120, replacement_timeout_s=1000)
    with pytest.raises(
        NoHosts, match=r"no other host came within 1000 s \(hosts.replacement_timeout_s\): 1 hosts are left; 1 host"
    ):
        wait.form()
    assert wait.now_s == 1000


@pytest.mark.parametrize(("limit_s", "lifted_s"), [(None, 90), (1000, 90), (60, 30)])
def test_a_machine_to_avoid_is_better_than_none(limit_s, lifted_s):
    """When no other has come in time."""
    wait = Waiting(comes_s=0, avoided=True, start_timeout_s=90, replacement_timeout_s=limit_s)
    assert wait.form().after == 2
    assert wait.lifted_s == lifted_s


def test_a_request_to_stop_ends_the_wait_for_machines():
    wait = Waiting()

    def check_stop():
        if wait.now_s >= 50:
            raise StopAsked

    with pytest.raises(StopAsked):
        wait.form(check_stop=check_stop)
    assert wait.now_s == 50
