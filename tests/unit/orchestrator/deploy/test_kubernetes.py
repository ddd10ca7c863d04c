"""The manifests for KubeRay are what its published schemas allow, ask for the machines of the configuration, and are closed."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.hosts import config as hosts_config
from orchestrator.config.job import load
from tests import ROOT
from tests.unit.orchestrator.deploy.of_configs import BUCKET, GPU, TPU, deploy, documents

SLICES = {
    # accelerator, topology: hosts of a slice, chips of a host, label, type of the machines
    ("v5e", "2x4"): (1, 8, "tpu-v5-lite-podslice", "ct5lp-hightpu-8t"),
    ("v5e", "16x16"): (64, 4, "tpu-v5-lite-podslice", "ct5lp-hightpu-4t"),
    ("v5p", "2x2x1"): (1, 4, "tpu-v5p-slice", "ct5p-hightpu-4t"),
    ("v5p", "8x8x8"): (128, 4, "tpu-v5p-slice", "ct5p-hightpu-4t"),
    ("v6e", "4x4"): (4, 4, "tpu-v6e-slice", "ct6e-standard-4t"),
    ("v7x", "2x2x2"): (2, 4, "tpu7x", "tpu7x-standard-4t"),
}


@cache
def schema_of(kind: str) -> dict[str, Any]:
    """The schema of a kind, which allows no key that it does not name. The server would drop such a key without a word."""
    with gzip.open(ROOT / "tests" / "unit" / "data" / "kuberay" / f"{kind.lower()}.json.gz") as file:
        return strict(json.load(file))


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = (
        {}
        if schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        else {"additionalProperties": False}
    )
    made = {name: strict(value) for name, value in schema.items()}
    return {**closed, **made} if schema.get("type") == "object" and "properties" in schema else made


def problems(document: dict[str, Any]) -> list[str]:
    """What the published schema says of a manifest. The schema itself is not checked, which takes half a minute."""
    return [str(error.message) for error in jsonschema.Draft202012Validator(schema_of(document["kind"])).iter_errors(document)]


@pytest.fixture(scope="module", autouse=True)
def schemas():
    """Read once, before the first test."""
    return [schema_of("RayJob"), schema_of("RayCluster")]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"].get("rayClusterSpec", document["spec"])


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.parametrize(
    ("to", "config", "words"),
    [
        ("kuberay", GPU, (BUCKET,)),
        ("kuberay", ROOT / "configs/tiny.yaml", (BUCKET,)),
        ("gke-tpu", TPU, ()),
        ("gke-tpu", TPU, ("--spot", "hosts.min_slices=1", "hosts.max_slices=2", 'hosts.env={"KEY": "abc"}')),
    ],
)
def test_manifests_are_what_the_published_schemas_allow(to, config, words):
    folder = deploy(to, config, *words)
    for kind, name in (("RayJob", "rayjob.yaml"), ("RayCluster", "raycluster.yaml")):
        found = documents(folder / name)
        assert problems(found[kind]) == []
        assert set(found) == {"ServiceAccount", "ConfigMap", kind}
        assert found["ServiceAccount"]["metadata"]["name"] == pods(cluster_of(found[kind]))[0]["serviceAccountName"]
        assert "{{" not in (folder / name).read_text()
    job, cluster = (documents(folder / name) for name in ("rayjob.yaml", "raycluster.yaml"))
    assert cluster_of(job["RayJob"]) == cluster_of(cluster["RayCluster"])


def test_the_schemas_find_a_wrong_key(tmp_path):
    job = documents(deploy("gke-tpu", TPU) / "rayjob.yaml")["RayJob"]
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["numOfHost"] = 2
    (problem,) = problems(job)
    assert "'numOfHost' was unexpected" in problem


@pytest.mark.parametrize(("accelerator", "topology"), SLICES)
def test_a_slice_has_the_hosts_of_its_topology(accelerator, topology):
    hosts, chips, label, machine = SLICES[accelerator, topology]
    words = (
        f"hosts.accelerator={accelerator}",
        f"hosts.topology={topology}",
        "hosts.slices=2",
        "hosts.spares=1",
        "mesh={data: -1}",
    )
    path = deploy("gke-tpu", TPU, *words, f"global_batch_size={2 * hosts * chips * 2}") / "rayjob.yaml"
    (group,) = cluster_of(documents(path)["RayJob"])["workerGroupSpecs"]
    assert (group["numOfHosts"], group["replicas"], group["minReplicas"], group["maxReplicas"]) == (hosts, 3, 2, 3)
    pod = group["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["google.com/tpu"] == resources["requests"]["google.com/tpu"] == str(chips)
    assert f"a node pool of {machine}" in path.read_text()


def test_gpu_hosts_are_pods_with_all_gpus_of_a_machine():
    (group,) = cluster_of(documents(deploy("kuberay", GPU, BUCKET) / "rayjob.yaml")["RayJob"])["workerGroupSpecs"]
    assert (group["numOfHosts"], group["replicas"], group["minReplicas"]) == (1, 9, 8)
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_machines_that_may_be_taken_away_are_asked_for_only_with_spot():
    for words, spot in (((), None), (("--spot",), "true")):
        (group,) = cluster_of(documents(deploy("gke-tpu", TPU, *words) / "rayjob.yaml")["RayJob"])["workerGroupSpecs"]
        assert group["template"]["spec"]["nodeSelector"].get("cloud.google.com/gke-spot") == spot


@pytest.mark.parametrize(("to", "config", "words"), [("kuberay", GPU, (BUCKET,)), ("gke-tpu", TPU, ())])
def test_a_cluster_is_closed_to_others(to, config, words):
    cluster = cluster_of(documents(deploy(to, config, *words) / "raycluster.yaml")["RayCluster"])
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    for pod in pods(cluster):
        (container,) = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        # The device files of a TPU belong to root.
        assert pod["securityContext"].get("runAsNonRoot", False) is (container["name"] == "ray-head" or to == "kuberay")


def test_the_job_ends_with_the_run_and_lets_it_save():
    job = documents(deploy("kuberay", GPU, BUCKET) / "rayjob.yaml")["RayJob"]["spec"]
    assert job["shutdownAfterJobFinishes"] is True
    assert job["entrypoint"] == "gangway run /etc/gangway/config.yaml"
    head, _ = pods(job["rayClusterSpec"])
    (container,) = head["containers"]
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "300"} in container["env"]
    assert {"name": "config", "mountPath": "/etc/gangway", "readOnly": True} in container["volumeMounts"]


def test_the_configuration_inside_is_that_of_the_user(tmp_path):
    folder = deploy("gke-tpu", TPU, "optimizer.learning_rate=1e-5")
    inside = documents(folder / "rayjob.yaml")["ConfigMap"]["data"]["config.yaml"]
    assert inside == (folder / "config.yaml").read_text()
    ours, theirs = load(folder / "config.yaml"), load(TPU, ["optimizer.learning_rate=1e-5"])
    assert ours.training == theirs.training
    assert ours.hosts == theirs.hosts
    assert yaml.safe_load(inside)["data"]["tokenizer"] == "models/llama3-70b"  # not the path of this machine


def test_each_cpu_host_has_a_pod_of_its_own():
    config = load(deploy("kuberay", ROOT / "configs/tiny.yaml", BUCKET) / "config.yaml")
    assert hosts_config.spreads(config.hosts)


def test_the_image_is_pinned_and_runs_as_a_user():
    """What hadolint would say of it."""
    text = (deploy("kuberay", GPU, BUCKET) / "Dockerfile").read_text()
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {name for name, _ in instructions} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}
    ((_, base),) = [each for each in instructions if each[0] == "FROM"]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert next(argument for name, argument in reversed(instructions) if name == "USER") == "1000:1000"
    (install,) = [argument for name, argument in instructions if name == "RUN" and "pip" in argument]
    assert "--no-cache-dir" in install
    assert re.findall(r'"(jax|ray)\[[\w,]+\]==\d[\d.]*"', install) == ["jax", "ray"]
    assert "jax[cuda12]" in install
    assert not re.search(r"index-url|\bsudo\b|\bADD\b|:latest", text)
    ignored = (deploy("kuberay", GPU, BUCKET) / "Dockerfile.dockerignore").read_text().splitlines()
    assert {"**/.git", "/runs", "**/*.env", "**/auth_token"} <= set(ignored)
