"""The command `gangway`: which module it calls, how, and what it refuses."""

from __future__ import annotations

import ast
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gangway.program import PACKAGES, program
from orchestrator import gangway
from orchestrator.gangway import COMMANDS
from orchestrator.shipped import files
from tests import ROOT

NO_COMMANDS = {
    "trainers.worker",
    "trainers.planning.estimate",
    "trainers.planning.program",
    "trainers.planning.trial",
    "orchestrator.gangway",
    "orchestrator.commands.launched",
}
"""Modules that are programs, and that no person calls through `gangway`."""


@pytest.fixture(autouse=True)
def arguments_kept(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.fixture
def called(monkeypatch):
    """The words with which each command was called. The status of each is 7."""
    calls = []
    for command in COMMANDS.values():
        module = importlib.import_module(command.module)
        monkeypatch.setattr(module, "main", lambda: calls.append(list(sys.argv)) or 7)
    return calls


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_gets_its_words_and_its_status_is_returned(name, called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert gangway.main([name, "CONFIG", "--steps", "3", "a.b=c"]) == 7
    assert called == [[f"gangway {name}", "CONFIG", "--steps", "3", "a.b=c"]]


def test_every_program_is_a_command():
    programs = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(is_guard(node) for node in ast.parse(path.read_text()).body)
    }
    assert programs - NO_COMMANDS == {command.module for command in COMMANDS.values()}


def is_guard(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "none.yaml"], "no such file"),
        (["train", "none.yaml"], "no such file"),
        (["evaluate", "none.yaml", "--checkpoint", "runs/none"], "no such file"),
        (["export", "runs/none", "out"], "runs/none"),
        (["checkpoints", "runs/none"], "there is no runs/none"),
        (["profile", "runs/none"], "there is no runs/none"),
        (["init", "file"], "file is a file"),
    ],
)
def test_the_real_commands_refuse_with_their_own_status(words, says, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert gangway.main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("name", "command"), COMMANDS.items())
def test_the_help_of_a_command_has_the_name_by_which_it_was_called(name, command, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *given: None)  # those of this process stay
    try:
        status = gangway.main([name, "--help"])
    except SystemExit as ended:  # of argparse
        status = ended.code
    assert status == 0
    printed = capsys.readouterr().out
    assert f"gangway {name} " in printed
    assert f"python -m {command.module.removesuffix('.__main__')} " not in printed
    assert re.search(rf"^example:\n  gangway {name} \S.*\n\Z", printed, re.M), "the help ends with an example"


def test_the_module_is_the_name_if_the_command_was_not_called_by_gangway(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/gangway/bin/pytest"])
    assert program("orchestrator.run") == "python -m orchestrator.run"


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["-h"], 0), (["help"], 0)])
def test_it_lists_its_commands(words, status, capsys):
    assert gangway.main(words) == status
    printed = capsys.readouterr()
    text = printed.err if status else printed.out
    assert [*COMMANDS] == re.findall(r"^  (\w+) {2,}\w", text, re.M)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("rnu", "there is no command 'rnu'; did you mean gangway run?"),
        ("checkpoint", "did you mean gangway checkpoints?"),
        ("zzz", "there is no command 'zzz'; expected one of init, run, plan, compile, deploy, train"),
        ("quickstart.yaml", "to train what it describes: gangway run quickstart.yaml"),
    ],
)
def test_an_unknown_command_is_refused_with_the_one_that_was_meant(word, says, capsys, called):
    assert gangway.main([word]) == 2
    assert says in capsys.readouterr().err
    assert called == []


def test_a_version_is_reported(capsys):
    assert gangway.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gangway")


# ---------------------------------------------------------------------- the working folder


def test_the_program_imports_from_the_working_folder_as_python_m_does(monkeypatch, tmp_path, called):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/environment/bin", *sys.path])
    monkeypatch.setattr(sys, "argv", ["/environment/bin/gangway", "run", "CONFIG"])
    monkeypatch.setattr(gangway, "leave", sys.exit)  # this process goes on
    with pytest.raises(SystemExit, match="7"):
        gangway.script()
    assert sys.path[0] == str(tmp_path)
    assert "/environment/bin" not in sys.path


def test_a_working_folder_that_was_deleted_is_reported(monkeypatch, capsys, called):
    def getcwd():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", getcwd)
    monkeypatch.setattr(gangway, "leave", sys.exit)  # this process goes on
    with pytest.raises(SystemExit, match="2"):
        gangway.script()
    assert "the working folder is gone" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trainers.py", "cluster/__init__.py", "orchestrator/__init__.py"])
def test_a_module_that_hides_a_package_of_gangway_is_refused(name, monkeypatch, tmp_path, capsys, called):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as `python -m` and `gangway.script` do
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert gangway.main(["run", "CONFIG"]) == 2
    assert f"{path} hides the package {name.split('/')[0].removesuffix('.py')!r} of gangway" in capsys.readouterr().err
    assert called == []


@pytest.mark.parametrize("module", ["orchestrator.run", "orchestrator.plan", "trainers.run"])
def test_python_m_refuses_it_too(module, tmp_path):
    (tmp_path / "cluster.py").touch()
    line = [sys.executable, "-m", module, "CONFIG"]
    done = subprocess.run(
        line, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path}/cluster.py hides the package 'cluster' of gangway: ")


def test_a_folder_without_code_hides_nothing(monkeypatch, tmp_path, called):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "nodes.yaml").touch()
    assert gangway.main(["run", "CONFIG"]) == 7


def test_in_a_folder_with_the_source_that_source_runs(monkeypatch, tmp_path, called):
    class Replaced(Exception):
        pass

    def execv(*command):
        raise Replaced(command)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.chdir(ROOT)
    assert gangway.main(["run", "CONFIG"]) == 7  # it is this source
    monkeypatch.chdir(tmp_path)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "gangway" / "program.py").touch()
    with pytest.raises(Replaced) as replaced:
        gangway.main(["run", "CONFIG", "a=b"])
    assert replaced.value.args[0] == (sys.executable, [sys.executable, "-m", "orchestrator.gangway", "run", "CONFIG", "a=b"])


# ---------------------------------------------------------------------- what comes with the packages


def test_a_configuration_that_comes_with_gangway_is_found_by_its_name(monkeypatch, tmp_path, called, capsys):
    monkeypatch.chdir(tmp_path)
    gangway.main(["run", "--dry-run", "tiny.yaml", "name=tiny.yaml"])
    assert called[-1][1:] == ["--dry-run", str(ROOT / "configs" / "tiny.yaml"), "name=tiny.yaml"]
    assert "tiny.yaml: the one that comes with gangway" in capsys.readouterr().err
    (tmp_path / "tiny.yaml").touch()
    for word in ("tiny.yaml", "other.yaml", "tiny"):
        gangway.main(["run", word])
        assert called[-1][1:] == [word]
    assert capsys.readouterr().err == ""
    gangway.main(["run", "configs/tiny.yaml"])  # as the documents of the repository write it
    assert called[-1][1:] == ["configs/tiny.yaml"]
    assert capsys.readouterr().err.endswith("; tiny.yaml comes with gangway, and is found by this name alone\n")


def test_an_installation_without_its_files_is_reported(monkeypatch, tmp_path):
    assert files.folder_of("configs") == ROOT / "configs"
    monkeypatch.setattr(files, "__file__", str(tmp_path / "orchestrator" / "shipped" / "files.py"))
    with pytest.raises(FileNotFoundError, match="this installation of gangway has no folder configs: expected"):
        files.folder_of("configs")
    (tmp_path / "orchestrator" / "shipped" / "configs").mkdir(parents=True)
    assert files.folder_of("configs") == tmp_path / "orchestrator" / "shipped" / "configs"
