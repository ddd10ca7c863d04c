"""Dicts in the place of sections, for every class of the configuration that has sections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace

import pytest

from gangway.config.conversion import convert_sections
from gangway.config.section import Section, require, require_none
from orchestrator.config.job import DriverConfig
from trainers import config
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.config.keywords import PiecesArguments

CLASSES = [getattr(config, name) for name in config.__all__] + [TrainingArguments, PiecesArguments, DriverConfig]
NEEDED = {TrainingArguments: {"name": "run", "max_num_steps": 1}, PiecesArguments: {"name": "run", "max_num_steps": 1}}
WITHOUT = (config.InitConfig, config.FrozenConfig, config.ParameterGroup, config.ScoreConfig)
"""Classes that have no sections, and keys that must be given."""


def sections():
    """(class, field): each section that has a default."""
    for cls in CLASSES:
        made = cls(**NEEDED.get(cls, {})) if cls not in WITHOUT else None
        for item in dataclasses.fields(cls) if made else ():
            if dataclasses.is_dataclass(getattr(made, item.name)):
                yield cls, item.name, type(getattr(made, item.name))


@pytest.mark.parametrize(("cls", "name", "section"), list(sections()), ids=lambda value: getattr(value, "__name__", value))
def test_each_section_may_be_a_dict_and_its_wrong_key_is_reported(cls, name, section):
    first = dataclasses.fields(section)[0].name
    given = {first: getattr(section(), first)}
    assert cls(**NEEDED.get(cls, {}), **{name: given}) == cls(**NEEDED.get(cls, {}))
    with pytest.raises(ValueError, match=rf"{name}.frist: unknown key \(found 1\); "):
        cls(**NEEDED.get(cls, {}), **{name: {"frist": 1}})
    with pytest.raises(ValueError, match=rf"{name}: expected a section with keys among .* \(found 3\)"):
        cls(**NEEDED.get(cls, {}), **{name: 3})


def test_there_are_sections():
    assert {(cls.__name__, name) for cls, name, _ in sections()} >= {
        ("TrainingArguments", "data"),
        ("PiecesArguments", "pieces"),
        ("OptimizerConfig", "schedule"),
        ("DriverConfig", "restart"),
    }


def test_sections_in_lists_and_by_name_and_optional_ones():
    made = TrainingArguments(
        name="run",
        max_num_steps=1,
        init_from="/a/run",
        optimizer={"groups": [{"pattern": "out", "frozen": True}], "betas": [0.5, 0.9]},
        evaluation={"every_steps": 2, "units": {"far": {"dataset": "a:b"}}, "score": {"metrics": ["eval_loss"]}},
    )
    assert made.init_from == config.InitConfig(path="/a/run")
    assert made.optimizer.groups == (config.ParameterGroup(pattern="out", frozen=True),)
    assert made.optimizer.betas == (0.5, 0.9)
    assert isinstance(made.evaluation.units["far"], config.UnitConfig)
    assert made.evaluation.score == config.ScoreConfig(metrics=("eval_loss",))
    assert replace(made, model={"rope_scaling": None}) == made
    assert hash(made.mesh) == hash(config.MeshConfig())  # it is frozen, and not a dict


@pytest.mark.parametrize("make", [lambda given: TrainingArguments(**given), lambda given: from_dict(TrainingArguments, given)])
def test_all_problems_are_reported_at_once(make):
    wrong = {"data": {"sequence_lenght": 8, "retries": -1}, "optimizer": {"schedule": {"warmup_steps": "many"}, "eps": -1}}
    with pytest.raises(ValueError, match="seed") as raised:
        make({"name": "run", "seed": -1, **wrong})
    assert sorted(str(raised.value).splitlines()) == [
        "data.retries = -1: expected at least 0",
        "data.sequence_lenght: unknown key (found 8); did you mean data.sequence_length?",
        "nothing ends this run: set max_num_steps, max_num_data_epochs or time_limit",
        "optimizer.eps = -1.0: expected at least 0",
        'optimizer.schedule.warmup_steps: expected an integer (found "many")',
        "seed = -1: expected at least 0",
    ]


def test_what_mentions_a_key_that_was_left_out_is_no_problem_of_its_own():
    with pytest.raises(ValueError, match="seed") as raised:
        from_dict(TrainingArguments, {"name": "run", "max_num_steps": "many", "seed": -1})
    assert str(raised.value).splitlines() == [
        'max_num_steps: expected an integer (found "many")',
        "seed = -1: expected at least 0",
    ]


def test_what_is_needed_is_reported():
    with pytest.raises(ValueError, match=r"^name: missing; it has no default$"):
        from_dict(TrainingArguments, {"max_num_steps": 1})


def test_a_choice_that_may_be_null_is_checked():
    with pytest.raises(ValueError, match=r'moment_dtype: expected one of float32, bfloat16 \(found "half"\)'):
        from_dict(config.OptimizerConfig, {"moment_dtype": "half"})
    assert from_dict(config.OptimizerConfig, {"moment_dtype": None}).moment_dtype is None


@dataclass(frozen=True, kw_only=True)
class Inner(Section):
    amount: float = 0.5

    def __post_init__(self):
        require(self.amount < 1, f"amount = {self.amount}: expected less than 1")


@dataclass(frozen=True, kw_only=True)
class Outer(Section):
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        require_none(convert_sections(self))


@dataclass(frozen=True, kw_only=True)
class MoreArguments(TrainingArguments):
    outer: Outer = field(default_factory=Outer)


def test_a_section_of_a_users_own():
    assert MoreArguments(name="run", max_num_steps=1, outer={"inner": {"amount": 0.25}}).outer.inner.amount == 0.25
    with pytest.raises(ValueError, match=r"^outer\.inner\.amount = 2.0: expected less than 1$"):
        MoreArguments(name="run", max_num_steps=1, outer={"inner": {"amount": 2}})
