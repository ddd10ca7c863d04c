"""Each device of the axis `tensor` keeps, and computes the norms of, its part of the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from trainers.config import MeshConfig, ModelConfig
from trainers.models.decoder import Decoder
from trainers.parallel import mesh as meshes
from trainers.parallel.sequence import WHOLE, TokenParts

LAYERS, BATCH, TIME, WIDTH = 3, 4, 16, 24
MODEL = ModelConfig(width=WIDTH, num_layers=LAYERS, num_heads=2, num_kv_heads=2, mlp_width=40, remat="full")


def found(shape, **sizes):
    """Returns the parts of activations of this shape on a mesh of these sizes."""
    mesh = meshes.make_mesh(MeshConfig(**{"data": 1, **sizes}), jax.devices()[: int(np.prod([*sizes.values()]))])
    told = []
    jax.eval_shape(meshes.tracing_for(mesh, lambda x: told.append(TokenParts.of(x))), jax.ShapeDtypeStruct(shape, jnp.float32))
    return told[0]


@pytest.mark.parametrize(
    ("shape", "sizes", "own"),
    [
        ((64, 8), {"fsdp": 2, "tensor": 2}, (("data", "fsdp", "expert", "tensor"),)),
        ((4, 16, 8), {"context": 2, "tensor": 2}, (("data", "fsdp", "expert"), ("context", "tensor"))),
        ((64, 8), {"fsdp": 4}, None),
        # Tokens that do not divide, which a last batch of an evaluation may have: all of them, on each device.
        ((6, 8), {"fsdp": 2, "tensor": 2}, None),
        ((2, 14, 8), {"context": 2, "tensor": 2}, None),
    ],
)
def test_the_tokens_of_a_replica_are_divided_over_the_axis(shape, sizes, own):
    parts = found(shape, **sizes)
    assert parts == WHOLE if own is None else parts.own_tokens.spec == PartitionSpec(*own)


@pytest.mark.slow("compiles a model for several devices")
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_device_keeps_its_part_of_what_each_layer_has_read(tensor):
    """So the step of Llama 3 70B on v5p needs 18.8 GB of a device; with all tokens it was 51.4 GB."""
    mesh = meshes.make_mesh(MeshConfig(data=2 // tensor, tensor=tensor), jax.devices()[:2])
    graph, params = nnx.split(Decoder(MODEL, rngs=nnx.Rngs(0)))
    tokens = np.arange(BATCH * TIME, dtype=np.int32).reshape(BATCH, TIME)

    def loss(params):
        return jnp.mean(nnx.merge(graph, params)(tokens) ** 2)

    gradient = jax.jit(meshes.tracing_for(mesh, jax.grad(loss)), in_shardings=meshes.replicated(mesh))
    text = gradient.lower(params).compile().as_text()
    kept = {part: f"f32[{LAYERS},{BATCH * TIME // part},{WIDTH}]" in text for part in (1, 2)}
    # On the axis `data` each device has its own examples.
    assert kept == {1: False, 2: True}
