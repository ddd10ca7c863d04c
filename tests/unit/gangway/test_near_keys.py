"""Which key a wrong one may stand for: keys of other sections, and names of other programs."""

from __future__ import annotations

import re

import pytest

from gangway.config import near_keys
from tests import ROOT
from tests.unit.config_keys import every_key
from trainers.config.arguments import TrainingArguments, from_dict

TEXT = (ROOT / "docs" / "migrating.md").read_text()
ROW = re.compile(r"\| `")


def cells(line):
    return re.split(r"(?<!\\)\|", line)[1:-1]


def near(key):
    section, _, name = key.rpartition(".")
    cls = near_keys.section_of(TrainingArguments.__dataclass_fields__[section].default_factory) if section else TrainingArguments
    return near_keys.near(TrainingArguments, section, cls.__dataclass_fields__, name)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("learning_rate", ["optimizer.learning_rate"]),
        ("optimizer.save_steps", ["checkpoint.save_steps"]),
        ("warmup_steps", ["optimizer.schedule.warmup_steps", "profile.warmup_steps"]),  # and not max_num_steps
        ("batch_size", ["evaluation.batch_size", "global_batch_size"]),
        ("per_device_train_batch_size", ["global_batch_size"]),
        ("per-device-train-batch-size", ["global_batch_size"]),
        ("num_train_epochs", ["max_num_data_epochs"]),
        ("optimizer.lr", ["optimizer.learning_rate"]),
        *((name, ["model.fp8"]) for name in ("fp8", "use_fp8", "quantization", "optimizer.fp8_recipe")),
        ("data.sequence_lenght", ["data.sequence_length"]),
        ("sequence_lenght", ["data.sequence_length"]),
        ("optimizer.learnin_rate", ["optimizer.learning_rate"]),
        ("zzz", []),
        ("ckpt_path", ["checkpoint.start_from", "init_from"]),
        ("amp", ["dtype"]),
        ("num_skip_steps", ["profile.skip_steps"]),
        *((name, []) for name in ("train_size", "do_train", "decoders", "version", "init_tx", "use_grain", "stage_dir")),
    ],
)
def test_keys_of_other_sections_and_names_of_others_come_first(key, ours):
    assert near(key) == ours


def test_without_the_orchestrator_the_same_is_reported():
    with pytest.raises(ValueError, match=r"^learning_rate: unknown key \(found 1\); did you mean optimizer\.learning_rate\?"):
        from_dict(TrainingArguments, {"name": "run", "max_num_steps": 1, "learning_rate": 1})
    with pytest.raises(ValueError, match=r"^optimizer\.lr: unknown key \(found 1\); did you mean optimizer\.learning_rate\?"):
        from_dict(TrainingArguments, {"name": "run", "max_num_steps": 1, "optimizer": {"lr": 1}})


def test_all_that_is_suggested_exists_and_nothing_is_a_key_of_the_same_name():
    sections = {name.rpartition(".")[0] for name in every_key()}
    for name, keys in near_keys.OF_OTHERS.items():
        assert all(key in every_key() or key in sections for key in keys), name
        assert name not in every_key()


def test_the_table_has_the_names_of_the_document():
    """Of each row whose names are settings on both sides, in the tables that say what differs."""
    checked, sections = 0, {name.partition(".")[0] for name in every_key()}
    for theirs, ours, _ in (row for row in map(cells, filter(ROW.match, TEXT.splitlines())) if len(row) == 3):
        keys = [name for name in re.findall(r"`([^`]+)`", ours) if name in every_key()]
        if not keys or "(" in theirs or "BaseTrainer" in ours:
            continue
        for name in re.findall(r"`([a-z][a-z0-9_]+)`", theirs):
            if name in sections or any(key.rpartition(".")[2] == name for key in keys):
                continue
            assert set(near_keys.OF_OTHERS[name]) & set(keys), (name, keys)
            checked += 1
    assert checked > 80


def test_a_hint_is_what_the_document_says_and_no_hint_is_better_than_a_wrong_one():
    """Of the tables that have every other argument of each system."""
    other = {"group", "strict", "early_stop"} | {key.rpartition(".")[2] for key in every_key()}  # of ours, or nearly
    checked = 0
    others = TEXT.partition("## All other arguments")[2].partition("\n## ")[0]
    for theirs, ours in map(cells, filter(ROW.match, others.splitlines())):
        keys = set(re.findall(r"`([^`]+)`", ours))
        for name in set(re.findall(r"`([a-z][a-z0-9_]+)`", theirs)) - other:
            assert set(near(name)) <= keys, name
            checked += 1
    assert checked > 200


@pytest.mark.parametrize("value", ["fp8", "FP8", "float8_e4m3fn"])
def test_a_value_that_another_program_has_is_answered_with_the_key_that_does_it(value):
    with pytest.raises(ValueError, match=re.escape("products of 8 bits are `model.fp8: current`, beside `dtype: bfloat16`")):
        from_dict(TrainingArguments, {"dtype": value})


def test_each_key_of_such_a_value_is_one():
    assert near_keys.VALUES_ELSEWHERE.keys() <= {".".join(key) for key in near_keys.all_keys(TrainingArguments)}
