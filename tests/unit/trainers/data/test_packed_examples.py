"""Rows of several pairs or labelled texts: each example once an epoch, whole or cut as the settings say."""

from __future__ import annotations

import numpy as np
import pytest

from gangway.errors import DataError, DataMissingError, UsageError
from tests.programs import short_pairs
from trainers.config.arguments import TrainingArguments, dataset_function, from_dict
from trainers.data.sources import classification
from trainers.data.sources.preference import PairEncoder
from trainers.planning.estimate import plan

TASKS = {
    "pairs": "trainers.tasks.preference:PreferenceTask",
    "rewards": "trainers.tasks.reward:RewardTask",
    "labels": "trainers.tasks.classification:ClassificationTask",
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def arguments(tmp_path, kind="pairs", records=None, *, length=40, seed=0, preference=None, **data):
    if records is None:
        records = short_pairs.labelled(60, seed) if kind == "labels" else short_pairs.pairs(60, seed)
    path = short_pairs.write(tmp_path / f"{kind}.jsonl", records)
    settings = {"paths": [path], "sequence_length": length, "eval_fraction": 0.25, "packing": "fit", **data}
    made = {"name": "t", "max_num_steps": 1, "task": TASKS[kind], "seed": seed, "data": settings}
    made |= {"classification": {"labels": short_pairs.LABELS}, "preference": preference or {"loss": "simpo"}}
    return from_dict(TrainingArguments, made)


def datasets(*args, **settings):
    made = arguments(*args, **settings)
    return dataset_function(made)(made)


def texts_of(row):
    """The examples of a row: the tokens of each text, beside each other, and the leaves of the example."""
    lines = {name: np.atleast_2d(row[name]) for name in ("tokens", "segments", "positions", "token_weight")}
    for segment in range(1, int(row["example_weight"].sum()) + 1):
        texts = []
        for tokens, segments, positions, weight in zip(*lines.values(), strict=True):
            here = np.flatnonzero(segments == segment)
            np.testing.assert_array_equal(here, np.arange(here[0], here[-1] + 1))
            np.testing.assert_array_equal(positions[here], np.arange(len(here)))
            texts.append((*tokens[here].tolist(), *weight[here].tolist()))
        yield (*texts, *(tuple(np.ravel(row[name][segment - 1])) for name in ("label", "ref_logps") if name in row))


def alone(dataset):
    """The same examples of rows that are not packed."""
    for row in (dataset[index] for index in range(len(dataset))):
        tokens, weight = (np.atleast_2d(row[name]) for name in ("tokens", "token_weight"))
        # No text has a token 0, which is filling.
        texts = [(*tokens[line][of].tolist(), *weight[line][of].tolist()) for line, of in enumerate(tokens > 0)]
        yield (*texts, *(tuple(np.ravel(row[name])) for name in ("label", "ref_logps") if name in row))


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
@pytest.mark.parametrize(("kind", "length"), [("pairs", 40), ("pairs", 28), ("rewards", 64), ("labels", 30), ("labels", 8)])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_example_is_in_each_epoch_once_as_it_is_in_a_row_of_its_own(tmp_path, kind, length, seed, truncation):
    preference = {"loss": "dpo", "reference": "columns"} if kind == "pairs" else None
    settings = {"length": length, "seed": seed, "preference": preference, "truncation": truncation}
    packed, apart = (datasets(tmp_path, kind, **settings, packing=packing) for packing in ("fit", None))
    train, held_out = packed
    expected = sorted(alone(apart[0]))
    assert len(train) < len(apart[0]) == 45
    epochs = [[*map(train.__getitem__, range(number * len(train), (number + 1) * len(train)))] for number in (0, 1)]
    for rows in epochs:
        assert sorted(each for row in rows for each in texts_of(row)) == expected
    assert sorted(each for index in range(len(held_out)) for each in texts_of(held_out[index])) == sorted(alone(apart[1]))
    # Anew in each epoch, and the same in another process.
    first, second = ([np.ravel(row["tokens"]).tolist() for row in rows] for rows in epochs)
    assert sorted(first) != sorted(second)
    orders = [[int(row["sample_id"]) for row in rows] for rows in epochs]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    again = datasets(tmp_path, kind, **settings)[0]
    assert [np.ravel(again[index]["tokens"]).tolist() for index in range(len(again))] == first


@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_all_rows_have_one_shape_with_as_many_segments_as_the_fullest_has(tmp_path, kind):
    train, held_out = datasets(tmp_path, kind)
    rows = [dataset[index] for dataset in (train, held_out) for index in range(len(dataset))]
    assert len({tuple((name, leaf.shape, leaf.dtype) for name, leaf in row.items()) for row in rows}) == 1
    numbers = [int(row["example_weight"].sum()) for row in rows]
    assert max(numbers) == len(rows[0]["example_weight"]) > min(numbers) > 0
    assert rows[0]["tokens"].shape == ((2, 41) if kind == "pairs" else (40,))
    assert len({int(row["sample_id"]) for row in rows}) == len(rows)
    for row in rows:
        number = int(row["example_weight"].sum())
        assert row["example_weight"].tolist() == [1] * number + [0] * (len(row["example_weight"]) - number)
        assert row["segments"].max() == number


def test_how_full_the_rows_are_is_counted_with_both_texts_of_each_pair(tmp_path):
    train, _ = datasets(tmp_path, length=20)
    rows = [train[index] for index in range(len(train))]
    apart, _ = datasets(tmp_path, length=200, packing=None)
    lengths = np.array([[np.count_nonzero(line) for line in apart[index]["tokens"]] for index in range(len(apart))])
    filled = sum(np.count_nonzero(row["segments"]) for row in rows)
    assert train.numbers() == {
        "packing_efficiency": filled / (len(rows) * 42),
        "overlong_documents": np.count_nonzero(lengths.max(1) > 21),
        "lost_tokens": np.maximum(lengths - 21, 0).sum(),
    }
    assert train.numbers()["overlong_documents"] > 0
    (told,) = train.notes()
    most = len(rows[0]["example_weight"])
    assert told.startswith(f"the data: 45 examples in {len(rows)} rows of 2 x 21 tokens, at most {most} in a row, ")
    assert f"{np.count_nonzero(lengths.max(1) > 21)} longer than a row ({np.maximum(lengths - 21, 0).sum()} of" in told


def test_overlong_examples_may_be_left_out(tmp_path):
    train, _ = datasets(tmp_path, length=20, overlong="drop")
    apart, _ = datasets(tmp_path, length=200, packing=None)
    short = [each for each in alone(apart) if all(len(text) <= 2 * 21 for text in each)]
    assert sorted(each for index in range(len(train)) for each in texts_of(train[index])) == sorted(short)
    assert 0 < len(short) < 45
    with pytest.raises(DataMissingError, match=r"has no training rows: data\.overlong = 'drop' leaves out each example"):
        datasets(tmp_path, length=2, overlong="drop")


def test_an_example_that_a_cut_leaves_nothing_of_is_an_error_before_training(tmp_path):
    records = short_pairs.pairs(20, 0)
    records[3]["prompt"] = "long" * 20
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 4: of its \d+ tokens 41 are kept .* and no target is among them"):
        datasets(tmp_path, records=records)
    assert len(datasets(tmp_path, records=records, truncation="keep_end")[0])
    records[3] = {"prompt": "p", "chosen": "a" * 50 + "b", "rejected": "a" * 50 + "c"}
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 4: chosen and rejected are the same"):
        datasets(tmp_path, records=records)
    records[3] = {"prompt": "p", "chosen": "a", "rejected": ""}
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 4: the completion of the prompt 'p' is empty"):
        datasets(tmp_path, records=records)


def test_a_label_or_a_column_that_is_wrong_says_where(tmp_path, monkeypatch):
    records = short_pairs.labelled(20, 0)
    records[2]["label"] = "lowest"
    with pytest.raises(DataError, match=r"labels\.jsonl, line 3: column 'label' is 'lowest'"):
        datasets(tmp_path, "labels", records=records)
    # Of many records, those in the middle are looked at when they are read.
    monkeypatch.setattr(classification, "CHECKED", 1)
    parts = datasets(tmp_path, "labels", records=records)
    with pytest.raises(DataError, match=r"labels\.jsonl, line 3: column 'label' is 'lowest'"):
        [part[index] for part in parts for index in range(len(part))]


def test_settings_that_do_not_fit_are_reported_all_at_once(tmp_path):
    wrong = {"packing": "concat", "overlong": "split", "prepared": "folder"}
    wrong |= {"mixture": [{"name": name, "paths": ["x"]} for name in ("a", "b")]}
    for kind in TASKS:
        with pytest.raises(UsageError) as error:
            datasets(tmp_path, kind, **wrong)
        told = str(error.value).splitlines()
        assert [line.partition(":")[0] for line in told] == [
            "data.packing = 'concat'",
            "data.overlong = 'split'",
            "data.mixture = a, b",
            "data.prepared = 'folder'",
        ]
        assert "set fit, or leave it out" in told[0]
        assert "expected cut or drop" in told[1]


def test_the_tokens_are_made_once_on_a_machine(tmp_path, monkeypatch):
    made = arguments(tmp_path)
    first = dataset_function(made)(made)[0][0]
    monkeypatch.setattr(PairEncoder, "encode", None)  # another call of it would fail
    np.testing.assert_array_equal(dataset_function(made)(made)[0][0]["tokens"], first["tokens"])


def test_they_are_reported_with_all_other_problems_before_a_machine_is_taken(tmp_path):
    problems, _ = plan(arguments(tmp_path, packing="concat", preference={"loss": "dpo"}), num_devices=1)
    assert [problem.partition(":")[0] for problem in problems] == [
        "data.packing = 'concat'",
        "preference.loss = 'dpo' compares the model with a reference",
    ]
