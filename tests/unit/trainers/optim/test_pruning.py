"""Pruning by magnitude: which weights, when, and for good. A pruner of one's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import UsageError
from tests.unit.training import FIXED, StopAt, assert_equal, losses, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config import PruningConfig
from trainers.optim.pruning import Magnitude, sparsity
from trainers.planning import estimate
from trainers.trainer.build import build

CONFIG = PruningConfig(pattern="out", final_sparsity=0.8, begin_step=2, end_step=10, every_steps=3)


def test_the_part_that_is_zero_follows_the_cubic_law():
    """Zhu & Gupta's equation 1 as they write it, from an initial sparsity of 0."""
    steps = np.arange(14)
    clipped = np.clip(steps, 2, 10)
    want = 0.8 + (0.0 - 0.8) * (1 - (clipped - 2) / (10 - 2)) ** 3
    np.testing.assert_allclose(jax.vmap(lambda step: sparsity(CONFIG, step))(steps), want, atol=1e-6)


def test_the_smallest_weights_go_and_none_comes_back():
    """In NumPy, by sorting; every update tries to bring all weights back."""
    pruner = Magnitude(CONFIG)
    rng = np.random.default_rng(0)
    params = {"out": jnp.asarray(rng.normal(size=(7, 11)), jnp.float32), "embed": jnp.ones(3)}
    state, zeros = pruner.init(params), np.zeros(77, bool)
    prune = jax.jit(pruner.post_gradient)
    for step in range(1, 13):
        gradients = {"out": jnp.asarray(rng.normal(size=(7, 11)), jnp.float32), "embed": jnp.ones(3)}
        moved = np.asarray(params["out"] - gradients["out"]).ravel()
        if step in (3, 6, 9, 10, 12):  # every third, and the last
            zeros = np.zeros(77, bool)
            zeros[np.argsort(np.abs(moved))[: int(np.float32(sparsity(CONFIG, step)) * 77)]] = True
        params, state = prune(jax.tree.map(jnp.subtract, params, gradients), state, jnp.int32(step - 1))
        np.testing.assert_array_equal(np.asarray(params["out"]).ravel() == 0, zeros)
        np.testing.assert_array_equal(np.asarray(params["out"]).ravel()[~zeros], moved[~zeros])
    assert zeros.sum() == int(0.8 * 77)
    np.testing.assert_array_equal(params["embed"], 1 - 12)


def part_of_zeros(state):
    return float(np.mean(np.asarray(state.params["out"]) == 0))


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 1, "fsdp": 8}])
def test_a_run_prunes_and_resumes_bit_for_bit_amid_it(tmp_path, events, mesh):
    settings = {
        "optimizer": FIXED,
        "mesh": mesh,
        "pruning": {"pattern": "out", "final_sparsity": 0.8, "end_step": 10, "every_steps": 4},
    }
    whole = trainer(tmp_path / "whole", **settings).train()
    half = trainer(tmp_path, max_num_steps=6, **settings).train()
    assert 0.5 < part_of_zeros(half) < part_of_zeros(whole) == pytest.approx(0.8, abs=1e-3)
    assert not np.any(np.asarray(whole.params["embed"]) == 0)
    events.clear()
    resumed = trainer(tmp_path, **settings).train()
    assert of(events, "restored")[0]["step"] == 6
    assert_equal(resumed, whole)


def test_a_pattern_that_is_in_no_name_is_reported_before_machines_are_taken(tmp_path):
    made = trainer(tmp_path, pruning={"pattern": "outt"})
    problems, _ = estimate.plan(made.arguments, num_devices=8)
    assert problems == ["pruning.pattern = 'outt': it is in no parameter's name; these are embed, out"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"final_sparsity": 1.0}, "final_sparsity = 1.0: expected 0 < final_sparsity < 1"),
        ({"begin_step": 5, "end_step": 5}, r"end_step = 5: expected more than begin_step \(5\)"),
        ({"pattern": "("}, r"pattern = '\(': expected a regular expression"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        PruningConfig(**settings)


# ---------------------------------------------------------------------- a pruner of one's own


class KeepsBlocks:
    """Zeroes the columns [n, ...) of `out`, n by n: two more after each update. The loss sees everything times `scale`."""

    def __init__(self, arguments, scale=1.0):
        self.scale = scale

    def init(self, params):
        return {"out": jnp.ones(params["out"].shape, bool), "updates": jnp.int32(0)}

    def pre_forward(self, params, state, step):
        return {**params, "out": params["out"] * state["out"] * self.scale}

    def post_gradient(self, params, state, step):
        kept = state["out"] & (jnp.arange(state["out"].shape[1]) >= 2 * (step + 1))
        return {**params, "out": params["out"] * kept}, {"out": kept, "updates": state["updates"] + 1}


BY_PATH = {"pruning": {"pruner": "tests.unit.trainers.optim.test_pruning:KeepsBlocks"}, "optimizer": FIXED}


class Hooked(BaseTrainer):
    made = KeepsBlocks

    def build_pruner(self):
        return type(self).made(self.arguments)


def columns_of_zeros(state):
    return int(np.sum(np.all(np.asarray(state.params["out"]) == 0, axis=0)))


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 1, "fsdp": 8}])
def test_a_pruner_of_ones_own_prunes_and_a_resume_goes_on_bit_for_bit(tmp_path, events, mesh):
    made = trainer(tmp_path / "whole", mesh=mesh, **BY_PATH)
    whole = made.train()
    assert columns_of_zeros(whole) == 24  # 12 updates
    assert int(whole.pruner_state["updates"]) == 12
    assert whole.pruner_state["out"].sharding == whole.params["out"].sharding
    half = trainer(tmp_path, mesh=mesh, max_num_steps=6, **BY_PATH).train()
    assert columns_of_zeros(half) == 12
    events.clear()
    assert_equal(trainer(tmp_path, mesh=mesh, **BY_PATH).train(), whole)
    assert of(events, "restored")[0]["step"] == 6
    hooked = trainer(tmp_path / "hooked", cls=Hooked, mesh=mesh, optimizer=FIXED).train()
    assert_equal(hooked.params, whole.params)


@pytest.mark.slow("trains twice")
def test_a_restart_in_one_launch_prunes_by_kept_executables(tmp_path, events, monkeypatch):
    """Nothing is traced again there, so the pruner's Python code is called for the shapes alone."""
    calls = []

    class Counted(KeepsBlocks):
        def post_gradient(self, params, state, step):
            calls.append(1)
            return super().post_gradient(params, state, step)

    class Counting(Hooked):
        made = Counted

    monkeypatch.setenv("GANGWAY_PROGRAMS", str(tmp_path / "programs"))
    for stop in ((StopAt(6, "requested"),), ()):
        runtime.install(runtime.Runtime(events.append, program_key="launch"))
        resumed = trainer(tmp_path, *stop, cls=Counting, optimizer=FIXED).train()
    assert len(calls) == 3  # for the shapes and in the step; for the shapes alone
    assert int(resumed.step) == 12
    assert_equal(resumed, trainer(tmp_path / "whole", cls=Counting, optimizer=FIXED).train())


SGD = {"name": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "max_grad_norm": None, "schedule": {"name": "constant"}}


def test_the_loss_of_training_sees_what_pre_forward_returns(tmp_path, events):
    """And the update is added to the parameters themselves; without masks here."""

    class Doubling(KeepsBlocks):
        def pre_forward(self, params, state, step):
            return {**params, "out": params["out"] * 2.0}

        def post_gradient(self, params, state, step):
            return params, state

    class Doubled(Hooked):
        made = Doubling

    plain = trainer(tmp_path / "plain", max_num_steps=1, optimizer=SGD)
    state = trainer(tmp_path, cls=Doubled, max_num_steps=1, optimizer=SGD).train()
    doubled = losses(events)[1]
    events.clear()
    build(plain)
    first = jax.jit(plain.design.initial_state)().params
    given = {**first, "out": first["out"] * 2.0}
    expected = plain.train(model_parameters=jax.tree.map(np.asarray, given))
    assert losses(events)[1] == pytest.approx(doubled, rel=1e-6)
    moved = np.asarray(state.params["out"]) - np.asarray(first["out"])
    np.testing.assert_allclose(moved, np.asarray(expected.params["out"]) - np.asarray(given["out"]), atol=1e-6)


@pytest.mark.slow("compiles a step and trains")
def test_frozen_parameters_are_not_the_pruners(tmp_path):
    class Everything(KeepsBlocks):
        def init(self, params):
            assert params["embed"] is None
            return {}

        def pre_forward(self, params, state, step):
            return params

        def post_gradient(self, params, state, step):
            return jax.tree.map(jnp.zeros_like, params), state

    class Frozen(Hooked):
        made = Everything

        def freeze_module(self):
            return ("embed",)

    state = trainer(tmp_path, cls=Frozen, max_num_steps=2).train()
    assert not np.asarray(state.params["out"]).any()
    assert np.asarray(state.params["embed"]).all()


class Narrow(KeepsBlocks):
    def pre_forward(self, params, state, step):
        return {**params, "out": params["out"][:, :4].astype(jnp.bfloat16)}


class Single(KeepsBlocks):
    def post_gradient(self, params, state, step):
        return params


class Forgetful(KeepsBlocks):
    def post_gradient(self, params, state, step):
        return params, {"out": state["out"]}


@pytest.mark.parametrize(
    ("pruner", "problem"),
    [
        (lambda arguments: object(), "build_pruner returned object, which lacks init, pre_forward, post_gradient"),
        (
            Narrow,
            r"Narrow.pre_forward returned the parameters of another .*: out bfloat16\[16, 4\], given float32\[16, 256\]",
        ),
        (Single, r"Single.post_gradient returned dict: expected \(parameters, state\)"),
        (Forgetful, r"Forgetful.post_gradient returned the state of another shape or type: updates None, given int32\[\]"),
    ],
)
def test_what_is_no_pruner_is_reported_before_machines_are_taken(tmp_path, pruner, problem):
    cls = type("Bad", (Hooked,), {"made": pruner})
    with pytest.raises(UsageError, match=problem):
        trainer(tmp_path, cls=cls).configure_model()


def test_a_pruner_needs_settings_that_leave_it_its_work(tmp_path):
    with pytest.raises(ValueError, match=r"pattern = 'out': expected null with pruner = 'a:B', which says itself what to prune"):
        PruningConfig(pattern="out", pruner="a:B")
    with pytest.raises(ValueError, match=r"pruner = 'nowhere': expected package\.module:Name"):
        PruningConfig(pruner="nowhere")
    averages = {"name": "schedule_free_adamw", "schedule": {"name": "constant"}}
    with pytest.raises(ValueError, match=r"pruning\.pruner = 'a:B': expected null, for schedule_free_adamw averages zeros away"):
        trainer(tmp_path, optimizer=averages, pruning={"pruner": "a:B"})
    with pytest.raises(UsageError, match="build_pruner: expected None with schedule_free_adamw"):
        trainer(tmp_path, cls=Hooked, optimizer=averages).configure_model()


def test_averages_would_undo_it(tmp_path):
    optimizer = {"name": "schedule_free_adamw", "schedule": {"name": "constant"}}
    with pytest.raises(ValueError, match=r"pruning\.pattern = 'out': expected null, for schedule_free_adamw averages zeros away"):
        trainer(tmp_path, optimizer=optimizer, pruning={"pattern": "out"})
