"""Deployments of configurations, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from orchestrator.deploy.__main__ import main
from tests import ROOT

LARGE = ROOT / "configs" / "large"
OPTIONS = {
    "kuberay": ("--image", "example.org/images/llama:1"),
    "gke-tpu": ("--image", "example.org/images/llama:1"),
    "tpu-vm": ("--project", "my-project", "--zone", "us-east5-b"),
    "slurm": (),
    "ray-cluster": ("--project", "my-project", "--zone", "us-east5-b"),
}
"""What each target must be told."""
TPU, GPU = LARGE / "llama3_70b_v5p.yaml", LARGE / "llama3_8b_h100.yaml"
BUCKET = "storage=gs://my-bucket/runs"
NAMED = ("data/text", "data/prepared", "models/llama3-8b", "models/llama3-70b")
"""What these configurations name in the working folder."""


def deploy(to: str, config: Path, *words: str) -> Path:
    """Returns the folder that the command has made in the working folder, with the data and models that are named."""
    with_data()
    assert main([str(config), "--to", to, *OPTIONS[to], *words]) == 0
    return Path("deploy") / to


def with_data() -> None:
    for name in NAMED:
        Path(name).mkdir(parents=True, exist_ok=True)


def refusal(capsys: Any, to: str, config: Path, *words: str, options: tuple[str, ...] | None = None) -> str:
    """Returns what the command has said, and that it has written nothing."""
    with_data()
    capsys.readouterr()
    assert main([str(config), "--to", to, *(OPTIONS[to] if options is None else options), *words]) == 2
    assert not Path("deploy").exists()
    return capsys.readouterr().err


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """The documents of a manifest, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(path.read_text())}
