"""Data of files, packed: what the settings of `data` make of it, and that a run without them is as before."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gangway.errors import DataError
from tests.unit.training import of
from trainers.base import BaseTrainer
from trainers.commands import prepare
from trainers.config import DataConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.config.data import MixtureSource
from trainers.data.sources.text import Windows, text_windows
from trainers.planning.estimate import plan
from trainers.settings import read

LENGTH = 16


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Where the tokens are kept."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def arguments(tmp_path, **data):
    settings = {"sequence_length": LENGTH, "eval_fraction": 0.0, "shuffle": False, **data}
    return TrainingArguments(name="t", storage=str(tmp_path), max_num_steps=1, global_batch_size=4, data=DataConfig(**settings))


def texts(dataset):
    """Returns the text of each document of an epoch, in the order of the rows."""
    found = []
    for index in range(len(dataset)):
        row = dataset[index]
        for segment in range(1, int(row["segments"].max()) + 1):
            found.append(bytes(row["tokens"][row["segments"] == segment].astype(np.uint8)).decode())
    return found


def lines(path, values, column="text"):
    path.write_text("".join(json.dumps({column: value}) + "\n" for value in values))
    return str(path)


def test_packing_chooses_how_documents_share_rows_and_without_it_text_is_one_stream(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "b.txt").write_text("four five")
    path = str(tmp_path)
    fit, _ = text_windows(arguments(tmp_path, paths=(path,), pattern="*.txt", packing="fit"))
    assert sorted(texts(fit)) == ["four five\n", "one two three\n"]
    concat, _ = text_windows(arguments(tmp_path, paths=(path,), pattern="*.txt", packing="concat"))
    assert len(concat) == len(fit) == 2
    assert "segments" in concat[0]
    stream, held_out = text_windows(arguments(tmp_path, paths=(path,), pattern="*.txt"))
    assert set(stream[0]) == {"tokens", "sample_id"}
    assert isinstance(held_out, Windows)


def test_overlong_says_what_becomes_of_a_long_document(tmp_path):
    path = lines(tmp_path / "a.jsonl", ["x" * 40, "short"])
    rows = {
        how: sorted(texts(text_windows(arguments(tmp_path, paths=(path,), packing="fit", overlong=how))[0]))
        for how in ("cut", "split", "drop")
    }
    assert rows["cut"] == ["short\n", "x" * 17]
    assert rows["split"] == ["short\n", "x" * 8 + "\n", "x" * 17, "x" * 17]
    assert rows["drop"] == ["short\n"]
    ends = texts(text_windows(arguments(tmp_path, paths=(path,), packing="fit", overlong="cut", truncation="keep_end"))[0])
    assert "x" * 16 + "\n" in ends


def test_a_source_of_a_mixture_has_all_settings_of_a_source(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.log").write_bytes('{"body": "first"}\nnot JSON\n{"body": "s\u00e9cond"}\n'.encode("latin-1"))
    (folder / "b.md").write_text("not read")
    pq.write_table(pa.table({"text": ["third"], "body": ["not read"]}), tmp_path / "c.parquet")
    mixture = (
        MixtureSource(
            name="logs",
            paths=(str(folder),),
            pattern="*.log",
            format="jsonl",
            encoding="latin-1",
            columns={"text": "body"},
            examples="text",
            on_malformed="skip",
        ),
        MixtureSource(name="table", paths=(str(tmp_path / "c.parquet"),)),
    )
    with pytest.raises(DataError, match=r"c\.parquet, row 1: nothing reads the column body .*data\.ignore_columns=\[body\]"):
        text_windows(arguments(tmp_path, packing="fit", mixture=mixture))
    rows, _ = text_windows(arguments(tmp_path, packing="fit", mixture=mixture, ignore_columns=("body",)))
    assert [source.name for source in rows.sources] == ["logs", "table"]
    assert sorted(texts(rows)) == ["first\n", "s\u00e9cond\n", "third\n"]
    changed = MixtureSource(name="logs", paths=(str(folder),), pattern="*.log", format="jsonl", columns={"text": "body"})
    with pytest.raises(DataError, match=r"a\.log"):
        text_windows(arguments(tmp_path, packing="fit", mixture=(changed,)))
    unknown = MixtureSource(name="table", paths=(str(tmp_path / "c.parquet"),), examples="songs")
    with pytest.raises(Exception, match="songs"):
        text_windows(arguments(tmp_path, packing="fit", mixture=(unknown,)))


def wrong(**settings):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - what it says is compared
        from_dict(DataConfig, settings)
    return str(caught.value).splitlines()


def test_what_is_wrong_with_a_mixture_is_reported_at_once():
    assert wrong(mixture=[{"name": "a b", "weight": -1, "epochs": 0}]) == [
        "mixture[0].name = 'a b': expected letters, digits, '.', '_' and '-', starting with a letter or digit",
        "mixture[0].weight = -1.0: expected at least 0",
        "mixture[0].epochs = 0.0: expected more than 0, or null",
    ]
    assert wrong(mixture=[{"name": "a"}, {"name": "a"}], sources=["x"]) == [
        "mixture has the names a, a: expected each once",
        "sources = ['x']: expected none with a mixture, whose sources have names themselves",
    ]
    steps = "expected pairs [step, weight], whose steps are integers from 1 on, each larger than the one before"
    for weight_at in ([[5]], [[5, 1], [5, 2]], [[0, 1]], [[1.5, 1]]):
        assert steps in wrong(mixture=[{"name": "a", "weight_at": weight_at}])[0]
    assert "expected weights of at least 0" in wrong(mixture=[{"name": "a", "weight_at": [[5, -1]]}])[0]
    zero = [{"name": "a", "weight_at": [[5, 0]]}, {"name": "b", "weight": 0}]
    assert wrong(mixture=zero) == ["mixture: all weights are 0 from step 5 on: give one source a weight"]
    assert wrong(packing="best") == ['packing: expected one of concat, fit (found "best")']


@pytest.mark.slow("trains more than once")
def test_a_mixture_is_trained_on_with_the_loss_and_the_epochs_of_each_source(tmp_path, events):
    mixture = [
        {"name": "a", "paths": [lines(tmp_path / "a.jsonl", ["aaaa bbbb"] * 20)], "weight": 3},
        {"name": "b", "paths": [lines(tmp_path / "b.jsonl", ["cccc dddd"] * 20)], "weight": 1},
    ]
    model = {"width": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "mlp_width": 8}
    data = {"sequence_length": 20, "packing": "fit", "mixture": mixture, "eval_fraction": 0.1}
    steps = {"global_batch_size": 8, "max_num_steps": 4, "publish_every_steps": 2}
    made = from_dict(TrainingArguments, {"name": "run", "storage": str(tmp_path), "model": model, "data": data, **steps})
    BaseTrainer(made, *text_windows(made)).train()
    published = [event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"]]
    assert published[-1]["total_tokens/a"] == 3 * published[-1]["total_tokens/b"] > 0
    # 18 documents of 10 tokens, two in a row; 24 and 8 rows.
    assert (published[-1]["epoch/a"], published[-1]["epoch/b"]) == (24 / 9, 8 / 9)
    assert [metrics.get("packing_efficiency") for metrics in published] == [20 / 21, None]
    told = [event["message"] for event in of(events, "note") if "% full" in event["message"]]
    assert told == [f"{name}: 18 documents in 9 rows of 20 tokens, 95.24 % full" for name in "ab"]
    assert {"eval_loss/a", "eval_loss/b"} <= set().union(*(event["metrics"] for event in of(events, "metrics")))


def test_the_dry_run_tells_how_full_the_rows_are(tmp_path):
    path = lines(tmp_path / "a.jsonl", ["aaaa bbbb"] * 20)
    problems, facts = plan(arguments(tmp_path, paths=(path,), packing="fit"), 1)
    assert problems == []
    assert facts["data_notes"] == ["the data: 20 documents in 20 rows of 16 tokens, 58.82 % full"]
    assert plan(arguments(tmp_path, paths=(path,)), 1)[1]["data_notes"] == []


def test_the_sources_of_a_mixture_may_be_prepared(tmp_path):
    mixture = [{"name": name, "paths": [lines(tmp_path / f"{name}.jsonl", [f"{name} {name}"] * 3)]} for name in ("one", "two")]
    data = {
        "packing": "fit",
        "sequence_length": LENGTH,
        "mixture": mixture,
        "prepared": str(tmp_path / "prepared"),
        "eval_fraction": 0,
    }
    path = tmp_path / "mix.json"  # which is YAML too
    path.write_text(json.dumps({"max_num_steps": 1, "storage": str(tmp_path), "data": data}))
    assert prepare.main([str(path), "--workers", "0"]) == 0
    assert sorted(folder.name for folder in (tmp_path / "prepared").iterdir()) == ["one", "two"]
    rows, _ = text_windows(read(str(path)))
    assert sorted(texts(rows)) == ["one one\n"] * 3 + ["two two\n"] * 3
