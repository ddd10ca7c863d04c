"""Every command in the documents is understood by the program that it names: the module, its options, its configuration."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import click
import pytest

import trainers.commands.run
from orchestrator.commands import sweep
from orchestrator.config.job import ConfigError, load
from orchestrator.gangway import COMMANDS as COMMANDS_OF_GANGWAY
from tests import ROOT
from tests.unit.documents import DOCUMENTS, blocks, blocks_of, command_lines, inline_code
from tests.unit.test_code_blocks import FILES, signals_kept

MAKEFILE = (ROOT / "Makefile").read_text()
PLACEHOLDER = re.compile(r"[A-Z_]+|key=value")
"""What a reader replaces: CONFIG, RUN_DIR."""
MADE = {"models/smollm2": ROOT / "tests" / "unit" / "data" / "parity" / "llama3"}
"""Folders of Hugging Face that a command of the documents makes, and one that stands for them here."""
NOT_OURS = {
    *("cd", "mkdir", "source", "git", "kill", "pkill", "export", "pip", "pytest", "lm_eval"),
    *("docker", "kubectl", "gcloud", "sbatch", "scancel", "ssh"),
}
"""Programs of every machine or of a cluster, and one that reads what is exported."""


class Parsed(BaseException):
    """A program has read its command line. What it would do then is not done."""


class Refused(Exception):
    """A program does not know such a command line."""


def check(command: str, tmp_path: Path) -> None:
    """Raises if the program that a command names would refuse it."""
    words = shlex.split(re.sub(r"\s\[([^\]]*)\]", r" \1", command), comments=True)
    words = words[: words.index(">")] if ">" in words else words  # what it prints goes to a file
    check_words([word for word in words if word != "..."], tmp_path)


def check_words(words: list[str], tmp_path: Path) -> None:
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *arguments = words
    if program == "python":
        option, module, *arguments = arguments
        assert option == "-m", words
        check_module(module, arguments, tmp_path)
    elif program == "gangway":
        check_gangway(arguments, tmp_path)
    elif program == "make":
        check_make(arguments)
    elif program == "bash":
        check_deployed(*arguments)
    elif program in ("ray", "mlflow"):
        check_click(program, arguments, tmp_path)
    elif "/" in program:
        assert os.access(ROOT / program, os.X_OK), f"{program} is no program of this repository"
    elif program not in NOT_OURS:
        raise Refused(f"{program}: no test knows this program")


def check_gangway(arguments: list[str], tmp_path: Path) -> None:
    name, *arguments = arguments
    if name not in ("COMMAND", "--version"):
        assert name in COMMANDS_OF_GANGWAY, f"gangway {name}: expected one of {', '.join(COMMANDS_OF_GANGWAY)}"
        check_module(COMMANDS_OF_GANGWAY[name].module.removesuffix(".__main__"), arguments, tmp_path)


def check_deployed(script: str, step: str) -> None:
    """`script` is one that `gangway deploy` writes."""
    assert script == "deploy/tpu-vm/tpu_vm.sh", script
    assert f"\n{step}() {{" in (ROOT / "configs" / "deploy" / "tpu_vm.sh.jinja").read_text(), f"{script} has no step {step}"


def check_make(arguments: list[str]) -> None:
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        known = rf"\$\({name}\)" if is_variable else rf"^{name}:.*##"
        assert re.search(known, MAKEFILE, re.M), f"make {argument}: the Makefile has no {name}"


def check_module(module: str, arguments: list[str], tmp_path: Path) -> None:
    given = parse(module, arguments)
    if (config := getattr(given, "config", None)) is not None:
        overrides = getattr(given, "overrides", [])
        if module == sweep.__name__:
            check_configuration(config, [sweep.choices_of(item)[-1] for item in overrides], tmp_path)
            overrides = [sweep.choices_of(item)[0] for item in overrides]
        check_configuration(config, overrides, tmp_path)


def check_configuration(config: str, overrides: list[str], tmp_path: Path) -> None:
    if (name := Path(config).name) in FILES:
        return  # a file of a document: `test_code_blocks.py` runs it
    config = "configs/tiny.yaml" if PLACEHOLDER.fullmatch(config) else config
    # `gangway` finds the configurations that come with it; `config.yaml` is that of a new project.
    paths = (ROOT / config, ROOT / "configs" / config, ROOT / "examples" / "project" / config)
    path = next((path for path in paths if path.is_file()), None)
    assert path is not None, f"{config}: there is no {name}"
    made = [f"model.pretrained={folder}" for name, folder in MADE.items() if f"pretrained: {name}" in path.read_text()]
    load(path, [*(text for text in overrides if not PLACEHOLDER.fullmatch(text)), *made, f"storage={tmp_path}"])


def parse(module: str, arguments: list[str]) -> argparse.Namespace:
    """What `python -m module` makes of its arguments. It goes no further."""

    def ending(method: Any) -> Any:
        def parse_and_end(self: Any, *given: Any, **named: Any) -> None:
            raise Parsed(method(self, *given, **named))

        return parse_and_end

    with pytest.MonkeyPatch.context() as patch, signals_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module was imported before
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, ending(getattr(argparse.ArgumentParser, name)))
        patch.setattr(sys, "argv", [module, *arguments])
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except Parsed as parsed:
            return parsed.args[0]
        except SystemExit as error:
            raise Refused(f"python -m {module} {' '.join(arguments)}: exit status {error.code}") from error
    raise Refused(f"python -m {module} reads no command line")


def check_click(program: str, arguments: list[str], tmp_path: Path) -> None:
    """Raises click's UsageError for an option that is not there."""
    command = click_program(program)
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"{program}: there is no command {name}"
        command = found
    if not arguments:
        return  # the name of a program
    given = command.make_context(program, list(arguments))
    if entrypoint := given.params.get("entrypoint"):
        check_words(list(entrypoint), tmp_path)


def click_program(program: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # their own affair
        if program == "ray":
            from ray.scripts.scripts import cli
        else:
            from mlflow.cli import cli
    return cli


OF_A_NEW_PROJECT = [block for block in blocks_of(ROOT / "examples" / "project" / "README.md") if block.kind == "commands"]
COMMANDS = [(str(block), command) for block in (*blocks("commands"), *OF_A_NEW_PROJECT) for command in command_lines(block.text)]
INLINE = [
    (path.name, code)
    for path in DOCUMENTS
    for code in inline_code(path)
    if re.match(r"(python -m|gangway|make|ray|mlflow) \w", code)
]
NAMES_ONLY = {code for _, code in INLINE if re.fullmatch(r"(python -m [\w.]+|gangway \w+)", code)}
IN_CONFIGURATIONS = [
    (f"{path.parent.name}/{path.name}", command)
    for path in sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*.yaml")])
    for command in re.findall(r"^#.*?((?:python -m|make) .*)$", path.read_text(), re.M)
]


@pytest.mark.parametrize(
    ("where", "command"), [*COMMANDS, *IN_CONFIGURATIONS, *(row for row in INLINE if row[1] not in NAMES_ONLY)]
)
def test_a_command_is_understood(where, command, tmp_path):
    check(command, tmp_path)


@pytest.mark.parametrize("code", sorted(NAMES_ONLY))
def test_a_program_that_the_text_names_without_its_arguments_is_there(code):
    program, *_, module = code.split()
    if program == "gangway":
        assert module in COMMANDS_OF_GANGWAY
        return
    assert importlib.util.find_spec(f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module)


def test_the_documents_call_each_command_by_its_name():
    """`gangway run`, and not `python -m orchestrator.run`: only the page of commands and the map of the code have both."""
    modules = {command.module.removesuffix(".__main__") for command in COMMANDS_OF_GANGWAY.values()}
    pages = [path for path in DOCUMENTS if path.name not in ("commands.md", "architecture.md")]
    found = {(path.name, module) for path in pages for module in re.findall(r"python -m ([\w.]+)", path.read_text())}
    assert [row for row in sorted(found) if row[1] in modules] == []


@pytest.mark.parametrize(
    "command",
    [
        "python -m orchestrator.runs CONFIG",
        "python -m orchestrator.run CONFIG --dry-runs",
        "python -m orchestrator.run configs/none.yaml",
        "python -m orchestrator.run CONFIG optimizer.learning_rat=1",
        "python -m trainers.run",
        "python -m trainers.export RUN OUT --format torch",
        "gangway runs CONFIG",
        "gangway run CONFIG --dry-runs",
        "gangway sweep CONFIG seed=1,x",
        "gangway run none.yaml",
        "gangway train",
        "make quickstarts",
        "make test WORKER=2",
        "ray stat --head",
        "ray start --heads",
        "ray job submit --working-dir . -- python -m orchestrator.run CONFIG --dry-runs",
        ".ci/runs",
        "uv run train",
    ],
)
def test_a_wrong_command_is_found_out(command, tmp_path):
    with pytest.raises((AssertionError, ValueError, Refused, ImportError, ConfigError, click.UsageError)):
        check(command, tmp_path)


def test_trainers_run_has_no_options(monkeypatch, capsys):
    for arguments in ([], ["CONFIG", "--dry-run"]):
        monkeypatch.setattr(sys, "argv", ["trainers.run", *arguments])
        with pytest.raises(SystemExit, match="2"):
            trainers.commands.run.main()
    assert "python -m trainers.run [-h] CONFIG" in capsys.readouterr().err


@pytest.mark.parametrize("block", blocks("drawing"), ids=str)
def test_a_drawing_names_modules_and_files_that_exist(block):
    for module in re.findall(r"python -m ([\w.]+)", block.text):
        assert importlib.util.find_spec(module), module
    for path in re.findall(r"\b((?:orchestrator|trainers|cluster)/[\w/.]+\.py)", block.text):
        assert (ROOT / path).is_file(), path


def test_an_output_has_the_labels_that_the_console_prints():
    source = "".join(path.read_text() for path in (ROOT / "orchestrator" / "reporting").glob("*.py"))
    for block in blocks("output"):
        for label in re.findall(r"^ *(\w+) {2,}", block.text, re.M):
            assert f'"{label}' in source, f"{block}: {label}"


def test_the_extras_that_the_text_names_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for path in DOCUMENTS for extra in re.findall(r"gangway\[(\w+)\]", path.read_text())}
    assert named <= set(extras)


def test_the_pictures_that_the_text_shows_exist():
    for path in DOCUMENTS:
        for picture in re.findall(r"!\[[^\]]*\]\(([^)\s]+)|<img[^>]* src=\"([^\"]+)\"", path.read_text()):
            (name,) = filter(None, picture)
            assert "://" in name or (path.parent / name).is_file(), f"{path.name}: {name}"
        for name in re.findall(r'srcset="([^"]+)"', path.read_text()):
            assert (path.parent / name).is_file(), f"{path.name}: {name}"


def test_the_text_beside_the_picture_of_the_console_is_about_the_same_run():
    shown = " ".join(re.findall(r"<text [^>]*>([^<]+)<", (ROOT / "docs/images/console.svg").read_text()))
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    for told, seen in (
        (r"kill -9 (\d+)`", "training processes {} (host 0)"),
        (r"host 0 is killed at (step \d+);", "ended by SIGKILL at {}"),
        (r"trains again at (step \d+ after [\d.]+ s)", "training again at {};"),
        (r"took ([\d.]+ s) more", "{} again"),
        (r"a training loss of ([\d.]+\d)", "training {} "),
        (r"a held-out loss of ([\d.]+\d)", "held-out {} "),
    ):
        found = re.search(told, readme)[1]
        assert seen.format(found) in shown, told


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["-h"], 0), ([], 2), (["a.yaml", "b.yaml"], 2), (["a=1"], 2)]
)
def test_trainers_run_says_how_it_is_used(monkeypatch, capsys, arguments, status):
    monkeypatch.setattr(sys, "argv", ["trainers/run.py", *arguments])
    with pytest.raises(SystemExit, match=str(status)):
        trainers.commands.run.main()
    printed = capsys.readouterr()
    assert "python -m trainers.run [-h] CONFIG" in (printed.err if status else printed.out)
