"""The lock file and what must stay true of it."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gangway.user_modules import load_object
from orchestrator import gangway
from tests import PACKAGES, ROOT
from tests.imports import sources


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)", line) for line in lines]
    assert all(pins), "exact versions only: no index, address, option or path"
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


@pytest.fixture(scope="module")
def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]


def test_the_lock_fulfils_the_project(locked, wanted):
    unmet = [str(need) for need in wanted if not need.specifier.contains(locked.get(canonicalize_name(need.name), "0"))]
    assert unmet == [], "run `make lock`"


def test_every_locked_version_is_plain(locked):
    assert [f"{name}=={version}" for name, version in locked.items() if "+" in version] == [], (
        "a local build cannot be installed elsewhere"
    )


def test_the_program_that_is_installed_is_there():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {name: load_object(path) for name, path in scripts.items()} == {"gangway": gangway.script}


def test_pip_is_reported_of_no_index_anywhere():
    files = ["Makefile", "pyproject.toml", "requirements.lock", ".ci/run", ".pre-commit-config.yaml"]
    found = [name for name in files if re.search(r"index-url|find-links|trusted-host|https?://", (ROOT / name).read_text())]
    assert found == []


CALLED = {
    "orbax-checkpoint": "orbax",
    "pillow": "PIL",
    "PyYAML": "yaml",
    "py-spy": "py-spy",
    "vl-convert-python": "vl_convert",
    "Jinja2": "jinja2",
}
"""How a dependency is named where it is used, if not by its own name."""


def test_each_dependency_is_used_and_leaves_room_for_other_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [Requirement(text) for text in project["dependencies"]]
    text = "\n".join(path.read_text() for package in PACKAGES for path in sources(package))
    assert [need.name for need in needs if CALLED.get(need.name, need.name) not in text] == []
    assert [str(need) for need in needs if any(limit.operator == "==" for limit in need.specifier)] == []
