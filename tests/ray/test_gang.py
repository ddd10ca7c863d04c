"""Gangs of CPU hosts on a real local Ray, with a stand-in for the training process."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import ray

from cluster.gang.acquire import AdoptError, GangTimeout, StaleDriver, adopt, clear, reserve
from cluster.gang.slots import MAX_CONCURRENCY
from cluster.gang.steward import hire
from cluster.hosts.config import HostsConfig
from cluster.placement import placement_groups
from cluster.placement.cleanup import is_group_of, removal_order
from orchestrator.driver.membership import Membership
from orchestrator.policies.quarantine import Quarantine
from tests.programs.processes import PATIENCE_S, is_gone, wait_until
from tests.ray.machines import everything_is_free, own_ray
from trainers.config.arguments import TrainingArguments

WINGS = ("cluster",)

CPUS = 4
MODULE = "tests.programs.echo_worker"


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray(CPUS):
        yield


@pytest.fixture
def take(tmp_path, taken):
    def take(name="run", timeout_s=60, lease_s=120, **hosts):
        folders = {"log_dir": str(tmp_path / "logs"), "cache_dir": str(tmp_path / "cache")}
        taken.append(reserve(HostsConfig(**hosts), name, **folders, module=MODULE, lease_s=lease_s, timeout_s=timeout_s))
        return taken[-1]

    return take


def call(gang, method, *arguments):
    return ray.get([gang.call(host, method, *arguments) for host in range(len(gang.members))])


def event(gang, host, kind, cursor=0):
    while True:
        answer = ray.get(gang.call(host, "poll", cursor, 30.0), timeout=PATIENCE_S)
        for each in answer["events"]:
            if each["ev"] == kind:
                return each
        assert answer["events"], f"no {kind}; {answer['host_state']}"
        cursor = answer["cursor"]


def state(gang, slot):
    return ray.get(gang.ask(slot, "poll", 0, 0))["host_state"]


def start(gang, generation=0, **orders):
    """Prepares and starts all hosts; returns the process ids."""
    gang.prepare({"tag": generation})
    num_hosts = len(gang.members)
    common = {"generation": generation, "num_hosts": num_hosts, **orders}
    return [
        answer["pid"] for answer in ray.get([gang.call(host, "start", {**common, "host": host}) for host in range(num_hosts)])
    ]


def kill_agent(slot):
    os.kill(slot.description["pid"], signal.SIGKILL)


def test_all_hosts_run_with_their_own_environment(take, tmp_path):
    gang = take(count=2, devices_per_host=3)
    start(gang)
    envs = [event(gang, host, "joined")["env"] for host in (0, 1)]
    assert [env["JAX_COMPILATION_CACHE_DIR"] for env in envs] == [str(tmp_path / f"cache/host-000{host}") for host in (0, 1)]
    assert all(env["XLA_FLAGS"].endswith("--xla_force_host_platform_device_count=3") for env in envs)
    assert all(env["JAX_PLATFORMS"] == "cpu" for env in envs)
    assert gang.orders(1) == {"local_device_ids": None, "slice": 0, "cache_dir": str(tmp_path / "cache/host-0001")}
    about = gang.descriptions
    assert len({each["pid"] for each in about}) == 2
    assert {each["node_id"] for each in about} == {ray.get_runtime_context().get_node_id()}
    assert all(each["host_ip"] for each in about)


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_release_ends_processes_and_gives_the_machines_back(take):
    gang = take(count=2)
    pids = start(gang)
    gang.release()
    assert wait_until(lambda: all(map(is_gone, pids)))
    assert wait_until(everything_is_free)


def test_a_killed_process_is_seen_and_the_gang_goes_on(take):
    gang = take(count=2)
    pids = start(gang)
    cursor = event(gang, 1, "first_step") and ray.get(gang.call(1, "poll", 0, 0))["cursor"]
    waiting = gang.call(1, "poll", cursor, 60.0)
    os.kill(pids[1], signal.SIGKILL)
    seen = ray.get(waiting, timeout=PATIENCE_S)["events"]
    assert [(each["ev"], each["signal"], each["generation"]) for each in seen] == [("exit", signal.SIGKILL, 0)]
    after = call(gang, "halt")
    assert [each["exit"] and each["exit"]["signal"] for each in after] == [None, signal.SIGKILL]
    assert is_gone(pids[0])
    call(gang, "start", {"generation": 1})
    assert [event(gang, host, "joined")["generation"] for host in (0, 1)] == [1, 1]


def test_nothing_outlives_a_killed_agent(take):
    gang = take(count=2)
    pid = start(gang, workers=2)[1]
    slot = gang.members[1]
    workers = event(gang, 1, "joined")["workers"]
    assert wait_until(lambda: state(gang, slot)["standby"] == "warm")
    standby = state(gang, slot)["standby_pid"]
    waiting = gang.call(1, "poll", 1000, 60.0)
    kill_agent(slot)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting, timeout=PATIENCE_S)
    assert wait_until(lambda: all(map(is_gone, [pid, standby, *workers])))
    assert state(gang, gang.members[0])["alive"]


def test_a_frozen_process_ends_with_its_agent_too(take):
    gang = take(count=1)
    pid = start(gang)[0]
    os.kill(pid, signal.SIGSTOP)
    kill_agent(gang.members[0])
    assert wait_until(lambda: is_gone(pid))


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_lost_agent_is_replaced_on_its_own_place(take):
    gang = take(count=2)
    start(gang)
    slot, old = gang.members[1], gang.members[1].agent
    kill_agent(slot)
    former = slot.agent
    gang.refresh()
    assert slot.agent is former  # a member that died is the driver's to replace, who polls it
    gang.lose(slot)
    assert not slot.available
    with pytest.raises(ValueError, match="slot 1 of run 'run' is not available"):
        gang.set_members(gang.members)
    assert len(gang.wait_available(2, 60)) == 2
    assert slot.agent != old
    call_go = gang.call(1, "start", {"generation": 1})
    assert ray.get(call_go)["pid"]  # prepared as the others were
    assert event(gang, 1, "warm")["tag"] == 0


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_spare_takes_over_warm_with_the_caches_of_its_new_place(take, tmp_path):
    gang = take(count=2, spares=1)
    start(gang)
    spare = gang.wait_available(3, 60)[-1]
    assert spare not in gang.members
    assert wait_until(lambda: state(gang, spare)["standby"] == "warm")
    standby = state(gang, spare)["standby_pid"]
    lost = gang.members[0]
    kill_agent(lost)
    gang.set_members([spare, gang.members[1]])
    gang.lose(lost, fill=False)
    former = lost.agent
    assert gang.members[0].agent == spare.agent
    assert ray.get(gang.call(0, "start", {"generation": 1}))["pid"] == standby
    assert gang.orders(0)["cache_dir"] == str(tmp_path / "cache/host-0000")
    assert lost not in gang.refresh()
    assert lost.agent is former  # those who go on have the machine for themselves
    gang.fill_unassigned()
    assert lost in gang.wait_available(3, 60)  # the next spare
    with pytest.raises(ValueError, match=r"a slot comes twice among \[0, 0\]"):
        gang.set_members([lost, lost])


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_spare_that_dies_gets_a_new_agent_by_itself(take):
    gang = take(count=1, spares=1)
    spare = gang.wait_available(2, 60)[1]
    old = spare.description["pid"]
    kill_agent(spare)
    assert wait_until(lambda: spare in gang.refresh() and spare.description["pid"] != old)


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_an_agent_that_dies_before_it_has_answered_is_replaced(take):
    """As one does that was asked for on a machine of which Ray did not know yet that it is gone."""
    gang = take(count=1, spares=1)
    spare = gang.wait_available(2, 60)[1]
    gang.lose(spare)
    ray.kill(spare.agent)
    stillborn = spare.name
    for _ in range(100):  # as seldom as a driver does
        time.sleep(0.3)
        if spare in gang.refresh():
            break
    assert spare.available
    assert spare.name != stillborn


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_gang_begins_with_the_hosts_that_there_are(take):
    gang = take(min=2, max=CPUS + 2, wait_for_max_s=5)
    assert len(gang.members) == CPUS
    assert [slot.number for slot in gang.refresh()] == [0, 1, 2, 3]
    assert len(gang.slots) == CPUS + 2
    start(gang)
    assert [each["generation"] for each in (event(gang, host, "joined") for host in range(CPUS))] == [0] * CPUS


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_gang_waits_no_longer_than_it_must_for_hosts_it_can_do_without(take):
    take("other", count=CPUS - 1)
    gang = take(min=1, max=2, wait_for_max_s=0.2)
    assert len(gang.members) == 1
    assert gang.refresh() == gang.members


def test_a_gang_that_lacks_its_minimum_says_so(take):
    with pytest.raises(GangTimeout, match=r"asked for 6 hosts .* set hosts.min to at most 4"):
        take(min=CPUS + 2, max=CPUS + 4, timeout_s=0.5)


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_missing_spares_hold_nothing_up(take):
    gang = take(count=CPUS, spares=1)
    start(gang)
    assert len(gang.members) == CPUS
    lost = gang.members[2]
    kill_agent(lost)
    gang.lose(lost)
    assert len(gang.wait_available(CPUS, 60)) == CPUS
    assert ray.get(gang.call(2, "start", {"generation": 1}))["pid"]


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_gang_that_cannot_be_placed_says_what_is_missing_and_holds_nothing(take):
    with pytest.raises(GangTimeout) as error:
        take(count=CPUS + 3, timeout_s=0.5)
    assert str(error.value) == (
        "the hosts of run 'run' could not be had within 0.5 s: asked for 7 hosts with CPU 1 each; "
        "CPU: 7 needed, the cluster has 4, 4 free: 3 missing; 1 machine(s): room for 4 hosts when idle, for 4 hosts now; "
        "add machines to the cluster, or set hosts.count to at most 4, or hosts.cpus_per_host lower"
    )
    assert wait_until(everything_is_free)
    assert len(take(count=CPUS).members) == CPUS  # also: its name is free again


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_machines_in_use_are_reported_from_machines_that_are_missing(take):
    take("other", count=3)
    with pytest.raises(GangTimeout, match=r"CPU: 2 needed, the cluster has 4, 1 free: 1 missing.*in use, or ask for less"):
        take(count=2, timeout_s=0.5)


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_gang_waits_for_machines_in_use(take):
    threading.Timer(1.0, take("other", count=3).release).start()
    assert len(take(count=3).members) == 3


def test_hosts_on_machines_of_their_own(take):
    with pytest.raises(GangTimeout, match=r"on different machines.*room for 1 host when idle.*hosts.count to at most 1"):
        take(count=2, spread=True, timeout_s=0.5)


def test_a_machine_to_avoid_is_not_used(tmp_path):
    here = ray.get_runtime_context().get_node_id()
    with pytest.raises(GangTimeout, match=r"0 machine\(s\) \(1 more avoided\)"):
        reserve(HostsConfig(), "run", log_dir=str(tmp_path), avoid_nodes=[here], timeout_s=0.5)
    assert wait_until(everything_is_free)


class StopAsked(Exception):
    pass


def stop_after(count):
    """What a driver does in a wait whose user asks it to stop meanwhile."""
    calls = itertools.count(1)

    def check_stop():
        if next(calls) >= count:
            raise StopAsked

    return check_stop


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_request_to_stop_ends_every_wait_and_leaves_nothing_behind(take, tmp_path):
    def reserve_more(**hosts):
        folders = {"log_dir": str(tmp_path), "module": MODULE}
        return reserve(HostsConfig(**hosts), "stopped", **folders, timeout_s=600, check_stop=stop_after(3))

    gang = take(count=CPUS - 1)
    with pytest.raises(StopAsked):
        gang.wait_available(CPUS, 600, stop_after(3))
    with pytest.raises(StopAsked):  # its machines are not there
        reserve_more(count=2)
    with pytest.raises(StopAsked):  # nor those that it could do without
        reserve_more(min=1, max=2, wait_for_max_s=600)
    assert {info["name"] for info in placement_groups.living().values()} == {"run-gang"}
    gang.release()
    assert wait_until(everything_is_free)


def test_gpu_hosts_want_gpus(take):
    with pytest.raises(GangTimeout, match=r"GPU: 4 needed, the cluster has 0, 0 free: 4 missing"):
        take(kind="gpu", devices_per_host=4, timeout_s=0.5)


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_agents_that_do_not_start_leave_nothing_behind(tmp_path):
    with pytest.raises(GangTimeout, match="an agent of run 'run' did not start"):
        reserve(HostsConfig(count=2, env={"NAME": 1}), "run", log_dir=str(tmp_path), module=MODULE)  # no text: it raises
    assert wait_until(everything_is_free)


def hold(tmp_path, name, **settings):
    """A driver in a process and a Ray job of its own. Returns the process and what it printed."""
    text = json.dumps({"run_name": name, "log_dir": str(tmp_path), **settings})
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-m", "tests.programs.holder", text]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    return driver, json.loads(driver.stdout.readline())


def test_training_goes_on_without_its_driver_and_the_next_one_adopts_it(take, tmp_path):
    hosts = {"count": 2, "spares": 1}
    driver, about = hold(tmp_path, "doomed", hosts=hosts, driver_term=1)
    driver.kill()
    driver.wait()
    gang = adopt(HostsConfig(**hosts), "doomed", about["record"], log_dir=str(tmp_path), driver_term=2, module=MODULE)
    try:
        assert [lead["generation"] for lead in gang.leads] == [0, 0]
        assert all(lead["alive"] for lead in gang.leads)
        assert [state(gang, slot)["pid"] for slot in gang.members] == about["pids"]
        assert not any(map(is_gone, about["pids"]))
        seen = ray.get(gang.call(0, "poll", gang.leads[0]["first_event"], 0))["events"]
        assert [each["ev"] for each in seen][:2] == ["phase", "warm"]
        assert len(gang.wait_available(3, 60)) == 3
        lost = gang.members[1]  # it can go on as if it were the first driver
        gang.prepare({"tag": "prepared"})
        call(gang, "halt")
        gang.lose(lost)
        gang.set_members([gang.members[0], next(slot for slot in gang.refresh() if slot not in gang.members)])
        assert all(answer["pid"] for answer in call(gang, "start", {"generation": 1}))
        assert gang.record()["members"] == [0, 2]
    finally:
        gang.release()
    assert wait_until(lambda: all(map(is_gone, about["pids"])))
    assert wait_until(everything_is_free)


def test_a_second_driver_fences_out_the_first(take, tmp_path, caplog):
    first = take(count=2)
    pids = start(first)
    second = adopt(first.config, "run", first.record(), log_dir=str(tmp_path), driver_term=1, module=MODULE)
    for use in (lambda: call(first, "halt"), lambda: first.wait_available(3, 10)):
        with pytest.raises(StaleDriver, match="this driver's term is 0, and a driver with term 1 leads this agent"):
            use()
    first.tell(0, "take_stacks")  # as an order whose refusal the agents tell by an event
    first.release()  # leaves alone what is not its any more
    assert not any(map(is_gone, pids))
    assert [state(second, slot)["pid"] for slot in second.members] == pids
    with pytest.raises(StaleDriver):
        adopt(first.config, "run", second.record(), log_dir=str(tmp_path), driver_term=0, module=MODULE)
    second.release()
    time.sleep(1.0)  # Ray tells of it when it has deleted the answer
    assert not [line for line in caplog.text.splitlines() if "Unhandled error" in line and "take_stacks" in line]


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_only_a_whole_gang_is_adopted(take, tmp_path):
    gang = take(count=2)
    again = {"log_dir": str(tmp_path), "driver_term": 1, "module": MODULE}
    with pytest.raises(AdoptError, match="no agent has orders"):
        adopt(gang.config, "run", gang.record(), **again)
    with pytest.raises(AdoptError, match="it is the gang of run, of which this run is a copy, or was moved"):
        adopt(gang.config, "copy", gang.record(), **again)
    with pytest.raises(AdoptError, match="it is the gang of an older version of gangway"):
        adopt(gang.config, "run", {key: value for key, value in gang.record().items() if key != "run_name"}, **again)
    with pytest.raises(AdoptError, match="the configuration of the hosts is another one now"):
        adopt(HostsConfig(count=3), "run", gang.record(), **again)
    gang.driver_term = 1
    gang.prepare({})
    ray.get(gang.call(0, "start", {"generation": 3, "host": 0, "num_hosts": 2}))
    with pytest.raises(AdoptError, match="of generation 3, the agents of hosts 1 are gone, do not answer, or had no orders"):
        adopt(gang.config, "run", gang.record(), **again)
    kill_agent(gang.members[1])
    with pytest.raises(AdoptError, match="the agents of hosts 1 are gone"):
        adopt(gang.config, "run", gang.record(), **again)


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_what_a_record_does_not_name_is_removed_by_adopting(take, tmp_path):
    gang = take(count=1, spares=1)
    start(gang)
    record = gang.record()
    spare = gang.wait_available(2, 60)[1]
    gang.lose(spare, avoid_nodes=["nowhere"])  # on this machine still: its agent alone is another one
    gang.lose(spare, avoid_nodes=[ray.get_runtime_context().get_node_id()])  # in another group, which must wait for ever
    second = adopt(gang.config, "run", record, log_dir=str(tmp_path), driver_term=1, module=MODULE)
    assert {info["name"] for info in placement_groups.living().values()} == {"run-gang", "run-slot-1-1-0"}
    assert len(second.wait_available(2, 60)) == 2
    second.release()


@pytest.mark.slow("waits for the lease of a driver")
def test_agents_without_a_driver_leave_and_give_everything_back(tmp_path):
    hosts = {"min": 2, "max": CPUS + 1, "wait_for_max_s": 0}  # one slot waits for a machine
    driver, about = hold(tmp_path, "doomed", hosts=hosts, lease_s=8)
    driver.kill()
    driver.wait()
    assert not any(map(is_gone, about["pids"]))
    assert wait_until(lambda: all(map(is_gone, about["pids"])))
    assert wait_until(everything_is_free)
    assert wait_until(lambda: ray.util.list_named_actors(all_namespaces=True) == [])


@pytest.mark.slow("waits for the lease of a driver")
def test_a_driver_that_hangs_longer_than_the_lease_keeps_its_gang(take):
    """In its storage, say: its thread does nothing, and all calls that an agent answers at a time but one wait."""
    lease_s = 6
    gang = take(count=2, spares=1, lease_s=lease_s)
    pids = start(gang)
    assert len(gang.wait_available(3, 60)) == 3
    polls = [gang.ask(slot, "poll", 10**6, 3 * lease_s) for slot in gang.slots for _ in range(MAX_CONCURRENCY)]
    time.sleep(2 * lease_s)
    assert not any(map(is_gone, pids))
    ray.get(polls, timeout=PATIENCE_S)
    assert gang.refresh() == gang.slots
    assert [state(gang, slot)["pid"] for slot in gang.members] == pids


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_gang_whose_groups_were_removed_is_put_together_again(take):
    """As agents do that leave when their leases have ended: the driver was stopped longer than that."""
    gang = take(count=2, spares=1)
    start(gang)
    assert len(gang.wait_available(3, 60)) == 3
    assert clear("run")
    assert not placement_groups.living()
    gang.slots[2].next_probe_s = math.inf  # a spare that was not asked since is dead all the same
    # Ray ends the agents in the removed groups a little later; a driver that was stopped for so long finds them dead.
    assert wait_until(lambda: not any("-host-" in actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)))
    config = SimpleNamespace(hosts=gang.config, training=TrainingArguments(name="run", max_num_steps=1))
    told = []
    change = Membership(config, gang).form((0, 1), avoid=Quarantine(), waiting=told.append)
    assert (change.before, change.after) == (2, 2)
    assert told
    assert all(answer["pid"] for answer in call(gang, "start", {"generation": 1}))
    assert len(gang.wait_available(3, 60)) == 3
    assert {info["name"] for info in placement_groups.living().values()} == {"run-gang", "run-slot-2-0-1"}
    assert set(gang.record()["groups"]) == set(placement_groups.living())


@pytest.mark.slow("waits for the lease of a driver")
@pytest.mark.parametrize("hosts", [{"count": CPUS + 2}, {"min": 1, "max": CPUS + 2, "wait_for_max_s": 600}], ids=["none", "some"])
def test_a_driver_that_is_killed_while_it_waits_for_machines_leaves_nothing(tmp_path, hosts):
    """Which would take machines for nobody when they come."""
    text = json.dumps({"run_name": "doomed", "log_dir": str(tmp_path), "hosts": hosts, "lease_s": 6, "timeout_s": 600})
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    driver = subprocess.Popen([sys.executable, "-m", "tests.programs.holder", text], env=env)
    assert wait_until(placement_groups.living)
    time.sleep(10)  # as long as the driver lives, it waits
    assert placement_groups.living()
    driver.kill()
    driver.wait()
    assert wait_until(lambda: not placement_groups.living())
    assert wait_until(everything_is_free)
    assert wait_until(lambda: ray.util.list_named_actors(all_namespaces=True) == [])


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_a_steward_leaves_alone_what_a_newer_driver_holds(take):
    _, older = hire("run", 0, 1.0)
    gang = take(count=1)
    start(gang)
    assert wait_until(lambda: is_dead(older))
    assert placement_groups.living()
    assert state(gang, gang.members[0])["alive"]


@pytest.mark.slow("waits for the lease of a steward; an agent with a driver is simulated in tests/unit/cluster")
def test_a_steward_leaves_alone_what_an_agent_holds_that_has_a_driver(take):
    gang = take(count=1)
    start(gang)
    _, cut_off = hire("run", 0, 1.0)
    time.sleep(5)
    assert not is_dead(cut_off)
    assert state(gang, gang.members[0])["alive"]
    gang.release()
    assert wait_until(lambda: is_dead(cut_off))


def is_dead(actor):
    """Why a steward is dead; empty if it is not."""
    try:
        ray.get(actor.keep.remote(driver_term=-2))
    except (StaleDriver, ray.exceptions.ActorUnavailableError):
        return ""
    except ray.exceptions.RayActorError as error:
        return str(error)
    return ""


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_an_agent_that_is_cut_off_leaves_the_others_alone(take):
    gang = take(count=2, lease_s=6)
    pids = start(gang)
    seen = placement_groups.living().keys()
    gang._keeper.drop(1)  # as if host 1 could not be reached
    while not is_gone(pids[1]):
        assert ray.get(gang.call(0, "poll", 0, 0.1))["host_state"]["alive"]
    assert wait_until(lambda: is_gone(gang.descriptions[1]["pid"]))
    assert state(gang, gang.members[0])["pid"] == pids[0]
    assert placement_groups.living().keys() == seen


@pytest.mark.slow("starts a gang; its parts are simulated in tests/unit/cluster")
def test_what_a_dead_driver_left_is_cleared_away(take, tmp_path):
    driver, about = hold(tmp_path, "left-behind", hosts={"count": 2, "spares": 1})
    driver.kill()
    driver.wait()
    left = {info["name"] for info in placement_groups.living().values()}
    assert left == {"left-behind-gang", "left-behind-slot-2-0-0"}
    take("left-behind-too", count=1)
    removed = clear("left-behind")
    assert left <= set(removed)
    assert len([name for name in removed if name.startswith("left-behind-host-")]) == 3
    assert wait_until(lambda: all(map(is_gone, about["pids"])))
    assert {info["name"] for info in placement_groups.living().values()} == {"left-behind-too-gang"}
    assert clear("left-behind") == []
    assert len(take("left-behind", count=3).members) == 3


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("a-gang", True),
        ("a-slot-0", True),
        ("a-slot-0-3-1", True),
        ("a-b-gang", False),
        ("b-gang", False),
        ("a", False),
        ("a-slot-x", False),
    ],
)
def test_only_groups_of_this_very_run_are_cleared(name, ours):
    assert is_group_of(name, "a") is ours


def test_agents_that_leave_together_remove_everything():
    """Whoever removes another's group ends that one: what nobody lives in goes first, one's own group last."""
    left = {"a": "run-gang", "b": "run-slot-2-1-0", "c": "run-slot-3-1-1", "d": "run-slot-4-1-2"}
    alive = ["run-host-1-1-1", "run-host-2-1-2"]  # 3 does not answer, 4 waits for a machine
    assert removal_order("run", left, "a", alive) == ["c", "d", "b", "a"]
    assert removal_order("run", left, "b", alive) == ["c", "d", "a", "b"]
    assert removal_order("run", left, "", []) == ["b", "c", "d", "a"]
