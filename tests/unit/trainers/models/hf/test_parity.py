"""Each family against `transformers`: logits, loss, gradients, greedy tokens, packed rows, a mesh; and back into its files.

`tests/unit/data/parity` has tiny random models with what `transformers` computes for them; `make parity` makes it.
"""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file

from tests import ROOT
from tests.unit.hf_folders import nested, parameters_of, tensors_of
from trainers.config import MeshConfig, PreviewConfig
from trainers.models.decoder import Decoder
from trainers.models.decoding import decode
from trainers.models.experts import load_balancing_loss
from trainers.models.hf import config as hf_config
from trainers.models.hf.computed import of_model
from trainers.parallel import mesh as meshes
from trainers.step.state import logical_axes

FOLDERS = sorted((ROOT / "tests" / "unit" / "data" / "parity").iterdir())
WITH_EXPERTS = [folder for folder in FOLDERS if folder.name in ("mixtral", "qwen3_moe")]
OF_EXPERTS = pytest.mark.parametrize("family", WITH_EXPERTS, indirect=True, ids=lambda folder: folder.name)
PROMPT = 5


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def family(request):
    folder = request.param
    config = hf_config.read(json.loads((folder / "config.json").read_text()))
    return config, folder, load_file(folder / "expected.safetensors")


@pytest.fixture(scope="module")
def model(family):
    config, folder, _ = family
    return with_weights(config, nested(parameters_of(folder)))


def with_weights(config, params):
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    expected = jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(state))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == expected
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
    return nnx.merge(graph, state)


@jax.jit
def logits_of(model, tokens, positions=None, segments=None):
    return model(tokens, positions, segments)


def assert_near(found, expected, tolerance=1e-5):
    """Relative to the largest value."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_logits(family, model):
    expected = family[2]
    assert_near(logits_of(model, expected["tokens"]), expected["logits"])


@pytest.mark.sampled(3)
def test_loss_and_gradients(family, model):
    config, _, expected = family
    tokens, (graph, state) = expected["tokens"], nnx.split(model)

    def loss(params):
        logits = nnx.merge(graph, params)(tokens)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]))

    value, gradients = jax.jit(jax.value_and_grad(loss))(state)
    assert float(value) == pytest.approx(expected["loss"].item(), rel=1e-5)
    theirs = tensors_of(config, jax.tree.map(np.asarray, nnx.to_pure_dict(gradients)))
    named = {name.removeprefix("gradient."): value for name, value in expected.items() if name.startswith("gradient.")}
    assert named.keys() == theirs.keys()
    for name, sample in named.items():
        found = theirs[name]
        places = np.linspace(0, found.size - 1, min(found.size, 31)).astype(int)
        values = np.concatenate([[np.linalg.norm(found)], found.ravel()[places]])
        np.testing.assert_allclose(values, sample, rtol=0, atol=1e-4 * sample[0], err_msg=name)


@pytest.mark.sampled(3)
def test_greedy_tokens_by_the_cache(family, model):
    expected = family[2]
    prompts, greedy = expected["tokens"][:, :PROMPT], expected["greedy"]
    settings = PreviewConfig(greedy=True, num_tokens=greedy.shape[1])
    lengths = jnp.full(len(prompts), PROMPT)

    @jax.jit
    def run(model):
        return decode(model, jnp.asarray(prompts), lengths, jax.random.key(0), config=settings, window=10**6)

    np.testing.assert_array_equal(run(model), greedy)


@pytest.mark.slow("compiles decoders of several families")
def test_packed_rows_are_their_documents_alone(family, model):
    tokens = family[2]["tokens"]
    lengths = (13, 7, 20)
    segments = np.repeat(np.arange(1, 4), lengths)[None]
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    packed = np.asarray(logits_of(model, tokens[:1], positions, segments))
    documents = np.split(tokens[0, : sum(lengths)], np.cumsum(lengths)[:-1])
    # In rows of their own; what fills up a row comes after its document, which does not see it.
    rows = np.stack([np.pad(document, (0, max(lengths) - len(document))) for document in documents])
    alone = np.asarray(logits_of(model, rows))
    start = 0
    for row, length in zip(alone, lengths, strict=True):
        assert_near(packed[0, start : start + length], row[:length])
        start += length


@pytest.mark.slow("compiles decoders of several families")
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}])
def test_on_a_mesh(family, model, sizes):
    expected = family[2]
    mesh = meshes.make_mesh(MeshConfig(**sizes))
    graph, state = nnx.split(model)

    def placed(leaf, axes):
        return jax.device_put(leaf, meshes.parameter_sharding(mesh, axes, leaf.shape))

    params = jax.tree.map(placed, nnx.to_pure_dict(state), logical_axes(state))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
    nnx.replace_by_pure_dict(state, params)
    assert_near(logits_of(nnx.merge(graph, state), expected["tokens"]), expected["logits"])


@pytest.mark.slow("compiles a decoder for a mesh")
@OF_EXPERTS
def test_experts_on_a_mesh(family, model):
    """As a train step has it: with the axis of the experts, over which the model divides its work by hand."""
    expected = family[2]
    mesh = meshes.make_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2))
    graph, state = nnx.split(model)
    shardings = jax.tree.map(
        lambda leaf, axes: meshes.parameter_sharding(mesh, axes, leaf.shape), nnx.to_pure_dict(state), logical_axes(state)
    )
    assert shardings["layers"]["expert_up"].spec == PartitionSpec(None, "expert", "fsdp", "tensor")
    params = jax.device_put(nnx.to_pure_dict(state), shardings)
    tokens = np.tile(expected["tokens"], (2, 1))  # a row for each replica

    @jax.jit
    @partial(meshes.tracing_for, mesh)
    def logits(params, tokens):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(tokens)

    assert_near(logits(params, tokens), np.tile(expected["logits"], (2, 1, 1)))


@OF_EXPERTS
def test_the_load_balancing_loss_is_theirs(family, model):
    expected = family[2]
    counted = jnp.ones(expected["tokens"].shape)
    found = jax.jit(lambda model: load_balancing_loss(model.hidden(expected["tokens"], counted_BT=counted).router))(model)
    assert float(found) == pytest.approx(expected["load_balancing_loss"].item(), rel=1e-5)


def test_their_files_come_back_bit_for_bit(family):
    config, folder, _ = family
    tensors, again = load_file(folder / "model.safetensors"), tensors_of(config, parameters_of(folder))
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        assert again[name].dtype == value.dtype
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_the_configuration_comes_back(family):
    config = family[0]
    assert of_model(hf_config.read(hf_config.write(config, max_length=64, dtype="float32"))) == of_model(config)
