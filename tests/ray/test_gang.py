"""Gangs of CPU hosts on a real local Ray, with a stand-in for the training process."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import ray

from cluster import gang as gang_module
from cluster import groups
from cluster.gang import GangTimeout, clear, reserve
from cluster.topology import HostsConfig
from tests.programs.processes import is_gone, wait_until

CPUS = 4
MODULE = "tests.programs.echo_worker"


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def take(tmp_path):
    gangs = []

    def take(name="run", timeout_s=60, **hosts):
        gangs.append(
            reserve(
                HostsConfig(**hosts),
                name,
                log_dir=str(tmp_path / "logs"),
                cache_dir=str(tmp_path / "cache"),
                module=MODULE,
                timeout_s=timeout_s,
            )
        )
        return gangs[-1]

    yield take
    for gang in gangs:
        gang.release()
    assert wait_until(everything_is_free)


def everything_is_free():
    free = ray.available_resources()
    return free.get("CPU") == CPUS and not groups.living() and not any("bundle_group" in name for name in free)


def call(agents, method, *arguments):
    return ray.get([getattr(agent, method).remote(*arguments) for agent in agents])


def event(agent, kind, cursor=0):
    while True:
        answer = ray.get(agent.poll.remote(cursor, 30.0), timeout=60)
        for each in answer["events"]:
            if each["ev"] == kind:
                return each
        assert answer["events"], f"no {kind}; {answer['host_state']}"
        cursor = answer["cursor"]


def state(agent):
    return ray.get(agent.poll.remote(0, 0))["host_state"]


def start(gang, generation=0, **orders):
    """Prepares and starts all hosts; returns the process ids."""
    gang.prepare({"tag": generation})
    return [answer["pid"] for answer in call(gang.agents, "go", {"generation": generation, **orders})]


def test_all_hosts_run_with_their_own_environment(take, tmp_path):
    gang = take(count=2, devices_per_host=3)
    start(gang)
    envs = [event(agent, "joined")["env"] for agent in gang.agents]
    assert [env["JAX_COMPILATION_CACHE_DIR"] for env in envs] == [str(tmp_path / f"cache/host-000{host}") for host in (0, 1)]
    assert all(env["XLA_FLAGS"].endswith("--xla_force_host_platform_device_count=3") for env in envs)
    assert all(env["JAX_PLATFORMS"] == "cpu" for env in envs)
    assert gang.orders(1) == {"local_device_ids": None, "slice": 0}
    about = gang.descriptions
    assert len({each["pid"] for each in about}) == 2
    assert {each["node_id"] for each in about} == {ray.get_runtime_context().get_node_id()}
    assert all(each["host_ip"] for each in about)


def test_release_ends_processes_and_gives_the_machines_back(take):
    gang = take(count=2)
    pids = start(gang)
    gang.release()
    assert wait_until(lambda: all(map(is_gone, pids)))
    assert wait_until(everything_is_free)


def test_a_killed_process_is_seen_and_the_gang_goes_on(take):
    gang = take(count=2)
    pids = start(gang)
    cursor = event(gang.agents[1], "first_step") and ray.get(gang.agents[1].poll.remote(0, 0))["cursor"]
    waiting = gang.agents[1].poll.remote(cursor, 60.0)
    os.kill(pids[1], signal.SIGKILL)
    seen = ray.get(waiting, timeout=60)["events"]
    assert [(each["ev"], each["signal"], each["generation"]) for each in seen] == [("exit", signal.SIGKILL, 0)]
    after = call(gang.agents, "halt")
    assert [each["exit"] and each["exit"]["signal"] for each in after] == [None, signal.SIGKILL]
    assert is_gone(pids[0])
    call(gang.agents, "go", {"generation": 1})
    assert [event(agent, "joined")["generation"] for agent in gang.agents] == [1, 1]


def test_nothing_outlives_a_killed_agent(take):
    gang = take(count=2)
    pid = start(gang, workers=2)[1]
    agent = gang.agents[1]
    workers = event(agent, "joined")["workers"]
    assert wait_until(lambda: state(agent)["standby"] == "warm")
    standby = state(agent)["standby_pid"]
    waiting = agent.poll.remote(1000, 60.0)
    os.kill(gang.descriptions[1]["pid"], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting, timeout=60)
    assert wait_until(lambda: all(map(is_gone, [pid, standby, *workers])))
    assert state(gang.agents[0])["alive"]


def test_a_frozen_process_ends_with_its_agent_too(take):
    gang = take(count=1)
    pid = start(gang)[0]
    os.kill(pid, signal.SIGSTOP)
    os.kill(gang.descriptions[0]["pid"], signal.SIGKILL)
    assert wait_until(lambda: is_gone(pid))


def test_a_lost_agent_is_replaced_on_its_own_place(take):
    gang = take(count=2)
    start(gang)
    os.kill(gang.descriptions[1]["pid"], signal.SIGKILL)
    old = gang.agents[1]
    new = gang.replace(1)
    assert new == gang.agents[1] != old
    assert ray.get(new.go.remote({"generation": 1}))["pid"]  # prepared as the others were
    assert event(new, "warm")["tag"] == 0
    assert event(new, "joined")["env"]["JAX_COMPILATION_CACHE_DIR"].endswith("host-0001")


def test_a_spare_takes_over_warm_and_leaves_a_spare_behind(take):
    gang = take(count=2, spares=1)
    start(gang)
    spare = gang.spares[0]
    assert wait_until(lambda: state(spare)["standby"] == "warm")
    standby = state(spare)["standby_pid"]
    os.kill(gang.descriptions[0]["pid"], signal.SIGKILL)
    assert gang.replace(0) == spare == gang.agents[0]
    assert ray.get(spare.go.remote({"generation": 1}))["pid"] == standby
    assert wait_until(lambda: state(gang.spares[0])["standby"] == "warm")
    os.kill(gang.descriptions[0]["pid"], signal.SIGKILL)
    second = gang.spares[0]
    assert gang.replace(0) == second


def test_missing_spares_hold_nothing_up(take):
    gang = take(count=CPUS, spares=1)
    start(gang)
    assert len(gang.agents) == CPUS
    os.kill(gang.descriptions[2]["pid"], signal.SIGKILL)
    gang.replace(2)
    assert ray.get(gang.agents[2].go.remote({"generation": 1}))["pid"]


def test_a_gang_that_cannot_be_placed_says_what_is_missing_and_holds_nothing(take):
    with pytest.raises(GangTimeout) as error:
        take(count=CPUS + 3, timeout_s=0.5)
    assert str(error.value) == (
        "the hosts of run 'run' could not be had within 0.5 s: asked for 7 hosts with CPU 1 each; "
        "CPU: 7 needed, the cluster has 4, 4 free: 3 missing; 1 machine(s): room for 4 hosts when idle, for 4 hosts now; "
        "add machines to the cluster, or set hosts.count to at most 4, or hosts.cpus_per_host lower"
    )
    assert wait_until(everything_is_free)
    assert len(take(count=CPUS).agents) == CPUS  # also: its name is free again


def test_machines_in_use_are_told_from_machines_that_are_missing(take):
    take("other", count=3)
    with pytest.raises(GangTimeout, match=r"CPU: 2 needed, the cluster has 4, 1 free: 1 missing.*in use, or ask for less"):
        take(count=2, timeout_s=0.5)


def test_a_gang_waits_for_machines_in_use(take):
    threading.Timer(1.0, take("other", count=3).release).start()
    assert len(take(count=3).agents) == 3


def test_hosts_on_machines_of_their_own(take):
    with pytest.raises(GangTimeout, match=r"on different machines.*room for 1 host when idle.*hosts.count to at most 1"):
        take(count=2, spread=True, timeout_s=0.5)


def test_a_machine_to_avoid_is_not_used(tmp_path):
    here = ray.get_runtime_context().get_node_id()
    with pytest.raises(GangTimeout, match=r"0 machine\(s\) \(1 more avoided\)"):
        reserve(HostsConfig(), "run", log_dir=str(tmp_path), avoid_nodes=[here], timeout_s=0.5)
    assert wait_until(everything_is_free)


def test_gpu_hosts_want_gpus(take):
    with pytest.raises(GangTimeout, match=r"GPU: 4 needed, the cluster has 0, 0 free: 4 missing"):
        take(kind="gpu", devices_per_host=4, timeout_s=0.5)


def test_agents_that_do_not_start_leave_nothing_behind(take, monkeypatch, tmp_path):
    (tmp_path / "logs").write_text("a file where the folder of logs should be")
    with pytest.raises(GangTimeout, match="an agent of run 'run' did not start"):
        take(count=2)
    assert wait_until(everything_is_free)


@ray.remote(num_cpus=0)
class DoomedDriver:
    """Holds a gang, as a driver under Ray Train does, and dies while its job lives."""

    def take(self, log_dir):
        self.gang = reserve(HostsConfig(count=2, spares=1), "left-behind", log_dir=log_dir, module=MODULE)
        self.gang.prepare({})
        answers = ray.get([agent.go.remote({"generation": 0}) for agent in self.gang.agents])
        return os.getpid(), [answer["pid"] for answer in answers]


def test_what_a_dead_driver_left_is_cleared_away(take, tmp_path):
    driver = DoomedDriver.remote()
    driver_pid, pids = ray.get(driver.take.remote(str(tmp_path)))
    os.kill(driver_pid, signal.SIGKILL)
    assert wait_until(lambda: all(map(is_gone, pids)))  # agents die with their owner, the groups do not
    left = {info["name"] for info in groups.living().values()}
    assert left == {"left-behind-gang", "left-behind-spare-0"}
    take("left-behind-too", count=1)
    assert left <= set(clear("left-behind"))
    assert {info["name"] for info in groups.living().values()} == {"left-behind-too-gang"}
    assert clear("left-behind") == []
    assert len(take("left-behind", count=3).agents) == 3


def test_nothing_outlives_a_killed_job(take, tmp_path):
    command = [sys.executable, "-m", "tests.programs.holder", "doomed", str(tmp_path)]
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as job:
        pids = json.loads(job.stdout.readline())
        assert not any(map(is_gone, pids))
        job.kill()
    assert wait_until(lambda: all(map(is_gone, pids)))
    assert wait_until(everything_is_free)


def test_clear_ends_agents_that_live(take):
    gang = take(count=2)
    pids = start(gang)
    removed = clear("run")
    assert "run-gang" in removed
    assert [name for name in removed if name.startswith("run-host-")]
    assert wait_until(lambda: all(map(is_gone, pids)))
    assert wait_until(everything_is_free)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("a-gang", True),
        ("a-heads", True),
        ("a-spare-0", True),
        ("a-b-gang", False),
        ("b-gang", False),
        ("a", False),
        ("a-spare-x", False),
    ],
)
def test_only_groups_of_this_very_run_are_cleared(name, ours):
    assert gang_module._is_group_of(name, "a") is ours
