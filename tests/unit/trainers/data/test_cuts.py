"""What is longer than a row: a document without a target is an error in rows of its own and in packed rows, and both texts of a
pair lose the same of their prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gangway.errors import DataError
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.data.sources.conversations import conversations
from trainers.data.sources.preference import preference_pairs
from trainers.data.sources.text import text_windows

SHORT = {"prompt": "ab", "completion": "cd"}
LONG = {"prompt": "a" * 40, "completion": "b" * 30}


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def made(records, length=31, **data):
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        settings = {"paths": [str(path)], "sequence_length": length, "eval_fraction": 0.0, "shuffle": False, **data}
        return from_dict(TrainingArguments, {"name": "t", "max_num_steps": 1, "data": settings})

    return made


def test_a_completion_that_is_cut_away_is_an_error_on_each_path(arguments):
    expected = r"records\.jsonl, line 2: of its 70 tokens 32 are kept .* and no target is among them"
    with pytest.raises(DataError, match=expected):
        conversations(arguments([SHORT, LONG]))[0][1]
    with pytest.raises(DataError, match=expected + r".*data\.overlong: drop or split"):
        text_windows(arguments([SHORT, LONG], packing="fit"))
    mixture = [{"name": "one", "paths": arguments([SHORT, LONG]).data.paths}]
    with pytest.raises(DataError, match=expected):
        text_windows(arguments([SHORT, LONG], mixture=mixture))
    dropped = text_windows(arguments([SHORT, LONG], packing="fit", overlong="drop"))[0]
    assert [piece.document for piece in dropped.sources[0].plan.pieces(0, 0)] == [0]
    kept = text_windows(arguments([SHORT, LONG], packing="fit", truncation="keep_end"))[0]
    assert sum(int((row["token_weight"] > 0).sum()) for row in map(kept.__getitem__, range(len(kept)))) == 32


def test_parts_of_a_split_document_that_have_no_target_are_left_out(arguments):
    rows = text_windows(arguments([SHORT, LONG], packing="fit", overlong="split"))[0]
    shown = [bytes(row["tokens"].astype(np.uint8)).decode().strip("\0") for row in map(rows.__getitem__, range(len(rows)))]
    # Parts of 32 tokens begin at 0, 31 and 62: the first has no target.
    assert sorted("".join(shown)) == sorted("abcd" + "a" * 9 + "b" * 23 + "b" * 8)
    assert (rows.sources[0].counts.lost_tokens, rows.sources[0].counts.filled_places) == (31, 44)


@pytest.mark.parametrize("packing", [None, "fit"])
@pytest.mark.parametrize(
    ("pair", "kept"),
    [
        # 10 of the prompt are cut off both texts.
        ({"prompt": "p" * 20, "chosen": "c" * 20, "rejected": "r" * 5}, ("p" * 10 + "c" * 20, "p" * 10 + "r" * 5)),
        # The prompt is cut off both, and of the longer completion the beginning.
        ({"prompt": "p" * 4, "chosen": "c" * 5, "rejected": "qr" * 17}, ("c" * 5, "qr" * 15)),
        ({"prompt": "p" * 4, "chosen": "c" * 5, "rejected": "r" * 7}, ("pppp" + "c" * 5, "pppp" + "r" * 7)),
    ],
)
def test_both_texts_of_a_pair_keep_the_same_of_their_prompt(arguments, packing, pair, kept):
    made = arguments([pair], 29, packing=packing, truncation="keep_end")
    rows = preference_pairs(made)[0]
    lines = [bytes(line.astype(np.uint8)).decode().rstrip("\0") for line in rows[0]["tokens"]]
    assert tuple(lines) == kept
    if packing is not None:
        counts, whole = rows.sources[0].counts, 2 * len(pair["prompt"]) + len(pair["chosen"]) + len(pair["rejected"])
        filled = sum(map(len, kept))
        assert (counts.filled_places, counts.lost_tokens) == (filled, whole - filled)
