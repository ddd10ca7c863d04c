"""Random names and texts in a configuration and in options: what each target writes reads back equal by its own parser, nothing
of it runs as a command, no file has a secret; or it is refused, and nothing is written."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import subprocess
import tarfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from gangway.config import yaml_source
from orchestrator.config.job import ConfigError, JobConfig, load
from orchestrator.deploy import refusals
from orchestrator.deploy.__main__ import main
from orchestrator.deploy.files import resource_name
from tests import fuzz
from tests.unit.orchestrator.deploy.of_configs import documents
from tests.unit.orchestrator.deploy.test_scripts import GCLOUD, NOTED, Slurm, programs

HARD = [
    *("\n", "\n\n\n", "  \n", "\t", "\r", " ", "  ", ": ", " #", "- ", "'", '"', "\\", "\\n", "$", "`", ";", "|", ">", "<", "&"),
    *("$(touch PWNED)", "`touch PWNED`", "'; touch PWNED; '", "\ntouch PWNED\n", "{{ name }}", "{% raw %}", "{# a #}", "EOF"),
    *(
        "é",
        "日本",
        "😀",
        "\u2028",
        "\x85",
        "\x7f",
        "\x1b[1m",
        "!tag",
        "[x]",
        "{x}",
        "~",
        "--",
        "=",
        ",",
        "?",
        "!",
        "%",
        "---\n",
        "*",
    ),
]
WHOLE = [
    *(
        "no",
        "1e5",
        "0o17",
        "0x1F",
        "null",
        "1_000",
        "12:30:45",
        ".5",
        "2020-01-01",
        "=",
        "<<",
        "",
        "on",
        "1.",
        "+1",
        ".inf",
        "...",
    ),
    *("~", "true", "---", "- a", "a: b", "# a", "|", "1e-7"),
]
"""Texts that a reader of YAML may take for something else."""
WORDS = ["a", "B", "model", "x1", "_", "run", "7"]
VARIABLES = [
    "A_KEY",
    "TOKEN",
    "lower",
    "_A",
    "_",
    "status",
    "CONFIG",
    "UID",
    "A-B",
    "A.B",
    "A B",
    "X$(touch PWNED)",
    "1ST",
    "É",
    "A;touch PWNED",
]
PLAIN = ["a", "b-c", "d.e", "f_1"]
TARGETS = {
    "kuberay": {"kind": "cpu", "count": 2},
    "gke-tpu": {"kind": "tpu", "accelerator": "v6e", "topology": "4x4"},
    "tpu-vm": {"kind": "tpu", "accelerator": "v6e", "topology": "4x4"},
    "slurm": {"kind": "cpu", "count": 2},
    "ray-cluster": {"kind": "gpu", "count": 2, "devices_per_host": 8},
}
COPIES = f"""{GCLOUD}
for word in "$@"; do [[ $word != */app.tgz ]] || cp "$word" "$CALLS.tgz"; done
"""
IN_SUITE = 6


def text(draw: random.Random, most: int = 5) -> str:
    if draw.random() < 0.2:
        return draw.choice(WHOLE)
    return "".join(draw.choice(HARD if draw.random() < 0.6 else WORDS) for _ in range(draw.randint(1, most)))


def name_of_file(draw: random.Random) -> str:
    """As this system can have it: mostly a plain one."""
    hard = text(draw, 3).replace("/", "").strip(".").encode()[:60].decode(errors="ignore")
    return (hard if draw.random() < 0.3 else "") or draw.choice(PLAIN)


def drawn(draw: random.Random, here: Path) -> tuple[Path, str, dict[str, str], dict[str, str]]:
    """Returns a configuration in the folder `here`, a target, its options, and the secrets that no file may have."""
    to = draw.choice([*TARGETS])
    names = VARIABLES if draw.random() < 0.3 else VARIABLES[:4]
    secrets = {draw.choice(names): f"{draw.getrandbits(64):016x}{text(draw, 2)}" for _ in range(draw.randint(0, 2))}
    source = here / "texts" / name_of_file(draw)
    source.mkdir(parents=True)
    (source / "a.txt").write_text("text " * 500)
    data: dict[str, Any] = {
        "global_batch_size": 64,
        "max_num_steps": 60,
        "storage": "gs://my-bucket/runs",
        "hosts": {**TARGETS[to], "env": secrets | {"XLA_FLAGS": text(draw)}},
        "data": {
            "paths": [draw.choice([str(source), str(source.relative_to(here))])],
            "sequence_length": 64,
            "template_fields": {"on": text(draw), "y": draw.choice(WHOLE)},
        },
        "previews": {"prompts": [text(draw, 8) for _ in range(draw.randint(1, 3))]},
        "notify": {"command": ["echo", text(draw), text(draw)]},
        "tracking": {"experiment": f"a{text(draw)}"},
    }
    if to == "slurm" and draw.random() < 0.5:
        data["storage"] = str(here / "shared" / name_of_file(draw))
    if draw.random() < 0.7:
        data["name"] = (
            draw.choice(["no", "1e5", "on", "a_b", "A.B"])
            if draw.random() < 0.3
            else "r" + "".join(draw.choice("aB1._-") for _ in range(draw.randint(1, 50)))
        )
    config = here / f"{name_of_file(draw)}.yaml"
    config.write_text(yaml_source.to_text(data))
    out = draw.choice([f"deploy/{to}", name_of_file(draw), f"out/{name_of_file(draw)}"])
    options = {"out": out}
    if to in ("kuberay", "gke-tpu"):
        options["image"] = draw.choice(["example.org/images/llama:1", "example.org/images/llama:1", f"e.org/{text(draw, 2)}:1"])
    elif to != "slurm":
        options |= {"project": draw.choice(["my-project", "p", text(draw, 2)])}
        options |= {"zone": draw.choice(["us-east5-b", "us-east5-b", text(draw, 2)])}
    if to == "ray-cluster":
        options["machine"] = "a3-highgpu-8g"
    return config, to, options, secrets


def comparable(config: JobConfig) -> JobConfig:
    """What of a configuration its deployment is to have."""
    env = {name: value for name, value in config.hosts.env.items() if name == "XLA_FLAGS"}
    hosts = dataclasses.replace(config.hosts, env=env, spread=False, start_timeout_s=60.0)
    data = dataclasses.replace(
        config.training.data, paths=tuple(str(Path(path).resolve()) for path in config.training.data.paths)
    )
    return dataclasses.replace(config, hosts=hosts, training=dataclasses.replace(config.training, data=data))


def copied(here: Path, patterns: list[str]) -> set[str]:
    """The files of a folder but those of such patterns, as of rsync: at the top with `/`, else anywhere."""
    found = {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()}
    tops = [pattern[1:] for pattern in patterns if pattern.startswith("/")]
    others = [pattern for pattern in patterns if not pattern.startswith("/")]
    return {
        name
        for name in found
        if not any(name == top or name.startswith(f"{top}/") for top in tops)
        and not any(fnmatchcase(part, pattern) for part in name.split("/") for pattern in others)
    }


def check(to: str, given: JobConfig, out: Path, here: Path, secrets: dict[str, str]) -> None:
    """Raises AssertionError."""
    assert comparable(load(out / "config.yaml")) == comparable(given)
    resource = resource_name(given.training.name)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", resource)
    if to in ("kuberay", "gke-tpu"):
        for name in ("rayjob.yaml", "raycluster.yaml"):
            found = documents(out / name)
            assert found["ConfigMap"]["data"] == {"config.yaml": (out / "config.yaml").read_text()}
            assert {found[kind]["metadata"]["name"] for kind in found} == {resource, f"{resource}-config"}
        lines = (out / "Dockerfile.dockerignore").read_text().splitlines()
        there = copied(here, [line.removeprefix("**/") for line in lines if line and not line.startswith("#")])
        assert f"COPY {out.relative_to(here)}/wheels/ /tmp/wheels/" in (out / "Dockerfile").read_text().splitlines()
    elif to == "slurm":
        slurm = Slurm(here)
        exported = dict.fromkeys(refusals.secret_variables(given), "set")
        assert slurm.run(out / "run.sh", **exported) == (0, "")
        assert f"gangway run {out / 'config.yaml'}\nat " in slurm.calls.read_text()
        there = set()
    elif to == "tpu-vm":
        programs(here / "fake", gcloud=COPIES, ray=NOTED)
        env = {"PATH": f"{here}/fake:/usr/bin:/bin", "HOME": str(here), "CALLS": str(here / "calls"), "POLL_S": "0"}
        for step in ("create", "setup", "start", "submit"):
            subprocess.run(["bash", out / "tpu_vm.sh", step], check=True, env=env, cwd=here, capture_output=True)
        assert f"gangway run {out.relative_to(here)}/config.yaml" in (here / "calls").read_text()
        with tarfile.open(here / "calls.tgz") as archive:
            there = {name.removeprefix("./") for name in archive.getnames()}
    else:
        found = yaml.safe_load((out / "cluster.yaml").read_text())
        assert (found["cluster_name"], found["provider"]["availability_zone"]) == (resource, "us-east5-b")
        commands = [*found["setup_commands"], *found["head_start_ray_commands"], *found["worker_start_ray_commands"]]
        subprocess.run(["bash", "-n", "-c", "\n".join(commands)], check=True)
        there = copied(here, found["rsync_exclude"])
    if to != "slurm":
        assert any(name.endswith("/a.txt") for name in there)
    texts = [path.read_text() for path in (*(here / name for name in there), *out.iterdir()) if path.is_file()]
    assert not [value for value in secrets.values() for text in texts if value in text]
    assert not [*here.rglob("PWNED")]


def try_one(draw: random.Random, here: Path, capsys: Any) -> str:
    """Returns the target, or `refused`."""
    config, to, options, secrets = drawn(draw, here)
    before = {*here.rglob("*")}
    if status := main([str(config), "--to", to, *(f"--{name}={value}" for name, value in options.items())]):
        assert status == 2
        assert {*here.rglob("*")} == before
        said = capsys.readouterr().err
        assert said.startswith("error: "), said
        assert not any(value in said for value in secrets.values())
        return "refused"
    check(to, load(config), here / options["out"], here, secrets)
    return to


def test_each_of_many_random_deployments_reads_back_equal_or_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(refusals, "OF_ONE_MACHINE", ())
    ended: Counter[str] = Counter()
    for number in itertools.count():
        # On, until two were not refused: of a few that are drawn, all may be.
        if number >= fuzz.count(IN_SUITE) and ended.total() - ended["refused"] > 1:
            return
        draw = random.Random(f"{fuzz.seed(1)}-{number}")
        here = tmp_path / f"{number}{name_of_file(draw)}"
        here.mkdir()
        monkeypatch.chdir(here)
        try:
            ended[try_one(draw, here, capsys)] += 1
        except (AssertionError, ConfigError, OSError, subprocess.SubprocessError, yaml.YAMLError) as error:
            raise AssertionError(f"case {number} of seed {fuzz.seed(1)}, in {here}: {error}") from error
