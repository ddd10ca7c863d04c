"""The files for Ray's cluster launcher are what Ray's own validator allows."""

from __future__ import annotations

import shlex
import subprocess

import pytest
import yaml
from ray._private.accelerators.tpu import TPUAcceleratorManager
from ray.autoscaler._private.util import prepare_config, validate_config

from orchestrator.config.job import load
from tests.unit.orchestrator.deploy.of_configs import BUCKET, GPU, TPU, deploy


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


MACHINES = [
    (TPU, ("hosts.slices=2",), "gcp", 2, {"CPU": 2, "TPU": 4}),
    (GPU, ("--machine", "a3-highgpu-8g"), "gcp", 9, {"CPU": 2, "GPU": 8}),
]


@pytest.mark.parametrize(("config", "words", "provider", "machines", "resources"), MACHINES, ids=["tpu", "gpu"])
def test_rays_own_validator_takes_it(config, words, provider, machines, resources):
    found = yaml.safe_load((deploy("ray-cluster", config, BUCKET, *words) / "cluster.yaml").read_text())
    validate_config(prepare_config(found))
    hosts = found["available_node_types"]["hosts"]
    assert found["provider"]["type"] == provider
    assert (hosts["min_workers"], hosts["max_workers"], found["max_workers"]) == (machines, machines, machines)
    assert hosts["resources"] == resources


def test_slices_are_named_as_the_cloud_names_them():
    found = yaml.safe_load((deploy("ray-cluster", TPU, "--spot") / "cluster.yaml").read_text())
    node = found["available_node_types"]["hosts"]["node_config"]
    assert node == {"acceleratorType": "v5p-1024", "runtimeVersion": "v2-alpha-tpuv5", "schedulingConfig": {"spot": True}}
    assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(node["acceleratorType"])


def test_the_cluster_needs_a_token_and_its_dashboard_is_on_loopback():
    found = yaml.safe_load((deploy("ray-cluster", TPU, 'hosts.env={"KEY": "abc"}') / "cluster.yaml").read_text())
    for command in (found["head_start_ray_commands"][-1], found["worker_start_ray_commands"][-1]):
        assert "RAY_AUTH_MODE=token" in command
        assert ". ~/.gangway.env" in command
    words = shlex.split(found["head_start_ray_commands"][-1])
    assert "--dashboard-host=127.0.0.1" in words
    assert "RAY_JOB_STOP_WAIT_TIME_S=300" in words
    assert found["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "*.env" in found["rsync_exclude"]
    commands = [*found["setup_commands"], *found["head_start_ray_commands"], *found["worker_start_ray_commands"]]
    subprocess.run(["bash", "-n", "-c", "\n".join(commands)], check=True)


def test_a_run_waits_for_machines_that_are_still_being_ordered():
    assert load(deploy("ray-cluster", TPU) / "config.yaml").hosts.start_timeout_s == 1800
    assert load(deploy("ray-cluster", TPU, "hosts.start_timeout_s=60") / "config.yaml").hosts.start_timeout_s == 60
