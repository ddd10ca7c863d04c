"""The same files, read by every command that reads a configuration: each makes the same of them, or refuses them alike."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from gangway.config.yaml_source import ConfigError
from orchestrator.config.job import load
from orchestrator.gangway import COMMANDS as COMMANDS_OF_GANGWAY
from trainers import settings
from trainers.config.arguments import TrainingArguments

STEPS = "max_num_steps: 5\n"


@dataclasses.dataclass(frozen=True)
class Row:
    """A file, and what must come of it: values by their keys, or lines of the refusal."""

    content: str | bytes
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def refused(content: str | bytes, *lines: str, overrides: tuple[str, ...] = ()) -> Row:
    return Row(content, refused=lines, overrides=overrides)


FILES = {
    "octal": Row("max_num_steps: 010\n", {"max_num_steps": 10}),
    "octal of YAML 1.2": refused("max_num_steps: 0o17\n", 'line 1: max_num_steps: expected an integer (found "0o17")'),
    "hexadecimal": Row(STEPS + "seed: 0x1F\n", {"seed": 31}),
    "sexagesimal": Row(STEPS + "data: {pattern: 1:30}\nseed: 1_000\n", {"data.pattern": "1:30", "seed": 1000}),
    "octal text": Row(STEPS + "name: 010\n", {"name": "010"}),
    "a key twice": refused("seed: 1\n" + STEPS + "seed: 2\n", "line 3: seed: given twice, first in line 1; keep one of them"),
    "a key twice in one line": refused(
        STEPS + "data: {shuffle: true, pattern: a, shuffle: false}\n",
        "line 2: data.shuffle: given twice, first in line 2; keep one of them",
    ),
    "a section twice": refused(
        STEPS + "hosts: {count: 1}\nhosts: {count: 2}\n", "line 3: hosts: given twice, first in line 2; keep one of them"
    ),
    "one key as a number and as text": refused(
        STEPS + 'data: {columns: {1: a, "1": b}}\n', "line 2: data.columns.1: given twice, first in line 2; keep one of them"
    ),
    "no as text": Row(STEPS + "name: no\ndata: {pattern: yes}\n", {"name": "no", "data.pattern": "yes"}),
    "no as a switch": Row(STEPS + "data: {shuffle: no}\n", {"data.shuffle": False}),
    "a switch as a number": refused(STEPS + "seed: yes\n", 'line 2: seed: expected an integer (found "yes")'),
    "true as a number": refused(STEPS + "seed: true\n", 'line 2: seed: expected an integer (found "true")'),
    "an unknown key": refused(STEPS + "sede: 1\n", "line 2: sede: unknown key (found 1); did you mean seed?"),
    "an unknown key of machines": refused(
        STEPS + "hosts: {cuont: 2}\n", "line 2: hosts.cuont: unknown key (found 2); did you mean hosts.count?"
    ),
    "an unknown key deep in machines": refused(
        STEPS + "driver:\n  restart: {max_failurs: 3}\ntracking: {mlfow: true}\n",
        "line 3: driver.restart.max_failurs: unknown key (found 3); did you mean driver.restart.max_failures?",
        "line 4: tracking.mlfow: unknown key (found true); did you mean tracking.mlflow?",
    ),
    "wrong types of machines": refused(
        STEPS + "hosts: {count: many, kind: gpus}\ndriver: {console_hosts: some, watchdog: 3}\ntracking: [1]\n",
        'line 2: hosts.count: expected an integer (found "many")',
        'line 2: hosts.kind: expected one of cpu, gpu, tpu (found "gpus"); did you mean gpu?',
        'line 3: driver.console_hosts: expected all or a list, such as [a, b] (found "some")',
        "line 3: driver.watchdog: expected a section with keys among import_s, ",
        "line 4: tracking: expected a section with keys among mlflow, uri, experiment, report, register_model (found [1])",
    ),
    "an unknown key in a list and in a named section": refused(
        STEPS + "optimizer: {groups: [{pattern: a, forzen: true}]}\nevaluation: {units: {far: {max_batchs: 1}}}\n",
        "line 2: optimizer.groups[0].forzen: unknown key (found true); did you mean optimizer.groups[0].frozen?",
        "line 3: evaluation.units.far.max_batchs: unknown key (found 1); did you mean evaluation.units.far.max_batches?",
    ),
    "everything wrong at once": refused(
        "sede: 1\nmax_num_steps: many\noptimizer: {eps: -1, lr: 2}\nmesh: 3\n",
        "line 1: sede: unknown key (found 1); did you mean seed?",
        'line 2: max_num_steps: expected an integer (found "many")',
        "line 3: optimizer.lr: unknown key (found 2); did you mean optimizer.learning_rate?",
        "line 3: optimizer.eps = -1.0: expected at least 0",
        "line 4: mesh: expected a section with keys among slice, pipeline, data, fsdp, expert, context, tensor (found 3)",
    ),
    "tabs": refused("data:\n\tshuffle: true\n", "line 2, column 1: not YAML: found character '\\t' that cannot start any token"),
    "anchors and merges": Row(
        STEPS + "data: &base {pattern: a, shuffle: true}\nevaluation: {units: {far: &far {max_batches: 2}, near: {<<: *far}}}\n",
        {"data.pattern": "a", "evaluation.units.near.max_batches": 2},
    ),
    "a merged key that is given anew": Row(
        "optimizer: &o {name: lion, eps: 1}\n"
        + STEPS
        + "data:\n  columns:\n    <<: [{a: '1', b: '1'}, {b: '2', c: 010}]\n    a: x\n",
        {"data.columns": {"a": "x", "b": "1", "c": "010"}},
    ),
    "a merge of what is no section": refused(
        STEPS + "data: {<<: [a]}\n", "line 2: data.<<: expected a section to merge, or a list of sections (found 'a')"
    ),
    "an alias of itself": refused("data: &x [*x]\n", "line 1: data[0] is an alias of what it lies in"),
    "aliases without end": refused(
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)),
        "the aliases of this file stand for more than 100,000 values",
    ),
    "dates": Row(STEPS + "name: 2026-11-25\ndata: {template_date: 2026-11-25}\n", {"name": "2026-11-25"}),
    "a date as a number": refused(STEPS + "seed: 2026-11-25\n", 'line 2: seed: expected an integer (found "2026-11-25")'),
    "floats": Row(
        "max_num_steps: 1e3\noptimizer: {learning_rate: 1e-3, betas: [.9, 9_5e-2]}\n",
        {"max_num_steps": 1000, "optimizer.learning_rate": 0.001, "optimizer.betas": (0.9, 0.95)},
    ),
    "a float as text": Row(STEPS + "name: 1e-3\n", {"name": "1e-3"}),
    "a half step": refused("max_num_steps: 2.5\n", "line 1: max_num_steps: expected an integer (found 2.5)"),
    "infinite": refused(
        STEPS + "optimizer: {learning_rate: .inf}\nhosts: {wait_for_max_s: .nan, cpus_per_host: -.inf}\nseed: .inf\n",
        "line 2: optimizer.learning_rate: expected a finite number (found Infinity)",
        "line 3: hosts.wait_for_max_s: expected a finite number (found NaN)",
        "line 3: hosts.cpus_per_host: expected a finite number (found -Infinity)",
        "line 4: seed: expected a finite number (found Infinity)",
    ),
    "a number of thousands of digits": refused(
        f"max_num_steps: {'1' * 5000}\n", "line 1: max_num_steps: is no int that can be read"
    ),
    "a number that is no float": refused(
        STEPS + f"optimizer: {{eps: {'1' * 400}}}\n", "line 2: optimizer.eps: expected a finite number (found 111"
    ),
    "empty": refused("", "nothing ends this run: set max_num_steps, max_num_data_epochs or time_limit"),
    "comments alone": refused("# nothing\n---\n", "nothing ends this run: set max_num_steps, max_num_data_epochs or time_limit"),
    "a list at the top": refused("- a\n- b\n", "expected keys and values, such as `seed: 1` (found list)"),
    "a text at the top": refused("seed\n", "expected keys and values, such as `seed: 1` (found str)"),
    "not UTF-8": refused(b"max_num_steps: 5\nname: \xe9t\xe9\n", "is not text in UTF-8 (byte 23)"),
    "UTF-16": refused("max_num_steps: 5\n".encode("utf-16"), "is not text in UTF-8 (byte 0)"),
    "a byte order mark": Row(b"\xef\xbb\xbfmax_num_steps: 7\nseed: 1\n", {"max_num_steps": 7, "seed": 1}),
    "ends of lines of Windows": Row(b"max_num_steps: 7\r\ndata:\r\n  pattern: a\r\n", {"max_num_steps": 7, "data.pattern": "a"}),
    "a byte of zero": refused(b"max_num_steps: 7\0\n", "not YAML: unacceptable character #x0000"),
    "a key of nothing": refused(STEPS + "?\n: 1\n", "line 2: a key is empty: expected text"),
    "a key NULL": refused(STEPS + "data: {NULL: 1}\n", "line 2: data: a key is NULL: expected text"),
    "a key that is a list": refused(STEPS + "? [a, b]\n: 1\n", "line 2: a key is a list or a section: expected text"),
    "keys that are numbers": Row(
        STEPS + "data: {columns: {007: a, 0x1: b, true: c}}\n", {"data.columns": {"007": "a", "0x1": "b", "true": "c"}}
    ),
    "an unknown key that is a number": refused(STEPS + "5: 1\n", "line 2: 5: unknown key (found 1); known keys: name, storage"),
    "values of nothing": Row(STEPS + "data:\nseed: 3\nmesh: ~\nhosts: NULL\ntime_limit: null\n", {"seed": 3, "time_limit": None}),
    "a number of nothing": refused(STEPS + "seed:\n", "line 2: seed: expected an integer (found nothing)"),
    "two documents": refused(STEPS + "---\nseed: 2\n", "line 2, column 1: not YAML: but found another document"),
    "a tag of Python": refused(
        STEPS + "name: !!python/object/apply:os.getcwd []\n",
        "line 2, column 7: not YAML: could not determine a constructor for the tag",
    ),
    "tags of other types": refused(
        STEPS + "name: !!binary aGk=\n",
        "could not determine a constructor for the tag 'tag:yaml.org,2002:binary': expected plain values; leave the tag out",
    ),
    "a set": refused(
        STEPS + "recorders: !!set {a, b}\n", "could not determine a constructor for the tag 'tag:yaml.org,2002:set'"
    ),
    "tags of plain types": Row(STEPS + 'seed: !!int "3"\nname: !!str 5\n', {"seed": 3, "name": "5"}),
    "a tag that does not fit": refused(STEPS + "seed: !!int x\n", "line 2: seed: is no int that can be read (found 'x')"),
    "a tag of another kind": refused(
        STEPS + "recorders: !!seq x\n", "could not determine a constructor for the tag 'tag:yaml.org,2002:seq'"
    ),
    "too deep": refused(f"seed: {'[' * 500}\n", "its sections and lists lie too deep in each other to be read"),
    "JSON": Row(
        '{"max_num_steps": 5, "optimizer": {"learning_rate": 1e-05, "betas": [0.5, 0.9]}}', {"optimizer.learning_rate": 1e-5}
    ),
    "a masked secret": refused(
        STEPS + "data: {paths: ['s3://***@bucket/a']}\n",
        "line 2: data.paths[0]: masked, for it had a secret; give data.paths=[VALUE, ...]",
    ),
    "a secret": refused(STEPS + "dtype: s3://me:secret@bucket\n", '(found "s3://***@bucket")'),
    "a class that is not there": refused(STEPS + "arguments: nowhere:Thing\n", "line 2: arguments: 'nowhere:Thing': no module"),
    "a class of another kind": refused(
        STEPS + "arguments: trainers.config:DataConfig\n", "expected a dataclass that extends TrainingArguments"
    ),
    "a home folder": Row(STEPS + "storage: ~/runs\n", {"storage": str(Path("~/runs").expanduser())}),
    "overrides": Row(
        STEPS + "seed: 1\ndata: {pattern: a}\n",
        {"seed": 10, "name": "no", "data.pattern": "[a", "data.columns": {"a": "010", "b": "1.10"}},
        overrides=("seed=010", "name=no", "data.pattern=[a", "data.columns={a: 010, b: 1.10}"),
    ),
    "wrong overrides": refused(
        STEPS,
        "override 'data={shuffle: true, shuffle: false}': shuffle: given twice, first in line 1; keep one of them",
        "override 'max_num_steps.x=1': max_num_steps is not a section: it has no keys",
        "override: hosts.cuont: unknown key (found 2); did you mean hosts.count?",
        'override: seed: expected an integer (found "!!int x")',
        overrides=("data={shuffle: true, shuffle: false}", "max_num_steps.x=1", "hosts.cuont=2", "seed=!!int x"),
    ),
}

PATHS = {name: Path(f"file{number}.yaml") for number, name in enumerate(FILES)}
OPTIONS = {
    "orchestrator.deploy.__main__": ("--to", "slurm"),
    "trainers.evaluate": ("--checkpoint", "nowhere"),
    "trainers.reference": ("--output", "new.jsonl"),
    "orchestrator.runs.compare": ("other",),
}
"""What a command needs beside the configuration."""
NO_OVERRIDES = {"orchestrator.runs.compare", "orchestrator.runs.history", "orchestrator.report.__main__"}
READ_NONE = {
    "trainers.export",
    "trainers.generate",
    "orchestrator.commands.init",
    "orchestrator.commands.completion",
    "orchestrator.tracking.__main__",
}
COMMANDS = sorted({command.module for command in COMMANDS_OF_GANGWAY.values()} - READ_NONE)


class Made(BaseException):
    """A command has read its configuration. What it would do then is not done."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Has the files."""
    folder = tmp_path_factory.mktemp("files")
    for name, path in PATHS.items():
        content = FILES[name].content
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, TrainingArguments | str]:
    """What comes of each file, by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {name: what_comes(path, FILES[name].overrides) for name, path in PATHS.items()}


def what_comes(path: Path, overrides: tuple[str, ...]) -> TrainingArguments | str:
    """The arguments in a file, or the words in which it is refused."""
    try:
        return settings.read(path, overrides)
    except ConfigError as error:
        return str(error)


def value_at(made: Any, key: str) -> Any:
    for part in key.split("."):
        made = made[part] if isinstance(made, dict) else getattr(made, part)
    return made


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_says(expected, name):
    row, found = FILES[name], expected[name]
    if row.refused:
        assert isinstance(found, str), found
        head, *lines = found.splitlines()
        assert head == f"{PATHS[name]}: {len(row.refused)} problem{'s' if len(row.refused) > 1 else ''}"
        assert [line for line, part in zip(lines, row.refused, strict=True) if part not in line] == []
    else:
        assert isinstance(found, TrainingArguments), found
        assert {key: value_at(found, key) for key in row.values} == row.values


SHARES = 4
"""A command with a reader of its own differs at most files. So each reads a share of them, and each file has several readers."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_makes_the_same_of_a_file(expected, monkeypatch, capsys, command):
    main, build = importlib.import_module(command).main, settings.build

    def ending(*given: Any) -> None:
        raise Made(build(*given).training)

    monkeypatch.setattr(settings, "build", ending)
    for name, path in [*PATHS.items()][COMMANDS.index(command) % SHARES :: SHARES]:
        if command in NO_OVERRIDES and FILES[name].overrides:
            continue
        words = [str(path), *FILES[name].overrides, *OPTIONS.get(command, ())]
        monkeypatch.setattr(sys, "argv", [command, *words])
        try:
            status, made = main(), None
        except Made as read:
            status, made = 0, read.args[0]
        printed = capsys.readouterr().err
        if isinstance(expected[name], str):
            assert (made, status in (1, 2)) == (None, True), name
            assert f"error: {expected[name]}\n" in printed, name
        else:
            assert made == expected[name], name


def test_a_job_is_made_of_what_is_read_without_machines(expected):
    """With the classes of the sections that concern machines, too: they refuse no more of these files."""
    for name, path in PATHS.items():
        try:
            made: Any = load(path, FILES[name].overrides).training
        except ConfigError as error:
            made = str(error)
        assert made == expected[name], name


def test_only_machines_say_whether_their_numbers_fit_together():
    path = Path("job.yaml")
    path.write_text(STEPS + "hosts: {count: 0}\n")
    assert settings.read(path).max_num_steps == 5
    with pytest.raises(ConfigError, match=r"line 2: hosts\.count = 0: expected a whole number of at least 1"):
        load(path)


def test_secrets_of_sections_that_are_not_used_are_not_asked_for():
    path = Path("config.yaml")
    path.write_text(STEPS + "hosts: {env: {KEY: '***'}}\ntracking: {uri: 'http://***@host'}\n")
    assert settings.read(path).name == "config"
    with pytest.raises(ConfigError, match=r"line 2: hosts\.env\.KEY: masked(.|\n)*line 3: tracking\.uri: masked"):
        load(path)
