"""How a Ray of a run's own is closed to others, as far as no Ray is needed to see it."""

import json
import os
import signal
import socket
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from orchestrator.config.job import build
from orchestrator.driver import head, ray_cluster


def test_each_ray_gets_a_token_of_its_own():
    first, second = {}, {}
    ray_cluster.protect(first)
    ray_cluster.protect(second)
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize(
    "said",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "mine"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/home/me/token"},
    ],
)
def test_what_the_user_says_of_authentication_holds(said):
    environ = dict(said)
    ray_cluster.protect(environ)
    assert {name: value for name, value in environ.items() if name.startswith("RAY_AUTH")} == said


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [("127.0.0.1:6379", True), ("[::1]:6379", True), ("10.0.0.7:6379", False), ("head:6379", False), ("auto", False)],
)
def test_which_clusters_are_of_this_machine_alone(address, is_loopback):
    assert ray_cluster.is_loopback(address) is is_loopback


def test_rays_files_are_in_a_folder_of_this_users_alone(tmp_path):
    first = ray_cluster.private_folder(str(tmp_path))
    assert os.stat(first).st_mode & 0o777 == 0o700
    assert ray_cluster.private_folder(str(tmp_path)) == first
    assert len(ray_cluster.private_folder()) < 40, "the paths of sockets have a limit"


@pytest.mark.parametrize("what", ["open", "link", "file"])
def test_a_folder_that_somebody_else_may_have_prepared_is_not_used(tmp_path, what):
    expected = tmp_path / f"gangway-{os.getuid()}"
    if what == "open":
        expected.mkdir()
        expected.chmod(0o777)
    elif what == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        expected.symlink_to(tmp_path / "theirs")
    else:
        expected.touch(0o600)
    made = ray_cluster.private_folder(str(tmp_path))
    assert made != str(expected)
    assert os.stat(made).st_mode & 0o777 == 0o700


def test_nothing_is_read_from_a_process_that_is_not_ray():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert ray_cluster.authentication_of(f"127.0.0.1:{listening.getsockname()[1]}") == {}


def test_a_private_ray_starts_without_the_processes_that_nobody_asks():
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in ray_cluster.ASKED_BY_NOBODY}
    with ray_cluster.without_helpers(["start_monitor", "no_longer_there"]):
        assert Node.start_monitor(None) is None  # it would need a node
        assert Node.start_api_server is before["start_api_server"]
    assert {name: getattr(Node, name) for name in before} == before


def test_what_ray_starts_is_in_a_session_of_its_own_and_only_that():
    """A signal to the process group of the command would end it, while the state is being saved."""
    from ray._private import services

    before, wait = services.ConsolePopen, [sys.executable, "-c", "input()"]
    with ray_cluster.in_a_session():
        process = services.ConsolePopen(wait, stdin=-1, preexec_fn=None, creationflags=0)
    try:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
    finally:
        process.communicate(b"\n")
    assert services.ConsolePopen is before


ID = "ab" * 28


class Params(SimpleNamespace):
    metrics_agent_port = metrics_export_port = None
    runtime_env_agent_port, dashboard_agent_listen_port = 0, ray_cluster.SAME_FOR_ALL_RAYS


@pytest.mark.parametrize("status", [None, -6])
def test_a_node_has_ports_for_its_agents_and_is_waited_for_while_its_raylet_lives(tmp_path, monkeypatch, status):
    from ray._private import services
    from ray._private.node import Node

    started = SimpleNamespace(process=SimpleNamespace(poll=lambda: status))
    monkeypatch.setattr(Node, "start_raylet", lambda node: node.all_processes.update(raylet=[started]))
    monkeypatch.setattr(services, "get_node", mock.Mock(side_effect=[RuntimeError("not yet")] * 3 + ["registered"]))
    before = Node.start_raylet, services.get_node
    monkeypatch.setenv(ray_cluster.AGENT_TIMEOUT, "")
    del os.environ[ray_cluster.AGENT_TIMEOUT]
    node = object.__new__(Node)
    node._node_id, node._session_dir, node.all_processes = ID, str(tmp_path), {}
    node._ray_params = Params(metrics_export_port=1234)
    with ray_cluster.patient_with_agents(limit_s=600):
        assert os.environ[ray_cluster.AGENT_TIMEOUT] == "600000"
        node.start_raylet()
        ports = [getattr(node._ray_params, name) for name in ray_cluster.PORTS_OF_AGENTS]
        assert ports[1] == 1234
        assert len({*ports, 0, ray_cluster.SAME_FOR_ALL_RAYS}) == len(ports) + 2
        # Held for the agents alone, however late they come, as long as there is the node.
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", ports[0]))
        with socket.create_server(("127.0.0.1", ports[0])):
            pass
        assert [path.read_text() for path in tmp_path.iterdir()] == [str(ports[-1])]
        if status is None:
            assert services.get_node("address", ID) == "registered"
        else:
            with pytest.raises(OSError, match=r"^its raylet ended with status -6; raylet\.err says why\.$"):
                services.get_node("address", ID)
    assert (Node.start_raylet, services.get_node) == before
    del node
    with socket.socket() as other:
        other.bind(("", ports[0]))


def test_a_node_that_does_not_register_is_waited_for_no_longer_than_said(monkeypatch):
    from ray._private import services

    monkeypatch.setattr(services, "get_node", mock.Mock(side_effect=RuntimeError("not yet")))
    monkeypatch.setenv(ray_cluster.AGENT_TIMEOUT, "5000")  # the user's own
    with ray_cluster.patient_with_agents(limit_s=0.01), pytest.raises(RuntimeError, match="not yet"):
        services.get_node("address", "of another process")
    assert os.environ[ray_cluster.AGENT_TIMEOUT] == "5000"


def test_rays_page_of_jobs_has_the_name_of_the_run(monkeypatch):
    started = {}
    monkeypatch.setattr("ray.init", lambda *address, **options: started.update(options))
    with mock.patch.dict(os.environ, RAY_ADDRESS="10.0.0.7:6379"):  # `connect` sets more
        ray_cluster.connect(build({"name": "mine", "max_num_steps": 1}))
    assert started["job_config"].metadata == {"job_name": "mine"}


def test_a_ray_that_does_not_start_is_an_error_in_words(monkeypatch):
    def times_out(*address, **options):
        raise Exception("The current node timed out during startup.\nand more lines\n")

    monkeypatch.setattr("ray.init", times_out)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        mock.patch.dict(os.environ),
        pytest.raises(head.ClusterError, match=r"^Ray did not start on this machine: The current node .*startup\. Is it busy.*$"),
    ):
        ray_cluster.connect(build({"name": "mine", "max_num_steps": 1}))


def test_a_job_that_ray_does_not_stop_is_named_with_what_ray_takes_it_for(monkeypatch, capsys):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ray_cluster.stop_own_job({})  # in no job of Ray: nothing is asked, and signals are as they were
    assert {number: signal.getsignal(number) for number in before} == before
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    try:
        ray_cluster.stop_own_job({ray_cluster.CONFIG_OF_JOB: json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}})})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert said.startswith(
        "warning: Ray has not stopped its job raysubmit_1: Failed to connect to Ray at address: http://127.0.0.1:1"
    )
    assert said.endswith("; the run is saved, but Ray takes the job for failed\n")
