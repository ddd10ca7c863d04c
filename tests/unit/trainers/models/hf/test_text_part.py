"""Mistral Small, of which the decoder is read and the encoder of images is left out, against `transformers` (`make parity`)."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gangway.errors import CheckpointError, UsageError
from gangway.storage.opening import place_of
from tests import ROOT
from tests.programs.small_tokens import datasets
from tests.unit.hf_folders import nested, parameters_of
from tests.unit.trainers.models.hf.test_parity import with_weights
from tests.unit.trainers.models.hf.test_vision_parity import assert_near
from tests.unit.training import arguments, of
from trainers.base import BaseTrainer
from trainers.checkpoint import hugging_face, weights
from trainers.models.hf import vision_config

FOLDER = ROOT / "tests" / "unit" / "data" / "parity_vision" / "mistral3"
ABOUT = json.loads((FOLDER / "config.json").read_text())


def copied(folder, tensors, **changes):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**ABOUT, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_logits_are_those_of_the_model_with_images():
    found, expected = hugging_face.look(place_of(FOLDER)), load_file(FOLDER / "expected.safetensors")
    assert (found.config.family, found.config.window, found.config.tie_embeddings) == ("mistral", 6, False)
    params = nested(parameters_of(FOLDER))
    logits = jax.jit(lambda model: model(expected["tokens"]))(with_weights(found.config, params))
    assert_near(logits, expected["logits"])


def test_the_names_of_transformers_5_are_read_too(tmp_path):
    tensors = load_file(FOLDER / "model.safetensors")

    def new(name):
        name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
        return f"model.{name}" if name.startswith(("vision_tower.", "multi_modal_projector.")) else name

    found = hugging_face.look(place_of(copied(tmp_path / "new", {new(name): value for name, value in tensors.items()})))
    for name in ("unembed", "layers.query", "embed"):
        np.testing.assert_array_equal(
            hugging_face.read_whole(found, name), hugging_face.read_whole(hugging_face.look(place_of(FOLDER)), name)
        )


def test_what_belongs_to_neither_part_is_left_over(tmp_path):
    tensors = load_file(FOLDER / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"audio_tower\.x is left over"):
        hugging_face.look(place_of(copied(tmp_path / "more", tensors | {"audio_tower.x": np.zeros(1, np.float32)})))
    text = {"model_type": "mistral", **{name: value for name, value in ABOUT["text_config"].items() if name != "model_type"}}
    (tmp_path / "more" / "config.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match=r"multi_modal_projector\.linear_1\.weight is left over"):
        hugging_face.look(place_of(tmp_path / "more"))


def test_that_the_encoder_is_left_out_is_reported():
    assert weights.open_model(place_of(FOLDER)).about == "mistral of Hugging Face; its encoder of images is left out"


@pytest.mark.parametrize(
    ("beside", "in_section", "tied"), [(None, None, False), (True, None, True), (True, False, True), (None, True, True)]
)
def test_the_table_of_the_logits_is_the_one_that_the_file_says(beside, in_section, tied):
    """Beside the sections, as in transformers. Without a word a file of the Hub has a table for the logits."""

    def said(section, value):
        section = {name: other for name, other in section.items() if name != "tie_word_embeddings"}
        return section if value is None else section | {"tie_word_embeddings": value}

    about = said(ABOUT, beside) | {"text_config": said(ABOUT["text_config"], in_section)}
    assert vision_config.read(about).tie_embeddings == tied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is missing: a configuration of model_type mistral3 has it"),
        (
            {"text_config": {**ABOUT["text_config"], "model_type": "ministral3"}},
            "text_config.model_type = 'ministral3': expected mistral$",
        ),
        (
            {"text_config": {**ABOUT["text_config"], "clip_qkv": 8}},
            "text_config: clip_qkv = 8: the family mistral has no such key here",
        ),
        ({"audio_config": {}}, "audio_config = {}: model_type mistral3 has no such key here"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: expected nothing in it, or null"),
    ],
)
def test_what_is_not_understood_is_named(changes, message):
    with pytest.raises(UsageError, match=message):
        vision_config.read({**ABOUT, **changes})


@pytest.mark.slow("trains and exports a model")
def test_an_export_is_a_model_of_texts(tmp_path, events):
    from trainers.export import to_hugging_face

    begun = copied(tmp_path / "begun", load_file(FOLDER / "model.safetensors"))
    (begun / "preprocessor_config.json").write_text("{}")
    given = arguments(
        tmp_path / "run",
        task="trainers.tasks.causal_lm:CausalLMTask",
        max_num_steps=1,
        optimizer={"learning_rate": 1e-30},
        previews={"prompts": []},
        evaluation={"max_batches": 1},
        model={"pretrained": str(begun)},
    )
    made = BaseTrainer(given, *datasets(given))
    made.train()
    assert any("its encoder of images is left out" in event["message"] for event in of(events, "note"))
    to_hugging_face(made.output.checkpoint_path, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    before = load_file(FOLDER / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    of_text = {
        name.removeprefix("language_model."): value for name, value in before.items() if name.startswith("language_model.")
    }
    assert found.keys() == of_text.keys()
    for name, value in of_text.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
