"""What `save_pretrained` writes beside the arrays, and that what it wrote can be trained on."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from gangway.errors import CheckpointError, UsageError
from tests.unit.training import FIXED, assert_equal, of, trainer
from trainers.base import BaseTrainer
from trainers.checkpoint import assets
from trainers.checkpoint.standalone import load_from


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


@pytest.mark.slow("compiles a step and trains")
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
    assert_equal(whole, again.train(state=again.load_pretrained(path)))


def test_a_damaged_asset_is_found(tmp_path):
    made = trainer(tmp_path, cls=WithAssets, max_num_steps=1)
    made.train()
    path = made.save_pretrained(str(tmp_path / "saved"))
    (Path(path) / "assets" / "tokenizer" / "vocab.json").write_text('["a", "c"]')
    with pytest.raises(CheckpointError, match=r"the contents of assets/tokenizer/vocab\.json are not those that were saved"):
        load_from(path, made.placement.placed_state)


def test_what_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
    made = trainer(tmp_path, cls=type("Wrong", (WithAssets,), {"given": {"thing": object()}}), max_num_steps=1)
    with pytest.raises(UsageError, match="build_model_assets: thing is a object: expected text, bytes, what JSON can hold"):
        made.train()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"../up": "x"}, r"build_model_assets: '\.\./up': expected letters, digits"),
        (Labels(), "build_model_assets returned Labels: expected a dict of assets by name, or a list"),
    ],
)
def test_what_is_no_set_of_assets_is_an_error_when_the_trainer_is_built(tmp_path, given, why):
    with pytest.raises(UsageError, match=why):
        trainer(tmp_path, cls=type("Wrong", (WithAssets,), {"given": given}))


def test_a_list_of_assets_is_named_by_class_or_place():
    first, second, labels = Tokenizer([]), Tokenizer([]), Labels()
    assert assets.named([first, "text", labels, second]) == {
        "Tokenizer": first,
        "1": "text",
        "Labels": labels,
        "Tokenizer-3": second,
    }
    assert assets.named(None) == {}


class UsedInTheTransform(BaseTrainer):
    """As a processor is: made with the assets, used for the data."""

    calls = 0

    def build_model_assets(self):
        self.calls += 1
        self.processor = Tokenizer(["a", "b"])
        return [self.processor]

    def build_data_transform(self):
        return lambda example: {**example, "tokens": example["tokens"] % len(self.processor.words)}


def test_assets_are_built_once_before_the_transform_that_uses_them(tmp_path):
    made = trainer(tmp_path, cls=UsedInTheTransform, max_num_steps=1)
    made.train()
    made.save_pretrained(str(tmp_path / "saved"))
    assert made.calls == 1
    assert set(np.unique(made.dataset_train[3]["tokens"])) <= {0, 1}
    assert made.model_assets["Tokenizer"] is made.processor


# ---------------------------------------------------------------------- with a run


def trained_with(tmp_path, given, **settings):
    made = trainer(tmp_path, cls=type("Given", (WithAssets,), {"given": given}), **{"max_num_steps": 1, **settings})
    made.train()
    return made


def test_a_run_has_its_assets_and_so_has_each_of_its_checkpoints(tmp_path, events):
    made = trained_with(tmp_path, {"tokenizer": Tokenizer(["a"]), "limit": 3})
    for path in (str(tmp_path / "run"), made.output.checkpoint_path):
        found = assets.read(path)
        assert Tokenizer.from_pretrained(found["tokenizer"]).words == ["a"]
        assert found["limit"] == 3


def test_a_restart_keeps_the_same_assets_and_replaces_others(tmp_path, events):
    folder = tmp_path / "run" / "assets"
    trained_with(tmp_path, {"tokenizer": Tokenizer(["a"])})
    before = folder.stat().st_ino
    for left in ("assets.saving-0123abcd", "assets.replaced-0123abcd"):
        (tmp_path / "run" / left).mkdir()
    trained_with(tmp_path, {"tokenizer": Tokenizer(["a"])})
    assert folder.stat().st_ino == before
    trained_with(tmp_path, {"tokenizer": Tokenizer(["a", "b"])})
    assert Tokenizer.from_pretrained(assets.read(str(tmp_path / "run"))["tokenizer"]).words == ["a", "b"]
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith("assets")] == ["assets"]


def test_assets_that_cannot_be_stored_end_no_training(tmp_path, events, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(assets.durable, "sync", full)
    trained_with(tmp_path, {"limit": 3}, checkpoint={"save_at_end": False})
    assert list((tmp_path / "run").iterdir()) == []
    assert any("the model's assets could not be written: " in event["message"] for event in of(events, "note"))


def test_a_checkpoint_without_assets_has_none(tmp_path):
    made = trainer(tmp_path, max_num_steps=1)
    made.train()
    assert assets.read(made.save_pretrained(str(tmp_path / "saved"))) == {}
