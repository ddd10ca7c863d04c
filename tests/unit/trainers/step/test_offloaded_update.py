"""The update of moments that lie in the hosts' memory: that of `kept_update`, a layer after the other."""

from __future__ import annotations

from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.unit.training import assert_equal
from trainers.checkpoint.fingerprints import measured
from trainers.config import OptimizerConfig, ParameterGroup
from trainers.config.optimizer import OFFLOADED
from trainers.loop.beginning import HostCopy
from trainers.optim.optimizers import build_grouped
from trainers.optim.param_groups import freezing, trainable
from trainers.optim.parameter_kinds import ParameterKind
from trainers.optim.precision import with_master_weights
from trainers.parallel import host_memory
from trainers.runtime.executables import ProgramStore
from trainers.step.offloaded_update import kept_update, offloaded_update

SHAPES = {
    "embed": (8, 4),
    "layers": {"query": (3, 4, 8), "norm": (3, 4), "key": (3, 4, 2), "frozen": (3, 4, 2)},
    "others": {"query": (2, 4, 8)},
}
GROUPS = (ParameterGroup(pattern="frozen", frozen=True), ParameterGroup(pattern="key", learning_rate=0.1, weight_decay=0.0))
KINDS = {
    "embed": ParameterKind((-2, -1), "table"),
    "layers.norm": ParameterKind((-1,), "vector"),
    **{name: ParameterKind((-2, -1), "matrix") for name in ("layers.query", "layers.key", "layers.frozen", "others.query")},
}


def drawn(seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def on_host(tree):
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    last = jax.tree.map(
        lambda leaf: NamedSharding(mesh, PartitionSpec(*(None,) * (leaf.ndim - 1), "fsdp") if leaf.ndim else PartitionSpec()),
        tree,
    )
    return jax.device_put(tree, host_memory.on_host(tree, last))


def made(name):
    config = OptimizerConfig(name=name, learning_rate=0.01, offload="host")
    return freezing(with_master_weights(build_grouped(config, optax.constant_schedule(0.01), KINDS, GROUPS)), GROUPS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in OFFLOADED), ("adamw", "bfloat16")])
def test_it_is_the_update_of_a_state_on_the_devices(name, dtype):
    optimizer, params = made(name), jax.tree.map(lambda leaf: leaf.astype(dtype), drawn(0))
    gradients, state = trainable(GROUPS, drawn(1)), optimizer.init(params)
    steps = [jax.jit(partial(update, optimizer)) for update in (kept_update, offloaded_update)]
    states = [state, on_host(state)]
    kinds = {leaf.ndim: leaf.sharding.memory_kind for leaf in jax.tree.leaves(states[1])}
    assert {ndim: kind for ndim, kind in kinds.items() if ndim >= 2} == {2: host_memory.KIND, 3: host_memory.KIND}
    for applied in (True, False, True):
        (expected, states[0]), (updates, states[1]) = (
            step(jnp.asarray(applied), gradients, state, params) for step, state in zip(steps, states, strict=True)
        )
        assert next(leaf.sharding.memory_kind for leaf in jax.tree.leaves(states[1]) if leaf.ndim >= 2) == host_memory.KIND
        for pair in ((updates, expected), (states[1], states[0])) if applied else ((states[1], states[0]),):
            assert jax.tree.structure(pair[0]) == jax.tree.structure(pair[1])
            for one, other in zip(*map(jax.tree.leaves, pair), strict=True):
                np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-8)


def test_the_devices_get_a_layer_at_a_time():
    optimizer, params = made("adamw"), drawn(0)
    state = on_host(optimizer.init(params))
    traced = jax.make_jaxpr(partial(offloaded_update, optimizer))(True, trainable(GROUPS, drawn(1)), state, params)
    brought = {
        var.aval.shape
        for equation in equations(traced.jaxpr)
        if equation.primitive.name == "device_put"
        for var in equation.outvars
        if var.aval.memory_space == jax.memory.Space.Device
    }
    assert brought == {(8, 4), (3, 4), (1, 4, 8), (1, 4, 2)}


def test_a_program_that_reads_the_memory_of_hosts_is_kept(tmp_path):
    optimizer, params = made("adamw"), drawn(0)
    args = jnp.asarray(True), trainable(GROUPS, drawn(1)), on_host(optimizer.init(params)), params
    jitted, notes = jax.jit(partial(offloaded_update, optimizer)), []
    (first, file), (again, kept) = (
        ProgramStore(tmp_path / "programs", "a", notes.append).get("update", jitted, args) for _ in "ab"
    )
    assert (file, kept is not None, notes) == (None, True, [])
    assert_equal(again(*args), first(*args))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_the_fingerprint_is_the_same_wherever_an_array_lies():
    state = made("adamw").init(drawn(0))
    state = jax.tree.map(lambda leaf: leaf + 1, state)
    assert_equal(jax.jit(measured)(on_host(state)), jax.jit(measured)(state))


def test_a_copy_of_a_host_goes_back_to_where_it_was():
    state = on_host(drawn(0))
    again = HostCopy(state).put()
    assert_equal(again, state)
    assert [leaf.sharding for leaf in jax.tree.leaves(again)] == [leaf.sharding for leaf in jax.tree.leaves(state)]
