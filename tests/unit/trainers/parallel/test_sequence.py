"""Sequences over the axis `context`: the order of their tokens, and back."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from trainers.config import MeshConfig
from trainers.parallel import mesh as meshes
from trainers.parallel import sequence

TIME = 24


def test_each_device_has_an_early_and_a_late_chunk():
    assert sequence.slots(12, 3).reshape(3, 4).tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@pytest.mark.parametrize(("parts", "others"), [(1, {}), (2, {"data": 2, "tensor": 2}), (3, {"fsdp": 2}), (4, {"expert": 2})])
def test_the_orders_are_each_others_inverse(parts, others):
    sizes = {"data": 1, "context": parts, **others}
    mesh = meshes.make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])
    tokens = np.arange(2 * TIME, dtype=np.int32).reshape(2, TIME)
    x = tokens[..., None] * np.ones(4, np.float32)

    def both(tokens, x):
        there = sequence.balanced_from_parts(x)
        return sequence.balanced(tokens), there, sequence.in_order(there)

    of_tokens, there, back = jax.jit(meshes.tracing_for(mesh, both))(tokens, x)
    order = sequence.slots(TIME, parts)
    np.testing.assert_array_equal(of_tokens, tokens[:, order] if parts > 1 else tokens)
    np.testing.assert_array_equal(there, x[:, order] if parts > 1 else x)
    np.testing.assert_array_equal(back, x)
    assert there.sharding.shard_shape(there.shape)[1] == TIME // parts


def test_a_mesh_without_the_axis_is_the_one_of_before():
    assert MeshConfig(context=1, fsdp=2).resolve(4) == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 1}
    assert list(MeshConfig(context=-1, data=2).resolve(8)) == ["data", "fsdp", "expert", "context", "tensor"]
    assert MeshConfig(context=-1, data=2).resolve(8)["context"] == 4


def test_a_row_of_another_length_is_an_error_where_it_is_traced():
    mesh = meshes.make_mesh(MeshConfig(context=4), jax.devices()[:4])
    traced = meshes.tracing_for(mesh, lambda x: sequence.check_length(x.shape[1]))
    with pytest.raises(ValueError, match=r"mesh\.context = 4: the tokens of a sequence = 30 is .* = 24 or 32"):
        jax.eval_shape(traced, np.zeros((2, 30)))


def test_parameters_are_divided_over_the_axis_too_where_it_divides_them():
    mesh = meshes.make_mesh(MeshConfig(data=1, fsdp=2, context=3), jax.devices()[:6])

    def spec(*shape):
        return meshes.parameter_sharding(mesh, ("embed", "mlp"), shape).spec

    assert spec(12, 4)[0] == ("fsdp", "context")
    assert spec(8, 4)[0] == "fsdp"
    assert spec(9, 4)[0] is None
