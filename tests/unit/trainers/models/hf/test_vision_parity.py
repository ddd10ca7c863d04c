"""The encoders of images, and Gemma 3 with images, against `transformers`; and back into its files.

`tests/unit/data/parity_vision` has tiny random models with what `transformers` computes for them; `make parity` makes it.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from gangway.errors import CheckpointError, UsageError
from gangway.storage.opening import place_of
from tests import ROOT
from tests.unit.hf_folders import nested, parameters_of
from trainers.checkpoint import hugging_face, hugging_face_out
from trainers.config import MeshConfig
from trainers.models.encoder import Encoder
from trainers.models.hf import vision_config
from trainers.models.vlm import ImageTextModel
from trainers.parallel import mesh as meshes
from trainers.step.state import logical_axes

DATA = ROOT / "tests" / "unit" / "data" / "parity_vision"
PARTS = {"text_config": {}, "vision_config": {}}


def expected_of(name):
    return load_file(DATA / name / "expected.safetensors")


def model_of(folder, dtype=jnp.float32):
    """The model in a folder, with its weights."""
    found = hugging_face.look(place_of(folder))
    config = found.config

    def build():
        kind = (Encoder, config) if isinstance(config, vision_config.VisionConfig) else (ImageTextModel, *config)
        return kind[0](*kind[1:], rngs=nnx.Rngs(0), dtype=dtype)

    graph, state = nnx.split(nnx.eval_shape(build))
    shapes = nested_names(nnx.to_pure_dict(state))
    assert {name: leaf.shape for name, leaf in found.leaves.items()} == {name: leaf.shape for name, leaf in shapes.items()}
    params = jax.tree.map(jnp.asarray, nested(parameters_of(found.path)))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def nested_names(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def assert_near(found, expected, tolerance=1e-5):
    """Relative to the largest value."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_vit():
    expected = expected_of("vit")
    assert_near(jax.jit(lambda model, images: model(images))(model_of(DATA / "vit"), expected["images"]), expected["logits"])


def test_siglip_with_its_head():
    expected, model = expected_of("siglip"), model_of(DATA / "siglip")
    hidden = jax.jit(lambda model, images: model(images))(model, expected["images"])
    assert_near(hidden, expected["hidden"])
    assert_near(jax.jit(lambda model, hidden: model.pooled(hidden))(model, hidden), expected["pooled"])


@jax.jit
def logits_of(model, tokens, images):
    return model(tokens, images)


@pytest.fixture(scope="module")
def gemma3():
    return model_of(DATA / "gemma3")


def test_gemma3_with_two_images_in_a_row(gemma3):
    expected = expected_of("gemma3")
    assert_near(logits_of(gemma3, expected["tokens"], expected["images"]), expected["logits"])


def test_images_in_the_place_of_missing_ones_change_nothing(gemma3):
    expected = expected_of("gemma3")
    images = expected["images"].copy()
    images[1, 1] = 7.0
    assert_near(logits_of(gemma3, expected["tokens"], images), expected["logits"])


@pytest.mark.slow("reads and runs whole models")
def test_a_row_that_asks_for_more_images_than_there_are_is_not_a_number(gemma3):
    expected = expected_of("gemma3")
    logits = np.asarray(logits_of(gemma3, expected["tokens"], expected["images"][:, :1]))
    assert np.isnan(logits[0]).any()
    assert_near(logits[1], expected["logits"][1])


@pytest.mark.slow("reads and runs whole models")
def test_on_a_mesh(gemma3):
    expected = expected_of("gemma3")
    mesh = meshes.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    graph, state = nnx.split(gemma3)
    params = jax.tree.map(
        lambda leaf, axes: jax.device_put(leaf, meshes.parameter_sharding(mesh, axes, leaf.shape)),
        nnx.to_pure_dict(state),
        logical_axes(state),
    )
    sharded = {name for name, leaf in nested_names(params).items() if not leaf.sharding.is_fully_replicated}
    assert {"vision.patch", "vision.layers.query", "projector.out", "decoder.layers.query"} <= sharded
    nnx.replace_by_pure_dict(state, params)
    assert_near(logits_of(nnx.merge(graph, state), expected["tokens"], expected["images"]), expected["logits"])


@pytest.mark.parametrize("name", ["vit", "siglip", "gemma3"])
def test_a_file_comes_back_under_the_names_of_the_hub(name, tmp_path):
    found = hugging_face.look(place_of(DATA / name))
    parameters = {ours: (leaf.shape, leaf.dtype) for ours, leaf in found.leaves.items()}
    files = hugging_face_out.files_of(hugging_face_out.plan(found.config, parameters), 10**9)
    hugging_face_out.write(tmp_path, files, lambda ours: hugging_face.read_whole(found, ours))
    about = vision_config.write(found.config, max_length=64, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(about))
    of_hub = {hub_name(tensor): value for tensor, value in load_file(DATA / name / "model.safetensors").items()}
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == of_hub.keys()
    for tensor, value in of_hub.items():
        np.testing.assert_array_equal(written[tensor], value, err_msg=tensor)
    # The other names, and the configuration, are read too.
    again = hugging_face.look(place_of(tmp_path))
    assert vision_config.meaning(again.config) == vision_config.meaning(found.config)
    for ours in found.leaves:
        np.testing.assert_array_equal(hugging_face.read_whole(again, ours), hugging_face.read_whole(found, ours))


def hub_name(tensor):
    """transformers 5 leaves out `vision_model.`, which files of the Hub have."""
    if tensor.startswith("vision_tower."):
        return tensor.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return f"vision_model.{tensor}" if tensor.startswith(("embeddings.", "encoder.", "head.", "post_layernorm.")) else tensor


def test_an_encoder_is_read_out_of_a_file_that_has_more(tmp_path):
    tensors = load_file(DATA / "siglip" / "model.safetensors")
    more = {"text_model.embeddings.token_embedding.weight": np.zeros((3, 2), np.float32), "logit_scale": np.zeros(1, np.float32)}
    save_file({f"vision_model.{name}": value for name, value in tensors.items()} | more, tmp_path / "model.safetensors")
    about = json.loads((DATA / "siglip" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip", "text_config": {}, "vision_config": about}))
    found = hugging_face.look(place_of(tmp_path))
    assert found.config == hugging_face.look(place_of(DATA / "siglip")).config
    np.testing.assert_array_equal(hugging_face.read_whole(found, "pooling.probe"), tensors["head.probe"])


def test_a_weight_that_is_missing_is_named(tmp_path):
    tensors = load_file(DATA / "vit" / "model.safetensors")
    del tensors["classifier.bias"]
    save_file(tensors | {"other": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((DATA / "vit" / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"not a model of the family vit.*classifier\.bias is missing; other is left over"):
        hugging_face.look(place_of(tmp_path))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"model_type": "vit", "hidden_act": "relu"}, r"hidden_act = 'relu': expected gelu in the family vit"),
        ({"model_type": "vit", "qkv_bias": False}, r"qkv_bias = false: expected true"),
        ({"model_type": "siglip_vision_model", "attention_dropout": 0.1}, r"attention_dropout = 0.1: expected 0"),
        ({"model_type": "gemma3", "text_config": {}}, r"vision_config missing"),
        ({"model_type": "vit", "patch_size": 10}, r"patch_size = 10: expected a divisor of image_size \(224\)"),
        ({"model_type": "vit", "patch_size": [16, 16]}, r"patch_size = \[16, 16\]: expected a whole number of at least 1"),
        ({"model_type": "vit", "num_register_tokens": 4}, r"num_register_tokens = 4: the family vit has no such key here"),
        ({"model_type": "siglip", "vision_config": {"use_rope": 1}}, r"vision_config\.use_rope = 1: the family siglip has no"),
        ({"model_type": "siglip", "hidden_size": 8}, r"hidden_size = 8: model_type siglip has no such key"),
        ({"model_type": "gemma3", **PARTS, "audio_config": {}}, r"audio_config = {}: model_type gemma3 has no such key"),
        (
            {"model_type": "gemma3", "text_config": {"clip_qkv": 8}, "vision_config": {"image_size": 256}},
            r"text_config: clip_qkv = 8: the family gemma3 has no such key",
        ),
        (
            {"model_type": "gemma3", "text_config": {}, "vision_config": {"model_type": "vit"}},
            r"vision_config\.model_type = 'vit': expected that of the family siglip",
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {"tie_word_embeddings": False},
                "vision_config": {},
                "tie_word_embeddings": True,
            },
            r"text_config\.tie_word_embeddings = False, tie_word_embeddings = True: both say the same thing",
        ),
        (
            {"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}, "vision_config": {}},
            r"text_config\.final_logit_softcapping = 30\.0: expected null in a model with images",
        ),
    ],
)
def test_what_is_not_understood_is_named(found, message):
    with pytest.raises(UsageError, match=message):
        vision_config.read(found)


def test_what_a_file_leaves_out_is_the_default_of_the_family():
    read = vision_config.read({"model_type": "vit", "architectures": ["ViTForImageClassification"]})
    assert (read.width, read.num_layers, read.norm_eps, read.num_labels) == (768, 12, 1e-12, 2)
    assert vision_config.read({"model_type": "siglip_vision_model"}).norm_eps == 1e-6
    assert vision_config.read({"model_type": "vit", "architectures": ["ViTModel"]}).num_labels is None


def test_gemma3_alone_has_images_in_the_form_of_hugging_face():
    config = hugging_face.read_config(place_of(DATA / "gemma3"))
    other = config._replace(model=dataclasses.replace(config.model, family="gemma2", rope_scaling=None, local_rope_theta=None))
    with pytest.raises(UsageError, match=r"model.family = 'gemma2': expected gemma3"):
        vision_config.write(other, max_length=64, dtype="float32")


def test_a_soft_cap_of_the_logits_is_not_there_with_images():
    config = hugging_face.read_config(place_of(DATA / "gemma3"))
    other = config._replace(model=dataclasses.replace(config.model, logit_softcap=30.0))
    message = r"model.logit_softcap = 30.0: gemma3 with images has none; leave it out"
    with pytest.raises(UsageError, match=message):
        vision_config.write(other, max_length=64, dtype="float32")
    with pytest.raises(UsageError, match=message):
        ImageTextModel(*other, rngs=nnx.Rngs(0))


def test_the_sizes_of_gemma_3_that_its_files_leave_out():
    of_images = {"image_size": 896, "patch_size": 14}
    read = vision_config.read({"model_type": "gemma3", "text_config": {"hidden_size": 2560}, "vision_config": of_images})
    assert (read.model.width, read.model.num_heads, read.model.channels, read.model.vocab_size) == (2560, 8, 256, 262_208)
