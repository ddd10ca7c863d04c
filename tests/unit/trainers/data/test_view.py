"""The viewer shows the rows of training, what counts in them, and where they come from."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.programs import short_pairs
from tests.programs.packed import InMemory
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.commands import data as command
from trainers.config import DataConfig, PreferenceConfig
from trainers.config.arguments import TrainingArguments
from trainers.data import view
from trainers.data.sources.packed import rows_of

PREFERENCES = "trainers.tasks.preference:PreferenceTask"
ROW = {
    "tokens": np.frombuffer(b"abcdeXYZ\x00\x00", np.uint8).astype(np.int32),
    "segments": np.array([1, 1, 1, 1, 1, 2, 2, 2, 0, 0], np.int32),
    "token_weight": np.array([1, 0, 1, 1, 1, 1, 1, 1, 0, 0], np.float32),
    "source": np.int32(1),
    "sample_id": np.int32(7),
}


@pytest.fixture(autouse=True)
def runtime_kept():
    before = runtime.current()
    yield
    runtime.install(before)


def decode(tokens):
    return bytes(tokens).decode(errors="replace")


def text(line):
    return "".join(part for part, _ in line)


def test_marks_stand_for_documents_and_for_what_is_no_target():
    shown = view.example(ROW, decode, ("web", "code"), coloured=False)
    assert text(shown) == "code  example 7, 2 documents, 5 targets, 2 places empty\n⟦ab⟧cde‖⟦X⟧YZ"


def test_colours_tell_documents_apart_and_dim_what_is_no_target():
    shown = view.example(ROW, decode, ("web", "code"), coloured=True)
    assert shown[3:] == (("ab", "dim cyan"), ("cde", "cyan"), ("X", "dim yellow"), ("YZ", "yellow"))


def test_targets_are_those_of_the_loss():
    assert view.targets(ROW).tolist() == [False, False, True, True, True, False, True, True, False, False]
    assert view.targets(ROW, ignore_index=ord("d")).sum() == 4
    assert view.targets({**ROW, "weight": np.float32(0)}).sum() == 0
    assert view.targets({"tokens": np.arange(4)}).tolist() == [False, True, True, True]


def test_a_text_cannot_control_the_terminal():
    row = {"tokens": np.frombuffer(b"a\x1b[31m\nb", np.uint8).astype(np.int32)}
    assert text(view.example(row, decode, coloured=True)).endswith("a·[31m↵b")


def test_lengths_are_counted_in_ranges_that_double():
    shown = [text(line) for line in view.histogram(np.array([3, 5, 6, 7, 40, 33, 34]), 32)]
    assert [line.replace("█", "") for line in shown[:-1]] == [
        "  2 - 3   1",
        "  4 - 7   3",
        " 8 - 15   0",
        "16 - 31   0",
        "32 - 63   3",
    ]
    assert shown[-1] == "median 7, mean 18.3, longest 40; 3 of 7 are longer than a row of 32"


class Upper(BaseTrainer):
    def build_data_transform(self):
        return lambda example: {**example, "tokens": example["tokens"] + 65}


def test_the_rows_are_those_that_training_gets_with_its_transforms():
    data = DataConfig(sequence_length=16, packing="fit", eval_fraction=0.0, shuffle=False)
    arguments = TrainingArguments(name="t", max_num_steps=1, global_batch_size=4, data=data)
    trainer = Upper(arguments, *rows_of([InMemory([9, 8, 12, 16, 3])], arguments))
    shown = [text(line) for line in command.lines(trainer, 1, 1, coloured=False)]
    assert shown[0] == "\nthe first 1 examples of training"
    assert shown[1].endswith("\n⟦ABCD⟧EFGHI‖⟦H⟧IJKLMNO")
    assert "\ntokens of the documents of the data" in shown
    assert any(line.startswith("the data: 5 documents in 3 rows of 16 tokens, ") for line in shown)
    assert shown[-1].startswith("all       4 rows")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(30)))
    (tmp_path / "b.txt").write_text("to be or not to be " * 20)
    path = tmp_path / "mix.json"  # which is YAML too
    mixture = [{"name": name, "paths": [str(tmp_path / file)]} for name, file in (("lines", "a.jsonl"), ("play", "b.txt"))]
    data = {"sequence_length": 32, "packing": "concat", "mixture": mixture, "eval_fraction": 0}
    path.write_text(json.dumps({"max_num_steps": 1, "global_batch_size": 4, "storage": str(tmp_path), "data": data}))
    return str(path)


def test_the_command_shows_examples_packing_lengths_and_sources_in_a_pipe(config, capsys):
    assert command.main([config, "--examples", "2", "data.shuffle=false"]) == 0
    shown = capsys.readouterr().out
    assert "lines  example 0, 5 documents, 28 targets\n⟦l⟧ine 0↵‖⟦l⟧ine 1↵‖" in shown
    assert "play  example 8, 1 document, 32 targets\n⟦t⟧o be or not to be" in shown
    assert "lines: 30 documents in 8 rows of 32 tokens, 89.77 % full" in shown
    assert "play: 1 documents in 12 rows of 32 tokens, " in shown
    assert "lines       8 rows" in shown
    assert "\x1b" not in shown


def test_the_command_shows_data_that_is_no_text(capsys, tmp_path):
    path = tmp_path / "digits.yaml"
    path.write_text(
        "max_num_steps: 1\ntask: tests.programs.ragged:Terms\ndata: {dataset: 'tests.unit.trainers.data.test_view:pictures'}\n"
    )
    assert command.main([str(path)]) == 0
    assert "image  float32[8, 8], from 0 to 0.5" in capsys.readouterr().out


def pictures(arguments):
    return [{"image": np.full((8, 8), number / 16, np.float32)} for number in range(9)], None


def test_the_command_says_what_is_wrong(capsys, tmp_path):
    assert command.main([str(tmp_path / "none.yaml")]) == 2
    assert "error: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["x.yaml", "--examples", "0"])
    assert "--examples 0: expected 1 or more" in capsys.readouterr().err


def shown_of(tmp_path, capsys, records, task, **settings):
    path = short_pairs.write(tmp_path / "records.jsonl", records)
    data = {"paths": [path], "sequence_length": 16, "eval_fraction": 0, "shuffle": False, **settings.pop("data", {})}
    made = {"max_num_steps": 1, "global_batch_size": 4, "storage": str(tmp_path), "task": task, "data": data, **settings}
    (tmp_path / "made.json").write_text(json.dumps(made))
    assert command.main([str(tmp_path / "made.json"), "--examples", "1", "--batches", "1"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("packing", ["fit", None])
def test_both_texts_of_pairs_are_shown_and_a_pair_is_one_row(tmp_path, monkeypatch, capsys, packing):
    monkeypatch.setenv("HOME", str(tmp_path))
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
    shown = shown_of(tmp_path, capsys, [pair] * 8, PREFERENCES, preference={"loss": "simpo"}, data={"packing": packing})
    if packing:
        assert "example 0, chosen, 2 documents, 2 targets, 7 places empty\n⟦2+2=⟧4‖⟦2+2=⟧4\n" in shown
        assert "example 0, rejected, 2 documents, 8 targets, 1 places empty\n⟦2+2=⟧five‖⟦2+2=⟧five\n" in shown
        assert "the data: 8 examples in 4 rows of 2 x 17 tokens, at most 2 in a row, 76.47 % full" in shown
    else:
        assert "rejected, 17 tokens, 4 targets, 9 places empty\n⟦2+2=⟧five\n" in shown
    assert "all       4 rows" in shown


def test_texts_are_shown_with_their_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    records = [{"text": text, "label": label} for text, label in (("awful, bad", "bad"), ("great", 1))]
    settings = {"classification": {"labels": ["bad", "good"]}, "data": {"packing": "fit"}}
    shown = shown_of(tmp_path, capsys, records, "trainers.tasks.classification:ClassificationTask", **settings)
    assert "example 0, 2 documents, 13 targets, 1 places empty, labels bad, good\n⟦a⟧wful, bad‖⟦g⟧reat\n" in shown
    shown = shown_of(tmp_path, capsys, records, "trainers.tasks.classification:ClassificationTask", **settings | {"data": {}})
    assert ", label bad\n" in shown or ", label good\n" in shown


def test_the_data_of_a_task_are_those_that_the_task_reads(tmp_path):
    pair = {"prompt": "2 + 2 is ", "chosen": "4", "rejected": "5"}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 8)
    data = DataConfig(paths=(str(tmp_path / "pairs.jsonl"),), sequence_length=16, eval_fraction=0)
    preference = PreferenceConfig(loss="simpo")
    made = TrainingArguments(name="t", max_num_steps=1, task=PREFERENCES, data=data, preference=preference)
    assert command.build(made).dataset_train[0]["tokens"].shape == (2, 17)
