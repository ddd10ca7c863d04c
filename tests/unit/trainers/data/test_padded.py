"""Rows of one length, and the rows of pairs, labels and conversations."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gangway.errors import DataError
from tests.unit import chat_folders
from tests.unit.records import ListRecords
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.data import padded
from trainers.data.documents import Document
from trainers.data.sources.classification import labelled, labelled_texts
from trainers.data.sources.conversations import conversations
from trainers.data.sources.preference import pairs, preference_pairs
from trainers.text.tokenizers import load

BYTES = load("bytes")


def arguments(length=8, **changes):
    data = {"sequence_length": length, **changes.pop("data", {})}
    return from_dict(TrainingArguments, {"name": "t", "max_num_steps": 1, "data": data, **changes})


def document(*weights):
    return Document(np.arange(1, len(weights) + 1, dtype=np.int32), np.array(weights, np.float32))


def test_a_short_document_is_filled_up_with_tokens_that_do_not_count():
    row = padded.padded(document(0, 1, 0.5), 5, "keep_start")
    assert (row["tokens"].tolist(), row["token_weight"].tolist()) == ([1, 2, 3, 0, 0], [0, 1, 0.5, 0, 0])
    assert row[padded.CUT] == 0
    whole = padded.padded(Document(np.array([4, 5])), 3, "keep_start")
    assert (whole["token_weight"].tolist(), whole["tokens"].dtype, whole["token_weight"].dtype) == ([1, 1, 0], "int32", "float32")


def test_a_long_document_is_cut_at_the_side_that_the_settings_say():
    long = document(0, 0, 1, 1, 1)
    assert padded.padded(long, 3, "keep_start")["tokens"].tolist() == [1, 2, 3]
    end = padded.padded(long, 3, "keep_end")
    assert (end["tokens"].tolist(), end["token_weight"].tolist(), end[padded.CUT]) == ([3, 4, 5], [1, 1, 1], 1)
    with pytest.raises(DataError, match=r"of its 5 tokens 2 are kept \(data\.truncation = 'keep_start'\), and no target"):
        padded.padded(long, 2, "keep_start")


def test_the_held_out_records_are_a_random_choice_and_the_same_each_time():
    records = ListRecords({"n": n} for n in range(10))
    train, held_out = padded.split(records, 0.2)
    trained, held = ([part[index]["n"] for index in range(len(part))] for part in (train, held_out))
    assert (trained, held) == (sorted({*range(10)} - {*held}), sorted(held))
    assert len(held) == 2
    assert held != [8, 9]
    assert padded.split(records, 0.2)[1].indices.tolist() == held
    assert (held_out.where(0), held_out.columns) == (f"pairs.jsonl, line {held[0] + 1}", ("n",))
    with pytest.raises(IndexError):
        train[8]
    with pytest.raises(DataError, match=r"data\.eval_fraction = 0\.1 of 3 records leaves 3 to train on and 0 to hold out"):
        padded.split(ListRecords({"n": n} for n in range(3)), 0.1)


PAIR = {"prompt": "ab", "chosen": "cd", "rejected": "e"}


def rows_of(*records, **changes):
    return pairs(ListRecords(records), BYTES, arguments(**changes))


def test_a_pair_has_the_chosen_completion_first_and_counts_completions_alone():
    rows = rows_of(PAIR, PAIR, length=4)
    assert len(rows) == 2
    row = rows[1]
    assert row["tokens"].tolist() == [[97, 98, 99, 100, 0], [97, 98, 101, 0, 0]]
    assert row["token_weight"].tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0]]
    assert (row[padded.CUT], set(row)) == (0, {"tokens", "token_weight", padded.CUT})
    assert rows_of(PAIR, length=2)[0][padded.CUT] == 1


def test_a_pair_may_have_the_log_probabilities_of_its_reference():
    pair = {**PAIR, "ref_chosen_logps": -1.5, "ref_rejected_logps": -2}
    settings = {"preference": {"reference": "columns"}}
    assert rows_of(pair, **settings)[0]["ref_logps"].tolist() == [-1.5, -2]
    assert "ref_logps" not in rows_of(pair)[0]
    for value in (None, "a", float("nan"), 0.5):
        with pytest.raises(DataError, match="ref_chosen_logps"):
            rows_of({**pair, "ref_chosen_logps": value}, **settings)[0]


def test_two_conversations_that_begin_alike_are_a_pair(tmp_path):
    tokenizer = load(str(chat_folders.write(tmp_path / "folder")))
    begin = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "go"}]
    ends = [[{"role": "assistant", "content": text}] for text in ("well", "no")]
    whole = {"chosen": begin + ends[0], "rejected": begin + ends[1]}
    apart = {"prompt": begin, "chosen": ends[0], "rejected": ends[1]}
    one, same = (pairs(ListRecords([record]), tokenizer, arguments(length=200))[0] for record in (whole, apart))
    for name, leaf in one.items():
        np.testing.assert_array_equal(leaf, same[name])
    targets = [tokenizer._tokenizer.decode(one["tokens"][side][one["token_weight"][side] > 0]) for side in (0, 1)]
    assert targets == ["well<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"prompt": "a", "chosen": "b"}, r"pairs\.jsonl, line 2: there is no 'rejected': it has prompt, chosen"),
        ({"chosen": "b", "rejected": "c"}, r"line 2: there is no 'prompt': it has chosen, rejected"),
        ({**PAIR, "rejected": "cd"}, "line 2: chosen and rejected are the same"),
        ({**PAIR, "chosen": ""}, "line 2: the completion of the prompt 'ab' is empty: there is no target"),
        (
            {**PAIR, "prompt": "long" * 9},
            r"line 2: of its 38 tokens 9 are kept \(data\.truncation = 'keep_start'\), and no target",
        ),
    ],
)
def test_an_error_of_a_pair_says_where_it_is(record, error):
    with pytest.raises(DataError, match=error):
        rows_of(PAIR, record)[1]


def test_labels_are_names_or_numbers():
    settings = arguments(length=4, classification={"labels": ["bad", "good"]})
    records = ListRecords([{"text": "ab", "label": "good"}, {"text": "abcdef", "label": 0}, {"text": "a", "label": "goood"}])
    rows = labelled(records, BYTES, settings)
    assert (rows[0]["tokens"].tolist(), rows[0]["token_weight"].tolist()) == ([97, 98, 0, 0], [1, 1, 0, 0])
    assert (rows[0]["label"], rows[1]["label"], rows[1][padded.CUT]) == (1, 0, 1)
    with pytest.raises(DataError, match=r"line 3: column 'label' is 'goood': expected .*\(bad, good\).*; did you mean good\?"):
        rows[2]
    for label in (2, -1, True, None):
        with pytest.raises(DataError, match=r"line 1: .*'label'"):
            labelled(ListRecords([{"text": "a", "label": label}]), BYTES, settings)[0]
    with pytest.raises(DataError, match=r"column 'text' is .* expected a text"):
        labelled(ListRecords([{"text": "", "label": 0}]), BYTES, settings)[0]


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"paths": [str(path)], "eval_fraction": 0.25}


def test_pairs_labels_and_conversations_are_read_from_files(tmp_path):
    data = written(tmp_path / "pairs.jsonl", [PAIR] * 8)
    train, held_out = preference_pairs(arguments(data=data))
    assert (len(train), len(held_out), train[0]["tokens"].shape) == (6, 2, (2, 9))
    data = written(tmp_path / "labels.jsonl", [{"text": "ab", "label": 1}] * 4)
    assert labelled_texts(arguments(data=data, classification={"labels": ["a", "b"]}))[1][0]["label"] == 1
    data = written(tmp_path / "completions.jsonl", [{"prompt": "ab", "completion": "c"}] * 4)
    train, held_out = conversations(arguments(length=4, data=data))
    assert (len(held_out), train[2]["token_weight"].tolist()) == (1, [0, 0, 1, 0, 0])
    folder = chat_folders.write(tmp_path / "folder")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = written(tmp_path / "chats.jsonl", [{"messages": turns}] * 4)
    model = {"vocab_size": chat_folders.NUM_IDS}
    train, _ = conversations(arguments(length=60, data={**data, "tokenizer": str(folder)}, model=model))
    assert train[0]["token_weight"].sum() == 2
