"""Texts that the model generates: the decoder with a cache against the model without one, sampling, previews of a run."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import UsageError
from tests.unit.training import assert_equal, losses, of, trainer
from trainers.config import DataConfig, MeshConfig, ModelConfig, PreviewConfig
from trainers.config.arguments import TrainingArguments
from trainers.config.model import UNROLLED_LAYERS
from trainers.evaluation.previews import Previews
from trainers.models.decoder import Decoder
from trainers.models.decoding import decode, pick
from trainers.parallel import mesh as meshes
from trainers.runtime.executables import ProgramStore
from trainers.step import rng
from trainers.step.state import abstract_model
from trainers.tasks.causal_lm import CausalLMTask

PROMPTS = ("a", "def foo(", "xyz", "some longer text")
SMALL = {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 48}
NEW = 12


def task_of(window=64, **model):
    model = ModelConfig(**{**SMALL, **model})
    return CausalLMTask(TrainingArguments(name="t", max_num_steps=1, model=model, data=DataConfig(sequence_length=window)))


def parameters(task, mesh):
    """Far from each other, so that no two tokens are equally likely; sharded as in training."""
    parts, shapes, axes = abstract_model(task, 0)
    noise = np.random.default_rng(1)

    def drawn(path, leaf):
        return 0.4 * noise.standard_normal(leaf.shape, np.float32) + ("norm" in jax.tree_util.keystr(path))

    params = jax.tree_util.tree_map_with_path(drawn, shapes)
    places = jax.tree.map(lambda leaf, names: meshes.parameter_sharding(mesh, names, leaf.shape), shapes, axes)
    return parts, jax.device_put(params, places)


def previews_of(task, mesh, config, parts, seed=0):
    return Previews.of(task, parts.merge, config, mesh, seed, ProgramStore(None, "", print))


def likeliest(parts):
    """A function of (params, texts): the token that follows each, from the whole text before it."""

    @jax.jit
    def at(params, tokens, lengths):
        logits = parts.merge(params)(tokens)
        return jnp.argmax(jnp.take_along_axis(logits, lengths[:, None, None] - 1, 1)[:, 0], -1)

    def follows(params, texts, room=32):
        tokens = np.array([[*text, *[0] * (room - len(text))] for text in texts], np.int32)
        return np.asarray(at(params, tokens, np.array([len(text) for text in texts]))).tolist()

    return follows


def without_a_cache(parts, params, prompts, num_tokens):
    texts, follows = [list(prompt) for prompt in prompts], likeliest(parts)
    for _ in range(num_tokens):
        for text, token in zip(texts, follows(params, texts), strict=True):
            text.append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        ({"data": 8}, {}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"num_kv_heads": 2, "tie_embeddings": False}),
        ({"data": 1, "fsdp": 2, "tensor": 4}, {"num_kv_heads": 1, "num_layers": UNROLLED_LAYERS + 1}),
    ],
)
@pytest.mark.slow("compiles a decoder and a step")
def test_greedy_texts_are_those_of_the_model_without_a_cache_token_for_token(mesh, model):
    task, mesh = task_of(**model), meshes.make_mesh(MeshConfig(**mesh))
    parts, params = parameters(task, mesh)
    shown = []
    task.decode = lambda tokens: shown.append(tokens) or "text"
    previews = previews_of(task, mesh, PreviewConfig(prompts=PROMPTS, num_tokens=NEW, greedy=True), parts)(params, 3)
    assert previews == [{"prompt": prompt, "text": "text"} for prompt in PROMPTS]
    whole = jax.device_put(params, jax.devices()[0])
    expected = without_a_cache(parts, whole, [prompt.encode() for prompt in PROMPTS], NEW)
    assert shown == expected
    assert len({token for text in expected for token in text}) > NEW  # not one token again and again


def test_positions_count_from_the_beginning_of_each_prompt():
    class Positions:
        """Says which position it was given last. (Of a rotary model distances alone matter.)"""

        def init_cache(self, batch, length):
            return jnp.zeros((1, batch, length, 1, 1))

        def decode_step(self, tokens, positions, mask, cache, slot):
            return jax.nn.one_hot(positions[:, -1], 9), cache

    config = PreviewConfig(num_tokens=3, greedy=True)
    tokens = decode(
        Positions(), jnp.zeros((2, 4), jnp.int32), jnp.array([1, 4]), rng.key(0, "preview", 0), config=config, window=9
    )
    assert tokens.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_parameters_stay_where_they_are_and_the_cache_is_shared_out():
    task, mesh = task_of(), meshes.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    parts, params = parameters(task, mesh)
    previews = previews_of(task, mesh, PreviewConfig(prompts=PROMPTS, num_tokens=NEW), parts)
    previews(params, 0)
    places = previews.program.compiled.input_shardings[0][0]
    jax.tree.map(lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim) or pytest.fail(str(place)), params, places)
    # Of the cache [2 layers, 4 rows, 16 + 12 slots, 2 heads, 8] a device holds one row and one head.
    text = previews.program.compiled.as_text()
    assert "f32[2,1,28,1,8]" in text
    assert "f32[2,4,28,2,8]" not in text


def test_past_the_window_the_oldest_tokens_are_forgotten():
    task, mesh = task_of(window=6, num_layers=1), meshes.make_mesh(MeshConfig(data=8))
    parts, params = parameters(task, mesh)
    shown = []
    task.decode = lambda tokens: shown.append(tokens) or ""
    previews_of(task, mesh, PreviewConfig(prompts=("abcdefghij",), num_tokens=20, greedy=True), parts)(params, 0)
    # With one layer, what a token knows is the last tokens themselves.
    text, whole, follows = list(b"efghij"), jax.device_put(params, jax.devices()[0]), likeliest(parts)
    for token in shown[0]:
        # Counted from the window's beginning or from the text's: only distances between positions matter.
        assert [token] == follows(whole, [text[-6:]])
        text.append(token)


def keys(seed, step, rows):
    return jax.random.split(rng.key(seed, "preview", step), rows)


def draws(logits, seed=0, rows=4000, **config):
    logits = jnp.broadcast_to(jnp.log(jnp.array(logits)), (rows, len(logits)))
    tokens = np.asarray(jax.jit(partial(pick, config=PreviewConfig(**config)))(logits, keys(seed, 0, rows)))
    return np.bincount(tokens, minlength=logits.shape[1]) / rows


P = np.array([0.05, 0.4, 0.15, 0.3, 0.1])


def normal(p):
    return np.asarray(p) / np.sum(p)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 1.0}, P),
        ({"temperature": 0.5}, normal(P**2)),
        ({"temperature": 1.0, "top_k": 2}, normal([0, 0.4, 0, 0.3, 0])),
        ({"temperature": 1.0, "top_k": 99}, P),
        ({"temperature": 1.0, "top_p": 0.65}, normal([0, 0.4, 0, 0.3, 0])),
        ({"temperature": 1.0, "top_p": 0.75}, normal([0, 0.4, 0.15, 0.3, 0])),
        ({"temperature": 1.0, "top_p": 0.01}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, normal([0, 0.4, 0, 0.3, 0])),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
        ({"greedy": True}, [0, 1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_by_the_probabilities_asked_for(config, expected):
    np.testing.assert_allclose(draws(P, **config), expected, atol=0.03)


def test_a_draw_depends_on_its_own_key_and_on_no_other_row():
    logits = np.random.default_rng(0).standard_normal((50, 9), np.float32)
    draw = jax.jit(partial(pick, config=PreviewConfig(temperature=1.0)))
    first, again, other = (np.asarray(draw(logits, keys(0, step, 50))) for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(draw(logits[:20], keys(0, 0, 50)[:20]), first[:20])
    assert len(set(np.asarray(draw(np.broadcast_to(logits[0], (50, 9)), keys(0, 0, 50))).tolist())) > 3


@pytest.mark.slow("compiles a decoder and a step")
def test_the_mesh_does_not_change_what_is_drawn():
    task = task_of(num_layers=1)
    config = PreviewConfig(prompts=("same", "same"), num_tokens=NEW, temperature=1.0)
    shown = []
    for sizes in ({"data": 8}, {"data": 1, "fsdp": 2, "tensor": 4}):
        mesh = meshes.make_mesh(MeshConfig(**sizes))
        parts, params = parameters(task, mesh)
        previews = previews_of(task, mesh, config, parts)
        shown.append([[one["text"] for one in previews(params, step)] for step in (0, 0, 1)])
    assert shown[0] == shown[1]
    first, again, later = shown[0]
    assert first == again != later
    assert first[0] != first[1]


# ------------------------------------------------------------------ in a run

RUN = {
    "task": "trainers.tasks.causal_lm:CausalLMTask",
    "model": SMALL,
    "max_num_steps": 6,
    "checkpoint": {"save_at_end": False},
    "evaluation": {"max_batches": 1},
}
PREVIEWS = {"every_steps": 2, "prompts": ["ab", "def "], "num_tokens": 5}


@pytest.mark.slow("compiles a decoder and a step")
def test_every_n_steps_and_at_the_end_without_an_effect_on_training(tmp_path, events):
    plain = trainer(tmp_path / "plain", **RUN, previews={"prompts": []})
    expected = plain.train()
    assert plain.output.metrics["sample"] is None
    assert of(events, "preview") == []
    wanted = losses(events)
    events.clear()
    made = trainer(tmp_path / "shown", **RUN, previews=PREVIEWS)
    assert_equal(expected.params, made.train().params)
    assert losses(events) == wanted
    assert [event["step"] for event in of(events, "preview")] == [2, 4, 6]
    assert [[shown["prompt"] for shown in event["previews"]] for event in of(events, "preview")] == [["ab", "def "]] * 3
    assert made.output.metrics["sample"].startswith("ab")
    phases = [event["phase"] for event in of(events, "phase")]
    assert phases[phases.index("preview") + 1] == "train"


class Wordless(CausalLMTask):
    """Fails to put its tokens into words, and once to make them."""

    broken = "decode"

    def encode(self, text):
        return super().encode(text) if self.broken == "decode" else []

    def decode(self, tokens):
        raise RuntimeError("no words for it")


class Silent(Wordless):
    broken = "encode"


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize(
    ("task", "why"),
    [("Wordless", "RuntimeError: no words for it"), ("Silent", "UsageError: previews.prompts: 'ab' has no tokens")],
)
def test_a_failing_preview_is_reported_and_training_goes_on(tmp_path, events, task, why):
    made = trainer(tmp_path, **{**RUN, "task": f"tests.unit.trainers.evaluation.test_previews:{task}"}, previews=PREVIEWS)
    assert int(made.train().step) == 6
    notes = [event["message"] for event in of(events, "note") if "preview" in event["message"]]
    assert len(notes) == 4  # at steps 2, 4, 6 and at the end
    assert notes[0].startswith(f"no previews at step 2: {why}")
    assert made.output.metrics["sample"] is None


def test_previews_of_a_task_that_cannot_generate_are_an_error_at_once_if_asked_for(tmp_path):
    assert trainer(tmp_path).placement.previews is None
    with pytest.raises(UsageError, match=r"previews\.every_steps = 2: TableTask has no encode and decode"):
        trainer(tmp_path, previews=PREVIEWS).train()


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="top_p = 0: expected 0 < top_p <= 1"):
        PreviewConfig(top_p=0)
    with pytest.raises(ValueError, match=r"prompts = \['a', ''\]: expected at least one character in each"):
        PreviewConfig(prompts=("a", ""))


class Moody(Decoder):
    """While it trains, it prefers the token 7."""

    deterministic = False

    def decode_step(self, *given):
        logits, cache = super().decode_step(*given)
        return logits + (0.0 if self.deterministic else 1e6 * jax.nn.one_hot(7, logits.shape[-1])), cache


def test_previews_are_of_the_model_in_evaluation_mode():
    task, mesh = task_of(), meshes.make_mesh(MeshConfig())
    task.build_model = lambda rngs: Moody(task.arguments.model, rngs=rngs, dtype="float32", param_dtype="float32")
    parts, params = parameters(task, mesh)
    task.decode = str
    config = PreviewConfig(prompts=PROMPTS, num_tokens=2, greedy=True)
    assert str([7, 7]) not in [preview["text"] for preview in previews_of(task, mesh, config, parts)(params, 0)]
