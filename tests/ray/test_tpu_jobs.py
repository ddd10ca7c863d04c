"""Whole jobs on fake TPU slices: machines that are TPU hosts by their labels and resources, and compute on CPUs."""

from __future__ import annotations

import json

import pytest

from cluster.hosts.config import HostsConfig
from tests.ray import fake
from tests.ray.jobs import run_job, settings

WINGS = ("cluster/hosts", "cluster/placement", "cluster/gang", "orchestrator/driver")

pytestmark = pytest.mark.slow("trains on several Ray nodes")

SLICE = {"kind": "tpu", "accelerator": "v4", "topology": "2x2x2"}
AS_IF_FOUR_CHIPS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "16"}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two slices of two hosts, joining Ray in an order that is not theirs."""
    slice_a, slice_b = (fake.slice_nodes(HostsConfig(**SLICE), name) for name in ("slice-a", "slice-b"))
    with fake.cluster_of([slice_b[1], slice_a[1], slice_a[0], slice_b[0]], log_to_driver=False):
        yield


def run_on(tmp_path, slices):
    hosts = {**SLICE, "slices": slices, "env": AS_IF_FOUR_CHIPS}
    made = settings(tmp_path, hosts=hosts, global_batch_size=16, trainer="tests.programs.recorder:Recorder")
    summary = run_job(made)
    assert summary["status"] == "finished", summary["error"]
    return [json.loads((tmp_path / f"process-{i}.json").read_text()) for i in range(2 * slices)]


def test_on_one_slice_process_ids_follow_worker_ids(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "7")  # of a job long gone
    processes = run_on(tmp_path, 1)
    assert [process["TPU_WORKER_ID"] for process in processes] == ["0", "1"]
    assert len({process["TPU_NAME"] for process in processes}) == 1
    assert all(process["MEGASCALE_NUM_SLICES"] is None for process in processes)


def test_on_two_slices_the_driver_says_which_is_which(tmp_path):
    processes = run_on(tmp_path, 2)
    assert [process["TPU_WORKER_ID"] for process in processes] == ["0", "1", "0", "1"]
    assert [process["MEGASCALE_SLICE_ID"] for process in processes] == ["0", "0", "1", "1"]
    assert {process["MEGASCALE_NUM_SLICES"] for process in processes} == {"2"}
    assert len({process["MEGASCALE_COORDINATOR_ADDRESS"] for process in processes}) == 1
    names = [process["TPU_NAME"] for process in processes]
    assert names[0] == names[1] != names[2] == names[3]
