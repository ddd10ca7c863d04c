"""What a configuration cannot be deployed with is refused by name, before anything is written; and no file has a secret."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY

from cluster.hosts.tpu import offered, topology_problem
from orchestrator.config.job import load
from orchestrator.deploy.__main__ import main
from orchestrator.deploy.files import resource_name
from orchestrator.deploy.request import TARGETS
from tests import ROOT
from tests.unit.orchestrator.deploy.of_configs import BUCKET, GPU, TPU, deploy, refusal

TINY = ROOT / "configs" / "tiny.yaml"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.prefix", "/shared/venv")


@pytest.mark.parametrize(
    ("to", "config", "words", "said"),
    [
        ("kuberay", TPU, (), "--to kuberay is for gpu or cpu; for tpu hosts: --to gke-tpu, tpu-vm, ray-cluster"),
        ("slurm", TPU, (), "hosts.kind = tpu: --to slurm is for gpu or cpu"),
        ("gke-tpu", GPU, (BUCKET,), "hosts.kind = gpu: --to gke-tpu is for tpu"),
        ("kuberay", TINY, ("storage=runs",), "runs: a folder of this machine, which the hosts of kuberay do not share"),
        ("slurm", TINY, ("storage=/tmp/gangway-runs",), "storage = /tmp/gangway-runs: each machine has its own"),
        ("gke-tpu", TPU, ("hosts.accelerator=v7x", "hosts.topology=4x4x12"), "hosts.topology = 4x4x12: 192 chips of v7x"),
        ("tpu-vm", TPU, ("hosts.topology=4x4x2",), "4x4x2: 32 chips of v5p are not offered in this shape; the nearest: 2x4x4"),
        ("gke-tpu", TPU, ("hosts.accelerator=v5q",), "did you mean v5"),
        ("gke-tpu", TPU, ("driver.address=10.0.0.1:6379",), "driver.address = '10.0.0.1:6379': leave it out"),
        ("kuberay", GPU, (BUCKET, 'notify.webhook="https://hooks.slack.com/services/abc"'), "notify.webhook: it holds a secret"),
        ("kuberay", GPU, (BUCKET, 'tracking.uri="https://me:abc@example.org"'), "tracking.uri: it holds a secret"),
        ("kuberay", GPU, (BUCKET, 'hosts.env={"RAY_AUTH_TOKEN": "abc"}'), "hosts.env.RAY_AUTH_TOKEN: leave it out"),
        ("gke-tpu", TPU, ("data.prepared=/usr",), "data.prepared = /usr: a file or folder of this machine outside"),
        ("gke-tpu", TPU, ("--out", "my deploy"), "--out 'my deploy': expected letters, digits"),
        ("slurm", TINY, ("storage=/shared/runs", "--out", "a\nrm -r b"), "--out 'a\\nrm -r b': expected letters, digits"),
        ("gke-tpu", TPU, ('hosts.env={"A-KEY": "abc"}',), "hosts.env: the variable 'A-KEY': expected letters, digits and '_'"),
        ("tpu-vm", TPU, ("--project", "My Project"), "--project 'My Project': expected the ID of a project"),
        ("gke-tpu", TPU, ("--out", "../elsewhere"), "--out ../elsewhere: expected a folder inside the working folder"),
        ("slurm", TINY, ("storage=runs", "--spot"), "--spot: --to slurm has no use for it"),
        ("ray-cluster", GPU, (BUCKET,), "needs --machine, such as a3-highgpu-8g"),
        ("ray-cluster", GPU, (BUCKET, "--machine", "a3-highgpu-9g"), "9g: not known to have GPUs; did you mean a3-highgpu-"),
        ("ray-cluster", GPU, (BUCKET, "--machine", "a3-highgpu-4g"), "devices_per_host = 8: --machine a3-highgpu-4g has 4"),
        ("ray-cluster", TPU, ("--machine", "a3-highgpu-8g"), "--machine a3-highgpu-8g: hosts.accelerator and hosts.topology say"),
    ],
)  # fmt: skip
def test_what_cannot_be_deployed_is_refused_by_name(capsys, to, config, words, said):
    assert said in refusal(capsys, to, config, *words).replace(str(Path.cwd()) + "/", "")


@pytest.mark.parametrize(
    ("to", "config", "options", "said"),
    [
        ("kuberay", GPU, (), "--to kuberay needs --image"),
        ("kuberay", GPU, ("--image", "example.org/llama"), "expected a name with a tag"),
        ("kuberay", GPU, ("--image", "example.org/llama:latest"), "a tag that moves"),
        ("kuberay", GPU, ("--image", "example.org/Llama:1"), "in lower case"),
        ("tpu-vm", TPU, ("--zone", "us-east5-b"), "--to tpu-vm needs --project"),
        ("tpu-vm", TPU, ("--project", "p", "--zone", "us-east-1a"), "expected a zone of Google"),
        ("ray-cluster", TPU, ("--zone", "us-east5-b"), "on Google needs --project"),
        ("ray-cluster", GPU, ("--zone", "us-east5-b", "--machine", "p5.48xlarge"), "expected a zone of Amazon"),
    ],
)
def test_what_is_missing_of_the_options_is_said(capsys, to, config, options, said):
    assert said in refusal(capsys, to, config, BUCKET, options=options)


def test_what_is_not_here_is_refused_where_the_hosts_cannot_have_it_and_else_told(capsys):
    others = ("data.prepared=null", "data.tokenizer=bytes")
    assert main([str(GPU), "--to", "kuberay", "--image", "example.org/llama:1", BUCKET, *others]) == 2
    said = capsys.readouterr().err
    assert f"data.paths.0 = data/text: it does not exist, and the hosts have what this folder has, {Path.cwd()}; put it" in said
    assert "1 problem" in said
    assert not Path("deploy").exists()
    # Machines of SLURM may share the working folder, though this one does not.
    assert main([str(TINY), "--to", "slurm", "storage=/shared/runs", "data.paths=[data/text]"]) == 0
    assert "note: data.paths.0 = data/text is not here, so it was not looked at: only the hosts" in capsys.readouterr().out
    deploy("kuberay", GPU, BUCKET, "data.paths=[/nowhere/text/*.txt]", "data.prepared=null")
    assert "note: data.paths.0 = /nowhere/text/*.txt is not here" in capsys.readouterr().out


def test_an_environment_that_only_this_machine_has_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.prefix", "/tmp/me/venv")
    said = refusal(capsys, "slurm", TINY, "storage=/shared/runs")
    assert "the environment of this command, /tmp/me/venv: each machine has its own, and the hosts would run in it" in said
    deploy("kuberay", GPU, BUCKET)  # an image brings its own


def test_all_reasons_are_told_at_once(capsys):
    said = refusal(capsys, "kuberay", TPU, "storage=runs", "driver.address=10.0.0.1:6379", options=())
    assert "4 problems" in said


@pytest.mark.parametrize("to", TARGETS)
def test_no_file_has_a_secret(to):
    config = TPU if "tpu" in TARGETS[to].kinds else GPU
    machine = ("--machine", "a3-highgpu-8g") if to == "ray-cluster" and config is GPU else ()
    words = 'hosts.env={"API_KEY": "abc-secret", "XLA_FLAGS": "--xla_a=1"}'
    folder = deploy(to, config, BUCKET, words, *machine)
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert [name for name, text in texts.items() if "abc-secret" in text] == []
    assert "--xla_a=1" in texts["config.yaml"]
    # What starts the hosts asks for it.
    assert any(word in text for text in texts.values() for word in ("optional: false", "API_KEY", "gangway.env"))


@pytest.mark.parametrize(
    ("name", "spelled"), [("v4", "v4"), ("v5e", "v5litepod"), ("v5p", "v5p"), ("v6e", "v6e"), ("v7x", "v7x")]
)
def test_the_topologies_that_are_offered_are_those_that_ray_knows(name, spelled):
    shapes = offered(spelled)
    # Ray names each order of the sides, and one shape that Google does not offer.
    known = {shape for shape in VALID_TPU_TOPOLOGY[spelled] if (dims := list(map(int, shape.split("x")))) == sorted(dims)}
    assert set(shapes) - {"2x2x1"} == known - {"2x8"} - {"2x2x1"}
    assert all(topology_problem(name, shape) is None for shape in shapes)


@pytest.mark.parametrize(
    ("name", "resource"),
    [("llama3-8b", "llama3-8b"), ("Llama_3.8B", "llama-3-8b-0d9054ef"), ("8b", "run-8b-f5faae70"), ("a" * 40, "a" * 40)],
)
def test_a_name_becomes_one_that_clouds_take(name, resource):
    assert resource_name(name) == resource


def test_names_that_are_cut_or_of_other_letters_stay_different():
    for names in (("a" * 50, "a" * 51), ("a_b", "a-b", "a.b", "A-B", "a--b", "a-b-"), ("8b", "run-8b", "run-8b-")):
        assert len({resource_name(name) for name in names}) == len(names)
        assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", resource_name(name)) for name in names)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data.paths", "[../outside]", "data.paths.0 = ../outside: a file or folder of this machine outside the working folder"),
        ("data.paths", "[linked]", "data.paths.0 = linked: a file or folder of this machine outside the working folder"),
        ("data.paths", "[HERE/linked]", "data.paths.0 = HERE/linked: a file or folder of this machine outside"),
        ("data.paths", "[texts]", "data.paths.0 = texts: texts/deep/b.txt is a link outside the working folder"),
    ],
)
def test_what_lies_outside_the_working_folder_is_found_behind_dots_and_links(tmp_path, monkeypatch, capsys, key, value, said):
    here = tmp_path / "here"
    for folder in (here / "texts/deep", tmp_path / "outside"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("text " * 500)
    (here / "linked").symlink_to(tmp_path / "outside")
    (here / "texts/deep/b.txt").symlink_to(tmp_path / "outside/a.txt")
    (here / "texts/c.txt").symlink_to("deep/a.txt")  # stays inside
    (here / "texts/.venv").mkdir()
    (here / "texts/.venv/python").symlink_to("/usr/bin/env")  # is not copied
    monkeypatch.chdir(here)
    assert said in refusal(capsys, "kuberay", TINY, BUCKET, f"{key}={value.replace('HERE', str(here))}").replace(
        str(here), "HERE"
    )
    (here / "texts/deep/b.txt").unlink()
    deploy("kuberay", TINY, BUCKET, "data.paths=[texts]")


def test_paths_inside_the_working_folder_are_relative_in_the_deployment(tmp_path, monkeypatch):
    """Also when they are reached by a link to that folder, or by the home folder."""
    here = tmp_path / "here"
    (here / "texts").mkdir(parents=True)
    (here / "texts/a.txt").write_text("text " * 500)
    (tmp_path / "way").symlink_to(here)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("texts", f"{here}/texts", f"{tmp_path}/way/texts", f"{here}/../here/texts"):
        assert load(deploy("kuberay", TINY, BUCKET, f"data.paths=[{path}]") / "config.yaml").training.data.paths == ("texts",)


def test_a_configuration_with_secrets_is_not_copied_and_no_other_file_may_have_one(capsys):
    Path("mine").mkdir()
    given = Path("mine/config.yaml")
    given.write_text(
        f"{TINY.read_text().replace('count: 2', 'count: 2, env: {API_KEY: abc-secret}')}storage: gs://my-bucket/runs\n"
    )
    ignored = (deploy("kuberay", given) / "Dockerfile.dockerignore").read_text().splitlines()
    assert "/mine/config.yaml" in ignored
    shutil.rmtree("deploy")
    Path("mine/gone.py").symlink_to("nowhere")
    Path("mine/other.py").write_text("KEY = 'abc-secret'")
    assert "mine/other.py: it has the value of hosts.env.API_KEY" in refusal(capsys, "kuberay", given)
    Path("mine/other.py").rename("mine/other.env")  # left out, as the page says
    deploy("kuberay", given)
