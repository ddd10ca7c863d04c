"""Gemma 3 with images: where images come into a row, and what sees what. Its numbers are compared with those of `transformers` in
`hf/test_vision_parity.py`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.config.vision import VisionConfig
from trainers.models.decoder import Decoder
from trainers.models.vlm import ImageTextModel, averaged

IMAGE = 7
MODEL = ModelConfig(family="gemma3", vocab_size=20, width=16, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=24)
SIZES = {"family": "siglip", "image_size": 8, "patch_size": 2, "width": 8, "num_layers": 1, "num_heads": 2, "mlp_width": 16}
VISION = VisionConfig(tokens_per_image=4, image_token=IMAGE, **SIZES)
TOKENS = np.array([[1, *[IMAGE] * 4, 2, 3, *[IMAGE] * 4, 4]], np.int32)
IMAGES = np.random.default_rng(0).normal(size=(1, 2, 8, 8, 3)).astype(np.float32)


def model_of(model=MODEL, vision=VISION):
    return nnx.jit(lambda: ImageTextModel(vision, model, rngs=nnx.Rngs(0)))()


@jax.jit
def hidden_of(model, tokens, images):
    return model.hidden(tokens, images).x_BTD


def changed_places(before, after):
    return np.flatnonzero(np.abs(np.asarray(before) - np.asarray(after)).max((0, 2)) > 1e-6).tolist()


@pytest.mark.slow("compiles a model several times")
def test_an_image_is_seen_by_its_own_tokens_in_both_directions_and_by_later_ones():
    model = model_of()
    before = hidden_of(model, TOKENS, IMAGES)
    first, second = IMAGES.copy(), IMAGES.copy()
    # The last square of each image: its token is the last of the four.
    first[0, 0, 4:, 4:], second[0, 1, 4:, 4:] = 3.0, 3.0
    assert changed_places(before, hidden_of(model, TOKENS, first)) == list(range(1, 12))
    assert changed_places(before, hidden_of(model, TOKENS, second)) == list(range(7, 12))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 2])
def test_tokens_of_a_block_see_each_other_also_backwards_and_later_ones_in_spite_of_a_window(window):
    config = dataclasses.replace(MODEL, num_layers=1, window=window)
    decoder = nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()
    tokens, blocks = np.ones((1, 8), np.int32), np.array([[0, 1, 1, 1, 1, 2, 2, 0]], np.int32)
    embedded = np.random.default_rng(0).normal(size=(1, 8, 16)).astype(np.float32)

    @jax.jit
    def hidden(embedded):
        return decoder.hidden(tokens, embedded_BTD=embedded, blocks_BT=blocks).x_BTD

    def seen_by(place):
        changed = embedded.copy()
        changed[0, place] += 1.0
        return changed_places(hidden(embedded), hidden(changed))

    assert seen_by(4) == ([1, 2, 3, 4, 5, 6, 7] if window is None else [1, 2, 3, 4, 5])
    assert seen_by(1) == ([1, 2, 3, 4, 5, 6, 7] if window is None else [1, 2])


@pytest.mark.slow("compiles a model")
def test_a_text_token_is_seen_by_later_ones_alone():
    model, changed = model_of(), TOKENS.copy()
    changed[0, 6] = 9
    before, after = (hidden_of(model, tokens, IMAGES) for tokens in (TOKENS, changed))
    assert changed_places(before, after) == list(range(6, 12))


def test_the_patches_of_a_square_are_averaged():
    patches = np.arange(16.0).reshape(1, 16, 1)
    found = averaged(jnp.asarray(patches), 4)
    np.testing.assert_allclose(
        found[0, :, 0], [(0 + 1 + 4 + 5) / 4, (2 + 3 + 6 + 7) / 4, (8 + 9 + 12 + 13) / 4, (10 + 11 + 14 + 15) / 4]
    )


def test_a_kernel_that_knows_no_images_is_refused():
    model = model_of(dataclasses.replace(MODEL, attention="blockwise"))
    with pytest.raises(ValueError, match=r"model.attention = 'blockwise': only xla knows tokens of an image"):
        hidden_of(model, TOKENS, IMAGES)


def test_settings_that_make_no_model_are_refused():
    with pytest.raises(UsageError, match=r"vision.tokens_per_image = null"):
        model_of(vision=VisionConfig(**SIZES))
    with pytest.raises(UsageError, match=r"vision.image_token = 7: expected a token of the vocabulary \(model.vocab_size = 7\)"):
        model_of(dataclasses.replace(MODEL, vocab_size=7))
