"""Texts after images: what the cache gives is what the whole model gives."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from tests.programs.tiny_images import IMAGE, MODEL, VISION
from trainers.config import MeshConfig, PreviewConfig
from trainers.evaluation.generation import Generator, keys_of
from trainers.models.vlm import ImageTextModel
from trainers.parallel.mesh import make_mesh

NEW, LONGEST = 8, 24
PROMPTS = [[5, *[IMAGE] * 4, 2, 3], [1, *[IMAGE] * 4, 2, 3, *[IMAGE] * 4, 4], [*[IMAGE] * 4, 6]]
IMAGES = list(np.random.default_rng(0).normal(size=(3, 2, 8, 8, 3)).astype(np.float32))


@pytest.fixture(scope="module")
def model():
    made = nnx.jit(lambda: ImageTextModel(VISION, MODEL, rngs=nnx.Rngs(1)))()
    graph, params = nnx.split(made)
    # Larger than at the start of a training, and norms too, so that each token depends on all that it sees.
    random = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf + 0.3 * random.normal(size=leaf.shape).astype(np.float32), params))


@pytest.fixture(scope="module")
def generator(model):
    graph, params = nnx.split(model)
    return Generator(
        merge=lambda params: nnx.merge(graph, params),
        params=params,
        mesh=make_mesh(MeshConfig(data=1, tensor=1), jax.devices()[:1]),
        decode=lambda tokens: " ".join(map(str, tokens)),
        sampling=PreviewConfig(prompts=(), num_tokens=NEW, temperature=0.0),
        window=64,
        rows=2,
    )


@pytest.fixture(scope="module")
def plainly(model):
    """Continues a prompt by the whole model, without a cache, token by token."""

    @jax.jit
    def whole(tokens, images):
        return model(tokens[None], images[None])[0]

    def continued(prompt, images):
        tokens = list(prompt)
        for _ in range(NEW):
            padded = np.array(tokens + [9] * (LONGEST - len(tokens)), np.int32)
            tokens.append(int(np.asarray(whole(padded, images))[len(tokens) - 1].argmax()))
        return tokens[len(prompt) :]

    return continued


@pytest.mark.slow("compiles a decoder and a step")
def test_greedy_texts_are_those_of_the_whole_model(generator, plainly):
    """Of prompts of several lengths, with one image or two, in a model with wide and near layers."""
    found = [each.tokens for each in generator.all(PROMPTS, IMAGES)]
    assert found == [plainly(prompt, images) for prompt, images in zip(PROMPTS, IMAGES, strict=True)]
    assert not any(IMAGE in tokens for tokens in found)
    others = [each.tokens for each in generator.all(PROMPTS, IMAGES[::-1])]
    assert all(other != tokens for other, tokens in zip(others[::2], found[::2], strict=True))


@pytest.mark.slow("compiles a decoder and a step")
def test_a_text_without_images_is_continued_by_the_decoder(generator, model):
    (found,) = generator.all([[5, 2, 3]])
    whole = jax.jit(model.decoder.__call__)(np.array([[5, 2, 3]]))
    assert found.tokens[0] == int(np.asarray(whole)[0, -1].argmax())


def test_what_is_drawn_depends_on_the_images_and_not_on_the_other_prompts():
    both = jax.random.key_data(keys_of(3, [PROMPTS[0]] * 2, IMAGES[:2])).tolist()
    alone = jax.random.key_data(keys_of(3, [PROMPTS[0]], IMAGES[1:2])).tolist()
    assert both[1:] == alone
    assert both[0] != both[1]
