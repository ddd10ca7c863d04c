"""A vision transformer in a folder of Hugging Face: a run begins with it, and gives it back."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from gangway.errors import UsageError
from gangway.storage.opening import place_of
from tests import ROOT
from tests.unit.training import arguments
from trainers.base import BaseTrainer
from trainers.checkpoint import hugging_face
from trainers.commands.generate import open_model
from trainers.export import to_hugging_face
from trainers.models.hf import vision_config

VIT = ROOT / "tests" / "unit" / "data" / "parity_vision" / "vit"
IMAGES = load_file(VIT / "expected.safetensors")["images"]
LABELS = np.array([1, 4], np.int32)


@pytest.mark.slow("trains more than once")
def test_a_run_begins_with_a_folder_and_gives_it_back(tmp_path):
    config = hugging_face.read_config(place_of(VIT))
    changes = {
        "task": "trainers.tasks.image_classification:ImageClassificationTask",
        "vision": dataclasses.asdict(config),
        "data": {},
        "init_from": str(VIT),
        "global_batch_size": 8,
        "max_num_steps": 1,
        "optimizer": {"groups": [{"pattern": "^(?!head)", "frozen": True}], "schedule": {"name": "constant"}},
    }
    data = {"image": np.tile(IMAGES, (4, 1, 1, 1)), "label": np.tile(LABELS, 4)}
    made = BaseTrainer(arguments(tmp_path, **changes), data, None)
    made.train()
    to_hugging_face(made.output.checkpoint_path, tmp_path / "out")
    before, after = load_file(VIT / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name for name in before if (before[name] != after[name]).any()} == {"classifier.weight", "classifier.bias"}
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert vision_config.meaning(vision_config.read(about)) == vision_config.meaning(config)


@pytest.mark.parametrize("family", ["vit", "siglip"])
def test_an_encoder_is_no_model_to_generate_with(family):
    with pytest.raises(UsageError, match=f"is a model of the family {family}: expected a decoder of texts"):
        open_model(str(VIT.with_name(family)))
