"""What `save_pretrained` writes beside the arrays, and that what it wrote can be trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest

from tests.unit.training import FIXED, assert_equal, trainer
from trainers.base import BaseTrainer
from trainers.checkpoint import assets
from trainers.checkpoint.standalone import load_from
from trainers.errors import CheckpointError
from trainers.step.state import with_shardings


class Tokenizer:
    """As those of `transformers` and `tokenizers` are."""

    def __init__(self, words):
        self.words = words

    def save_pretrained(self, folder):
        (Path(folder) / "vocab.json").write_text(json.dumps(self.words))

    @classmethod
    def from_pretrained(cls, folder):
        return cls(json.loads((Path(folder) / "vocab.json").read_text()))


class Labels:
    def save(self, folder):
        (Path(folder) / "labels").write_text("yes no")


class WithAssets(BaseTrainer):
    given: ClassVar = {
        "tokenizer": Tokenizer(["a", "b"]),
        "labels": Labels(),
        "chat.jinja": "{{ text }}ü",
        "bytes": b"\0\xff",
        "top": {"k": [1]},
    }

    def build_model_assets(self):
        return self.given


def test_assets_come_back_and_training_goes_on_bit_for_bit(tmp_path):
    whole = trainer(tmp_path / "whole", optimizer=FIXED).train()
    made = trainer(tmp_path / "cut", cls=WithAssets, max_num_steps=6, optimizer=FIXED)
    made.train()
    path = made.save_pretrained(str(tmp_path / "saved"))
    found = assets.read(path)
    assert Tokenizer.from_pretrained(found.pop("tokenizer")).words == ["a", "b"]
    assert (found.pop("labels") / "labels").read_text() == "yes no"
    assert found == {"chat.jinja": "{{ text }}ü", "bytes": b"\0\xff", "top": {"k": [1]}}
    assert json.loads((Path(path) / "meta.json").read_text())["arguments"]["max_num_steps"] == 6

    again = trainer(tmp_path / "again", optimizer=FIXED)
    again.prepare()
    state, _ = load_from(path, with_shardings(again._model_state, again._state_shardings))
    assert_equal(whole, again.train(state=state))


def test_a_damaged_asset_is_found(tmp_path):
    made = trainer(tmp_path, cls=WithAssets, max_num_steps=1)
    made.train()
    path = made.save_pretrained(str(tmp_path / "saved"))
    (Path(path) / "assets" / "tokenizer" / "vocab.json").write_text('["a", "c"]')
    with pytest.raises(CheckpointError, match=r"the contents of assets/tokenizer/vocab\.json are not those that were saved"):
        load_from(path, with_shardings(made._model_state, made._state_shardings))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"thing": object()},
            "build_model_assets: thing is a object: expected text, bytes, what JSON can hold, or an object with",
        ),
        ({"../up": "x"}, r"build_model_assets: '\.\./up': expected letters, digits"),
    ],
)
def test_what_cannot_be_written_is_named_and_nothing_is_left(tmp_path, given, why):
    made = trainer(tmp_path, cls=type("Wrong", (WithAssets,), {"given": given}), max_num_steps=1)
    made.train()
    with pytest.raises(CheckpointError, match=why):
        made.save_pretrained(str(tmp_path / "saved"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_without_assets_has_none(tmp_path):
    made = trainer(tmp_path, max_num_steps=1)
    made.train()
    assert assets.read(made.save_pretrained(str(tmp_path / "saved"))) == {}
