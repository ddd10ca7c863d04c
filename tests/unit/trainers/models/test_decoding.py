"""Generation with a cache: layers with a window keep their window alone, prompts of any lengths together, stop tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainers.config import ModelConfig, PreviewConfig
from trainers.models import kv_cache
from trainers.models.decoder import Decoder
from trainers.models.decoding import begin, decode, go_on

SMALL = {"vocab_size": 61, "width": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24}
WINDOW, NEW = 4, 11
MODELS = {
    "all layers see all": {"num_layers": 2},
    "all have a window": {"num_layers": 2, "family": "mistral", "window": WINDOW},
    "every third sees all, and two are left": {
        "num_layers": 8,
        "family": "gemma3",
        "window": WINDOW,
        "global_every": 3,
        "local_rope_theta": 100.0,
    },
    "every second sees all, in whole groups": {"num_layers": 4, "family": "gemma2", "window": WINDOW, "global_every": 2},
}
STACKS = [
    {"wide": [2, 1, 9, 1, 8]},
    {"rest": [2, 1, WINDOW, 1, 8]},
    {"wide": [2, 1, 9, 1, 8], "near": [2, 2, 1, WINDOW, 1, 8], "rest": [2, 1, WINDOW, 1, 8]},
    {"wide": [2, 1, 9, 1, 8], "near": [2, 1, 1, WINDOW, 1, 8]},
]
LENGTHS = (3, 9, 1, 12)
GREEDY = PreviewConfig(greedy=True, num_tokens=NEW)


def model_of(name):
    model = Decoder(ModelConfig(**SMALL, **MODELS[name]), rngs=nnx.Rngs(0))
    noise = np.random.default_rng(1)
    # Far from each other, so that no two tokens are equally likely.
    nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.4 * noise.standard_normal(leaf.shape, np.float32), nnx.state(model)))
    return model


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return model_of(request.param)


def prompts(lengths=LENGTHS):
    draw = np.random.default_rng(2)
    return [draw.integers(0, SMALL["vocab_size"], length).tolist() for length in lengths]


def aligned(texts, width=None):
    width = width or max(map(len, texts))
    tokens = np.array([[0] * (width - len(text)) + text for text in texts], np.int32)
    return tokens, np.array([len(text) for text in texts], np.int32)


def without_a_cache(model, texts, number):
    @jax.jit
    def follows(tokens, lengths):
        return jnp.argmax(jnp.take_along_axis(model(tokens), lengths[:, None, None] - 1, 1)[:, 0], -1)

    texts = [list(text) for text in texts]
    for _ in range(number):
        padded = np.array([text + [0] * (24 - len(text)) for text in texts], np.int32)
        for text, token in zip(texts, follows(padded, np.array([len(text) for text in texts])).tolist(), strict=True):
            text.append(token)
    return [text[-number:] for text in texts]


def generate(model, texts, config=GREEDY, stop_ids=(), seeds=None, steps=(NEW,), width=None):
    tokens, lengths = aligned(texts, width)
    keys = jnp.stack([jax.random.key(seed) for seed in (seeds or range(len(texts)))])
    progress = jax.jit(partial(begin, num_tokens=config.num_tokens, window=99))(model, tokens, lengths)
    advance = jax.jit(partial(go_on, prompt=tokens.shape[1], config=config, stop_ids=stop_ids, window=99))
    for until in steps:
        progress = advance(model, progress, lengths, keys, until)
    return [row[:num].tolist() for row, num in zip(np.asarray(progress.tokens_BN), np.asarray(progress.num_B), strict=True)]


@pytest.mark.slow("compiles a model several times")
def test_greedy_tokens_are_those_without_a_cache_also_past_the_window(model):
    texts = prompts()
    expected = without_a_cache(model, texts, NEW)
    assert generate(model, texts) == expected
    tokens, lengths = aligned(texts)
    run = jax.jit(partial(decode, config=GREEDY, window=99))
    assert run(model, tokens, lengths, jax.random.key(0)).tolist() == expected
    assert len({token for row in expected for token in row}) > 4  # not one token again and again


@pytest.mark.parametrize(("name", "stacks"), list(zip(MODELS, STACKS, strict=True)))
def test_layers_with_a_window_keep_no_more_than_that(name, stacks):
    cache = kv_cache.empty(ModelConfig(**SMALL, **MODELS[name]), 1, 9, jnp.float32)
    assert {stack: list(slots["key"].shape) for stack, slots in cache.items()} == stacks
    short = kv_cache.empty(ModelConfig(**SMALL, **MODELS[name]), 1, 2, jnp.float32)
    assert {slots["value"].shape[-3] for slots in short.values()} == {2}


@pytest.mark.slow("compiles a model several times")
def test_many_prompts_at_once_get_what_each_gets_alone(model):
    texts = prompts()
    drawn = PreviewConfig(temperature=1.0, top_k=20, num_tokens=NEW)
    together = generate(model, texts, drawn, seeds=[5, 6, 7, 8])
    alone = [generate(model, [text], drawn, seeds=[seed])[0] for text, seed in zip(texts, [5, 6, 7, 8], strict=True)]
    assert together == alone
    assert generate(model, texts, drawn, seeds=[15, 6, 7, 8])[0] != together[0]


@pytest.mark.slow("compiles a model in several forms")
def test_a_generation_goes_on_where_it_stopped(model):
    texts = prompts((3, 9))
    assert generate(model, texts, steps=(1, 2, 7, NEW + 5)) == generate(model, texts)


@pytest.mark.slow("compiles a model several times")
def test_a_stop_token_ends_its_row_alone_and_the_last_one_ends_all():
    model, texts = model_of("all layers see all"), prompts((3, 9))
    first, second = generate(model, texts)
    stop = next(token for token in first if token not in second)
    rows = generate(model, texts, stop_ids=(stop, 60))
    assert rows == [first[: first.index(stop) + 1], second]
    tokens, lengths = aligned(texts)
    progress = begin(model, tokens, lengths, num_tokens=NEW, window=99)
    stops = (first[0], second[1])
    keys = jax.random.split(jax.random.key(0), 2)
    progress = go_on(
        model, progress, lengths, keys, jnp.int32(NEW), prompt=tokens.shape[1], config=GREEDY, stop_ids=stops, window=99
    )
    assert (int(progress.at), progress.done_B.tolist()) == (2, [True, True])
    assert progress.num_B.tolist() == [1, second.index(second[1]) + 1]


@pytest.mark.slow("compiles a decoder")
def test_rows_without_a_prompt_are_done():
    model = model_of("all layers see all")
    assert generate(model, [[], [1, 2]])[0] == []
