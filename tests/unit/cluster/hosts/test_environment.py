"""What of the environment of a machine a training process gets."""

import fnmatch
import subprocess

import pytest

from cluster.agent.child_process import child_env
from cluster.hosts.config import HostsConfig
from cluster.hosts.environment import DROPPED, NO_PROXY_BETWEEN_HOSTS, OVERWRITTEN, taken
from cluster.hosts.process_env import process_env

LEFT_OVER = {name.replace("*", "ADDRESS"): "left over" for name in DROPPED}


def test_what_other_programs_have_left_is_dropped_and_all_else_is_taken():
    own = {
        "PATH": "/bin",
        "https_proxy": "http://proxy:3128",
        "HF_TOKEN": "key",
        "JAX_ENABLE_X64": "1",
        "GANGWAY_CLOCK": "/clock",
    }
    assert taken({**LEFT_OVER, **own}) == own
    assert child_env({**LEFT_OVER, **own}, {}) == own


def test_what_a_user_or_the_orders_set_comes_over_it():
    assert child_env(LEFT_OVER, {"JAX_SLICE_INDEX": "3"}) == {"JAX_SLICE_INDEX": "3"}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_hosts_never_speak_to_each_other_through_a_proxy(kind):
    """gRPC takes the first of these three that is set, and an empty one means none."""
    proxies = {"http_proxy": "http://proxy:3128", "https_proxy": "http://proxy:3128", "grpc_proxy": "http://proxy:3128"}
    env = child_env(proxies, process_env(HostsConfig(kind=kind), 0, "/cache"))
    assert env["grpc_proxy"] == ""
    assert env["https_proxy"] == "http://proxy:3128"  # user code may need it for downloads


@pytest.mark.parametrize(
    ("name", "why"),
    [("grpc_proxy", "what hosts say to each other goes through no proxy; https_proxy is for downloads"), ("EVENT_FD", "agent")],
)
def test_what_may_not_be_set_is_refused_with_the_reason(name, why):
    with pytest.raises(ValueError, match=rf"^env.{name}: leave it out: .*{why}"):
        HostsConfig(env={name: "x"})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("A=B", "secret", "expected a name without ="),
        ("", "secret", "expected a name without ="),
        ("A\0", "secret", "has a NUL"),
        ("A", "sec\0ret", "has a NUL"),
        ("A", "secret\ud800", "half a character"),
    ],
)
def test_what_no_process_can_have_is_refused_before_a_machine_is_taken(name, value, why):
    with pytest.raises(ValueError, match=why) as caught:
        HostsConfig(env={name: value})
    assert "secret" not in str(caught.value)
    if name:
        with pytest.raises((ValueError, OSError)):  # as the agent would find out
            subprocess.run(["true"], env={name: value}, check=False)


def test_the_list_names_all_that_we_overwrite():
    ours = {*process_env(HostsConfig(devices_per_host=2), 0, "/cache")} - {"XLA_FLAGS"}
    assert [name for name in ours if not any(fnmatch.fnmatchcase(name, pattern) for pattern in OVERWRITTEN)] == []
    assert set(NO_PROXY_BETWEEN_HOSTS) <= ours
