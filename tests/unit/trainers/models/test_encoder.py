"""The encoder of images: its sizes, first values, named dimensions, and what each setting changes. Its numbers are compared with
those of `transformers` in `hf/test_vision_parity.py`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainers.config.vision import VisionConfig
from trainers.models.encoder import Encoder, patches

SIZES = {"image_size": 12, "patch_size": 4, "num_channels": 2, "width": 16, "num_layers": 3, "num_heads": 2, "mlp_width": 24}
VIT = VisionConfig(family="vit", num_labels=5, **SIZES)
SIGLIP = VisionConfig(family="siglip", attention_pooling=True, **SIZES)
IMAGES = np.random.default_rng(0).normal(size=(2, 12, 12, 2)).astype(np.float32)


@partial(nnx.jit, static_argnames=("config", "dtype", "param_dtype"))
def build(config, dtype=jnp.float32, param_dtype=jnp.float32):
    return Encoder(config, rngs=nnx.Rngs(jax.random.key(0)), dtype=dtype, param_dtype=param_dtype)


def shapes_of(config):
    state = nnx.state(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}


def test_the_parameters_have_the_sizes_of_the_settings():
    layers = {
        **dict.fromkeys(("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias"), (3, 16)),
        **dict.fromkeys(("query", "key", "value", "out"), (3, 16, 16)),
        **{f"{name}_bias": (3, 16) for name in ("query", "key", "value", "out", "down")},
        "up": (3, 16, 24),
        "up_bias": (3, 24),
        "down": (3, 24, 16),
    }
    common = {f"layers.{name}": shape for name, shape in layers.items()} | {
        "patch": (16, 2, 4, 4),
        "patch_bias": (16,),
        "final_norm": (16,),
        "final_norm_bias": (16,),
    }
    of_vit = {"class_token": (1, 1, 16), "positions": (1, 10, 16), "head": (16, 5), "head_bias": (5,)}
    assert shapes_of(VIT) == common | of_vit
    found = shapes_of(SIGLIP)
    pooling = {name: found.pop(name) for name in list(found) if name.startswith("pooling.")}
    assert found == common | {"positions": (9, 16)}
    assert (pooling["pooling.probe"], pooling["pooling.query_key_value"]) == ((1, 1, 16), (16, 48))


@pytest.mark.parametrize("changes", [{"num_heads": 4}, {"norm_eps": 0.5}])
@pytest.mark.slow("compiles a model several times")
def test_a_setting_without_parameters_changes_the_result(changes):
    other = VisionConfig(family="vit", num_labels=5, **{**SIZES, **changes})
    logits = [np.asarray(jax.jit(lambda model: model(IMAGES))(build(config))) for config in (VIT, other)]
    assert logits[0].shape == (2, 5)
    # Not what the head's bias alone gives.
    assert np.abs(logits[0] - logits[1]).max() > 1e-5


@pytest.mark.slow("compiles a model several times")
def test_what_is_computed_again_changes_no_result():
    again = VisionConfig(family="vit", num_labels=5, remat="full", **SIZES)
    models = [build(config) for config in (VIT, again)]

    def gradients(model):
        return jax.grad(lambda images: jnp.sum(model(images) ** 2))

    found = [jax.jit(gradients(model))(IMAGES) for model in models]
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)
    assert "remat" not in str(jax.make_jaxpr(gradients(models[0]))(IMAGES))
    assert "remat" in str(jax.make_jaxpr(gradients(models[1]))(IMAGES))


def test_patches_come_row_by_row_and_colour_by_colour():
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    found = np.asarray(patches(jnp.asarray(images), 2))
    assert found.shape == (2, 6, 12)
    np.testing.assert_array_equal(found[1, 4], images[1, 2:4, 2:4].transpose(2, 0, 1).ravel())


def test_every_parameter_names_its_dimensions():
    for config in (VIT, SIGLIP):
        state = nnx.state(nnx.eval_shape(lambda config=config: Encoder(config, rngs=nnx.Rngs(0))))
        for path, leaf in nnx.to_flat_state(state):
            assert len(leaf.get_metadata("logical_axes")) == len(leaf.shape), path


@pytest.mark.slow("compiles a model several times")
def test_computation_and_parameters_have_the_types_asked_for():
    model = build(VIT, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
    hidden = jax.eval_shape(lambda: model.hidden(IMAGES))
    assert (hidden.dtype, jax.eval_shape(lambda: model(IMAGES)).dtype) == (jnp.bfloat16, jnp.float32)


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"images of \[8, 12, 2\]: expected \[12, 12, 2\] by the section vision"):
        jax.eval_shape(lambda: build(VIT)(IMAGES[:, :8]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "vitt"}, r"family = 'vitt': expected one of vit, siglip"),
        ({"patch_size": 5}, r"patch_size = 5: expected a divisor of image_size \(224\)"),
        ({"num_heads": 5}, r"num_heads = 5: expected a divisor of width \(768\)"),
        ({"width": 0}, r"width = 0: expected at least 1"),
        ({"remat": "some"}, r"remat = 'some': expected one of none"),
        ({"family": "siglip", "num_labels": 3}, r"num_labels = 3: family siglip has no head that scores classes"),
        ({"attention_pooling": True}, r"attention_pooling = true: family vit has a class token"),
        ({"family": "siglip", "tokens_per_image": 4}, r"image_token = None: a decoder needs both"),
        ({"tokens_per_image": 4, "image_token": 1}, r"expected family siglip without attention_pooling"),
        (
            {"family": "siglip", "tokens_per_image": 5, "image_token": 1},
            r"tokens_per_image = 5: expected one of 1, 4, 49, 196, the squares of the divisors of 14 patches a side",
        ),
    ],
)
def test_settings_that_make_no_encoder_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VisionConfig(**settings)
