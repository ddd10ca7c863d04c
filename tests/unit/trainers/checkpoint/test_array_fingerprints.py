"""Fingerprints of arrays: of every bit, on any mesh, the same from one version to the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from trainers.checkpoint.fingerprints import fingerprints

WIDE = (np.int64, np.uint64, np.float64, np.complex64, np.complex128)


traced = jax.jit(fingerprints)


def of(array):
    return tuple(np.asarray(traced([array]))[0].tolist())


def values(dtype, *shape):
    """Each bit of each element is left to chance."""
    bits = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return bits.view(dtype)[..., 0]


def flipped(array, element, bit):
    data = bytearray(array.tobytes())
    data[element * array.itemsize + bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


@pytest.fixture(autouse=True)
def _wide_types():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("shape", [(), (6,), (4, 3)])
@pytest.mark.parametrize("dtype", WIDE)
def test_each_bit_of_a_wide_element_is_seen(dtype, shape):
    array = values(dtype, *shape)
    num_bits = array.itemsize * 8
    seen = {of(array), *(of(flipped(array, array.size - 1, bit)) for bit in range(num_bits))}
    assert len(seen) == num_bits + 1


@pytest.mark.parametrize("dtype", WIDE)
def test_the_words_of_an_element_may_not_change_places(dtype):
    array = values(dtype, 5)
    swapped = array.view(np.uint32).reshape(5, -1)[:, ::-1].copy().view(dtype)[:, 0]
    assert of(array) != of(swapped)


def test_those_of_many_arrays_of_one_shape_are_those_of_each_alone():
    """As the layers of a list are: several are summed in one loop."""
    layers = [{"kernel": values(np.float32, 4, 3) + n} for n in range(9)]
    rows = np.asarray(traced(layers))
    assert [tuple(row) for row in rows.tolist()] == [of(layer["kernel"]) for layer in layers]
    assert len(set(map(tuple, rows.tolist()))) == 9


@pytest.mark.parametrize("dtype", WIDE)
def test_a_wide_array_has_the_same_fingerprint_on_any_mesh(dtype):
    array = values(dtype, 8, 4)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    places = (PartitionSpec("x", "y"), PartitionSpec(None, "y"))
    seen = [of(jax.device_put(array, NamedSharding(mesh, place))) for place in places]
    assert seen == [of(jax.device_put(array, jax.devices()[0]))] * len(places)


def test_those_of_narrow_types_are_what_they_always_were():
    """Checkpoints hold them."""
    tree = {
        "a": jnp.arange(12, dtype=jnp.float32).reshape(3, 4),
        "b": jnp.array([1, -2, 3], jnp.int32),
        "c": jnp.array(2.5, jnp.bfloat16),
        "d": jnp.array([True, False]),
        "e": jnp.uint32(7),
        "f": jnp.array([[1, 2]], jnp.int8),
    }
    assert np.asarray(traced(tree)).tolist() == [
        [207208396, 1345123740],
        [305799176, 2511251102],
        [1903864250, 1903864250],
        [397581798, 3519512128],
        [415870660, 415870660],
        [3298026743, 510443562],
    ]
