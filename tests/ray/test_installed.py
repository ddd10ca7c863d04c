"""gangway as users install it: `pip install`, then the command `gangway` in a folder that has nothing of the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from tests import ROOT
from tests.programs.processes import PATIENCE_S

WINGS = ("orchestrator/commands/init.py", "orchestrator/gangway.py", "trainers/library.py")

pytestmark = pytest.mark.slow("installs the project")

SOURCES = (
    "gangway",
    "trainers",
    "cluster",
    "orchestrator",
    "configs",
    "examples",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
NEEDED_TO_BUILD = Version("77")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Returns the folder of programs of a new environment in which the project is installed. It sees this one's packages."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"  # a copy: pip writes into the tree that it builds
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        (shutil.copytree if path.is_dir() else shutil.copy)(path, source / name, **({"ignore": ignored} if path.is_dir() else {}))
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    packages = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    Path(packages, "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    # Without a network, if this environment is that of the lock file.
    is_new = Version(metadata.version("setuptools")) >= NEEDED_TO_BUILD
    options = ["--no-deps", "--quiet", *(["--no-build-isolation"] if is_new else [])]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, source], check=True)
    shutil.rmtree(source)
    return python.parent


@pytest.fixture
def gangway(installed, tmp_path):
    """Calls the command in a folder. The environment names no path of the repository."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS", "PYTHONSAFEPATH")}

    def call(*words, folder=tmp_path, status=0):
        command = [installed / "gangway", *words]
        done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def test_a_new_project_trains_on_two_hosts(gangway, tmp_path):
    assert gangway("--version") == f"gangway {version_of_the_project()}\n"
    assert "test_project.py" in gangway("init", "mine")
    mine = tmp_path / "mine"
    printed = gangway("run", "config.yaml", "max_num_steps=100", "tracking.mlflow=false", folder=mine)
    assert "2 hosts" in printed
    summary = json.loads((mine / "runs" / "spirals" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["lineage"][0]["num_hosts"]) == ("finished", 100, 2)
    assert len(list((mine / "runs" / "spirals" / "logs").iterdir())) == 2


def version_of_the_project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_what_comes_with_the_packages_is_found_from_any_folder(installed, gangway, tmp_path):
    printed = gangway("run", "tiny.yaml", "--dry-run", f"storage={tmp_path}")
    assert f"tiny.yaml: the one that comes with gangway, {installed.parent}" in printed
    assert "name: tiny" in printed
    gangway("init", "all", "--examples")
    for name in ("configs", "examples"):
        assert files_in(tmp_path / "all" / name) == files_in(ROOT / name)


def files_in(folder):
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts and path.parts[0] != "project"}
