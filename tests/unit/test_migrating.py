"""The tables of docs/migrating.md: every name of ours is there, and so is the test of every fault."""

from __future__ import annotations

import ast
import dataclasses
import pkgutil
import re
import typing

import pytest

from gangway.errors import UsageError
from orchestrator.config.job import JobConfig
from tests import ROOT
from trainers.callbacks import Callback, CallbackList
from trainers.config import CheckpointConfig, LossConfig, MeshConfig, OptimizerConfig, ScheduleConfig
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments
from trainers.data.collate import CollateInfo
from trainers.loop.triggers import Epochs
from trainers.optim.schedules import build_schedule
from trainers.parallel.groups import MeshGroup

TEXT = (ROOT / "docs" / "migrating.md").read_text()
SYSTEMS = ("EasyDeL", "fairseq2", "VeOmni")
SHORT = {
    "BaseTrainer": "trainers.base",
    "Callback": "trainers.callbacks",
    "Loss": "trainers.protocol",
    "RunInfo": "trainers.callbacks",
    "Task": "trainers.protocol",
    "TrainerOutput": "trainers.protocol",
    "TrainerProtocol": "trainers.protocol",
}
"""Where classes live that the tables name without their module."""


def rows(heading):
    """The cells of the last table below a heading."""
    section = TEXT.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0].rsplit("\n### ", 1)[-1]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def resolve(name):
    """Raises if there is no such object or configuration key."""
    parts = name.split(".")
    if parts[0] in SHORT:
        parts = [*SHORT[parts[0]].split("."), *parts]
    if parts[0] != "trainers":
        return resolve_key(JobConfig if parts[0] in ORCHESTRATOR_SECTIONS else TrainingArguments, parts)
    return pkgutil.resolve_name(".".join(parts))


def resolve_key(cls, parts):
    kind = typing.get_type_hints(cls)[parts[0]]
    section = next((arm for arm in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(arm)), None)
    return resolve_key(section, parts[1:]) if len(parts) > 1 else kind


OURS = [(system, name) for system in SYSTEMS for row in rows(system) for name in names(row[1])]


@pytest.mark.parametrize(("system", "name"), OURS)
def test_every_name_of_ours_exists(system, name):
    resolve(name)


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_has_a_script_and_its_translation(system):
    section = TEXT.split(f"\n## {system}", 1)[1].split("\n## ", 1)[0]
    script = re.search(r"```py\n(.*?)```", section, re.S)
    assert script is not None
    ast.parse(script[1])
    (path,) = set(re.findall(r"`(examples/migrated/\w+\.py)`", section))
    assert (ROOT / path).exists()
    assert f"python -m orchestrator.run {path.removesuffix('.py')}.yaml" in (ROOT / path).with_suffix(".yaml").read_text()


def test_every_row_names_theirs_and_ours():
    for system in SYSTEMS:
        table = rows(system)
        assert len(table) > 25
        assert all(len(row) == 3 and row[0] and names(row[1]) for row in table)


def test_every_row_says_what_differs_and_no_name_has_two_rows():
    for system in SYSTEMS:
        table = rows(system)
        assert [row[0] for row in table if not row[2]] == []
        theirs = [row[0] for row in table]
        assert [cell for cell in theirs if theirs.count(cell) > 1] == []


def test_the_attributes_that_methods_use_there_are_named():
    """Other names here: a method that was copied would raise AttributeError."""
    cells = " ".join(row[0] for row in rows("VeOmni"))
    assert all(f"`self.{name}`" in cells for name in ("args", "lr_scheduler", "train_dataloader", "state", "tokenizer"))


def rate(step, **settings):
    return float(build_schedule(ScheduleConfig(name="linear", warmup_steps=9, **settings), 1.0, 100)(step))


@pytest.mark.parametrize(
    ("said", "holds"),
    [
        ("a warm-up begins at 1 / (`warmup_steps` + 1), and the decay ends at 0.1", lambda: rate(0) == pytest.approx(0.1)),
        ("and the decay ends at 0.1", lambda: rate(100) == pytest.approx(0.1)),
        ("A warm-up begins at `optimizer.schedule.start_factor`", lambda: rate(0, start_factor=0.01) == pytest.approx(0.01)),
        ("the default is 1; `null` clips nothing", lambda: OptimizerConfig().max_grad_norm == 1),
        ("-1 is the default of `mesh.data`", lambda: (MeshConfig().data, MeshConfig().fsdp) == (-1, 1)),
        ("`checkpoint.save_total_limit` is 3", lambda: CheckpointConfig().save_total_limit == 3),
        ("and -100 is none", lambda: LossConfig(ignore_index=-100).ignore_index == -100),
        ("and no collectives", lambda: not any(hasattr(MeshGroup, name) for name in ("all_reduce", "broadcast", "all_gather"))),
        ("the tuples of there are refused by name", lambda: refuses(lambda: CollateInfo.of("x", (1, False, 0, 1)), "VeOmni")),
        ("one with another name is an error", lambda: refuses(lambda: CallbackList().add(OtherName()), "micro_batches")),
        ("batches go over the end of an epoch", lambda: Epochs(96, 20).at(5) > 1),
    ],
)
def test_what_is_said_holds(said, holds):
    assert said in " ".join(TEXT.split())
    assert holds()


class OtherName(Callback):
    def on_step_begin(self, state, micro_batches=None, **kwargs): ...


def refuses(work, match):
    with pytest.raises(UsageError, match=match):
        work()
    return True


@pytest.mark.parametrize("name", ["trainers.base.Nothing", "BaseTrainer.nothing", "optimizer.nothing", "nothing"])
def test_what_does_not_exist_is_found_out(name):
    with pytest.raises((AttributeError, KeyError)):
        resolve(name)


def test_every_fault_has_a_named_test():
    faults = rows("Faults")
    assert len(faults) == 12
    for fault, cell in faults:
        assert names(cell), fault
        for reference in names(cell):
            path, _, test = reference.partition("::")
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.M), f"{fault}: {reference}"
