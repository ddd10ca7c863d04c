"""`gangway init`: what it writes, what it refuses, and that what it writes works."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from pathlib import Path

import pytest

from orchestrator.commands import init
from orchestrator.config.job import load
from orchestrator.shipped import files
from tests import ROOT
from tests.unit.test_code_blocks import signals_kept

TEMPLATE = ROOT / "examples" / "project"
NAMES = ["README.md", "config.yaml", "data.py", "model.py", "test_project.py"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A new project, whose modules can be imported."""
    assert init.main(["mine"]) == 0
    monkeypatch.chdir("mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    yield tmp_path / "mine"
    for name in ("model", "data", "test_project"):
        sys.modules.pop(name, None)


def test_it_writes_the_files_of_the_template_and_says_what_to_do_next(capsys):
    assert init.main(["a folder/mine"]) == 0
    assert {path.name: path.read_bytes() for path in Path("a folder/mine").iterdir()} == {
        name: (TEMPLATE / name).read_bytes() for name in NAMES
    }
    printed = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in printed[1 : len(NAMES) + 1]] == NAMES
    assert "  cd 'a folder/mine'" in printed
    assert any("gangway run config.yaml" in line for line in printed)


def test_it_writes_into_an_empty_folder_and_into_the_working_folder(capsys, monkeypatch):
    Path("empty").mkdir()
    assert init.main(["empty"]) == 0
    Path("other").mkdir()
    monkeypatch.chdir("other")
    assert init.main(["."]) == 0
    assert sorted(os.listdir()) == NAMES
    assert "  cd ." not in capsys.readouterr().out


def test_it_refuses_a_folder_that_is_not_empty_and_a_file(capsys):
    Path("full").mkdir()
    for name in "abcde":
        Path("full", name).touch()
    assert init.main(["full"]) == 2
    assert "full is not empty, it has a, b, c and 2 more: give a new or empty folder" in capsys.readouterr().err
    assert sorted(os.listdir("full")) == [*"abcde"]
    assert init.main(["full/a"]) == 2
    assert "full/a is a file" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--examples"]])
def test_a_disk_that_is_full_leaves_nothing(options, monkeypatch, capsys):
    opened = Path.open
    calls = []

    def full(path, mode="r", **named):
        calls.append(path)
        if mode == "xb" and len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path, mode, **named)

    monkeypatch.setattr(Path, "open", full)
    Path("mine").mkdir()
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"")  # by `open` too
    assert init.main(["mine", *options]) == 2
    assert len(calls) == 4
    assert "cannot be written: No space left on device; nothing was left in mine" in capsys.readouterr().err
    assert list(Path("mine").iterdir()) == []


def test_of_two_at_once_one_is_refused_and_deletes_nothing_of_the_other(monkeypatch, capsys, tmp_path):
    (tmp_path / "mine").mkdir()

    def empty_and_then_written(folder):
        (tmp_path / "mine" / "config.yaml").write_text("of the other")
        return []

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", empty_and_then_written)
        assert init.main(["mine"]) == 2
    assert "config.yaml cannot be written: File exists" in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["of the other"]


def test_the_examples_and_configurations_are_written_where_their_names_are_found(monkeypatch, capsys):
    assert init.main(["all", "--examples"]) == 0
    assert not Path("all/examples/project").exists()
    monkeypatch.chdir("all")
    for path in [*Path("configs").glob("*.yaml"), *Path("examples").glob("*.yaml")]:
        assert load(path).training.name == path.stem
    assert {"tiny.yaml", "digits.yaml"} <= {path.name for path in Path().rglob("*.yaml")}


def test_caches_of_python_are_no_files_of_a_project(monkeypatch, tmp_path):
    (tmp_path / "examples" / "project" / "__pycache__").mkdir(parents=True)
    (tmp_path / "examples" / "project" / "__pycache__" / "model.cpython-311.pyc").touch()
    (tmp_path / "examples" / "project" / "model.py").touch()
    monkeypatch.setattr(files, "__file__", str(tmp_path / "files.py"))
    assert [*init.project()] == ["model.py"]


# ---------------------------------------------------------------------- the project that it writes


def test_the_configuration_of_the_project_is_in_order(project):
    config = load("config.yaml")
    assert (config.training.name, config.hosts.count) == ("spirals", 2)
    assert config.run_dir == str(project / "runs" / "spirals")


@pytest.mark.slow("runs the tests of a new project")
def test_the_tests_of_the_project_pass(project, tmp_path):
    tests = importlib.import_module("test_project")
    assert tests.__file__ == str(project / "test_project.py")
    with signals_kept():
        tests.test_the_data_is_the_same_each_time_and_other_data_for_another_seed()
        tests.test_the_model_learns(tmp_path / "trained")
    assert len([name for name in vars(tests) if name.startswith("test_")]) == 2
