"""The flags of XLA that hosts get by default, and what comes over them."""

import os
import subprocess
import sys

import pytest

from cluster.agent.child_process import child_env
from cluster.hosts import compiler_flags
from cluster.hosts.config import HostsConfig
from cluster.hosts.process_env import process_env
from tests import ROOT

ONE_SLICE = {"kind": "tpu", "accelerator": "v5e", "topology": "4x4"}
SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler=true"


def names(**settings):
    return [flag.name for flag in compiler_flags.of_hosts(HostsConfig(**settings))]


def test_each_kind_of_hosts_has_its_own():
    assert names(count=2) == []
    assert names(kind="gpu") == ["xla_gpu_enable_latency_hiding_scheduler"]
    assert names(**ONE_SLICE) == []
    assert names(**ONE_SLICE, slices=2) == [flag.name for flag in compiler_flags.BETWEEN_SLICES]
    assert names(**ONE_SLICE, slices=2, compiler_flags=False) == names(kind="gpu", compiler_flags=False) == []


def test_the_page_has_all_of_them():
    page = (ROOT / "docs" / "models.md").read_text()
    for hosts, flags in (("GPU", compiler_flags.ON_GPUS), ("several TPU slices", compiler_flags.BETWEEN_SLICES)):
        for flag in flags:
            assert f"| `{flag.name}={flag.value}` | {hosts} | {flag.why} | {flag.source} |" in page


def test_what_a_user_sets_is_not_set_twice():
    own = "--xla_tpu_enable_data_parallel_all_reduce_opt=false --other=1"
    assert names(**ONE_SLICE, slices=2, env={"LIBTPU_INIT_ARGS": own}) == ["xla_tpu_data_parallel_opt_different_sized_ops"]
    assert names(kind="gpu", env={"XLA_FLAGS": f"{SCHEDULER}"}) == []


def test_of_two_settings_that_of_the_user_is_the_last_one():
    """XLA takes the last one."""
    config = HostsConfig(kind="gpu", env={"XLA_FLAGS": "--of_user=1"})
    env = child_env({"XLA_FLAGS": "--of_machine=1", "LIBTPU_INIT_ARGS": "--of_tpu=1"}, process_env(config, 0, "/cache"))
    assert env["XLA_FLAGS"] == f"{SCHEDULER} --of_machine=1 --of_user=1"
    assert env["LIBTPU_INIT_ARGS"] == "--of_tpu=1"
    assert not [name for name in env if name in compiler_flags.DEFAULTS_OF.values()]


def test_a_process_of_a_tpu_gets_them_where_libtpu_reads_them():
    config = HostsConfig(**ONE_SLICE, slices=2, env={"LIBTPU_INIT_ARGS": "--of_user=1"})
    expected = f"{' '.join(map(str, compiler_flags.BETWEEN_SLICES))} --of_user=1"
    assert child_env({}, process_env(config, 0, "/cache"))["LIBTPU_INIT_ARGS"] == expected


@pytest.mark.slow("starts a process with JAX")
def test_xla_knows_those_of_gpus():
    """It ends a process whose flags it does not know; those of TPUs are tried in tests/unit/orchestrator/test_compile.py."""
    flags = " ".join(map(str, compiler_flags.ON_GPUS))
    for more, status in (("", 0), (" --xla_gpu_no_such_flag=true", None)):
        done = subprocess.run(
            [sys.executable, "-c", "import jax; jax.numpy.zeros(1)"],
            env={**os.environ, "XLA_FLAGS": flags + more, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            check=False,
        )
        assert (done.returncode == 0) == (status == 0), done.stderr
