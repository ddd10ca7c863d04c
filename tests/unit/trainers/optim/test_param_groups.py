"""Parameters by pattern: rates and decays of their own, and what is frozen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gangway.errors import UsageError
from tests.unit.training import assert_equal, of, trainer
from trainers.base import BaseTrainer
from trainers.config import OptimizerConfig, ParameterGroup
from trainers.optim.optimizers import build_grouped
from trainers.optim.param_groups import check, freezing, parameter_paths, rate_names, trainable
from trainers.planning import estimate

RATE, DECAY = 0.01, 0.5
ADAMW = {"name": "adamw", "learning_rate": RATE, "weight_decay": DECAY, "schedule": {"name": "constant"}}
FROZEN_EMBED = {**ADAMW, "groups": [{"pattern": "embed", "frozen": True}]}


def params():
    rng = np.random.default_rng(0)
    shapes = {"encoder": {"up": (8, 4), "norm": (4,)}, "layers": {"up": (3, 4, 4)}, "head": {"kernel": (4, 8)}}
    made = jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))
    return jax.tree.map(jnp.asarray, made)


def groups(*settings):
    return tuple(ParameterGroup(**group) for group in settings)


def first_update(config, param_groups, schedule=None):
    optimizer = build_grouped(config, schedule or optax.constant_schedule(config.learning_rate), {}, param_groups)
    tree = params()
    updates, _ = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.ones_like, p), optimizer.init(p), p))(tree)
    return tree, updates


def test_names_are_dotted():
    assert parameter_paths(params()) == ["encoder.norm", "encoder.up", "head.kernel", "layers.up"]


def test_a_group_has_its_own_rate_and_decay_and_the_first_that_takes_a_parameter_has_it():
    config = OptimizerConfig(name="adamw", learning_rate=RATE, weight_decay=DECAY, eps=0.0)
    made = groups(
        {"pattern": r"^head\.", "learning_rate": 0.1, "weight_decay": 0.0},
        {"pattern": r"up$", "weight_decay": 2.0},
        {"pattern": "encoder", "learning_rate": 0.5},
    )
    before, updates = first_update(config, made)
    # Adam's first step from a gradient of ones is 1 everywhere.
    expected = {
        "encoder": {"up": -RATE * (1 + 2.0 * before["encoder"]["up"]), "norm": -0.5 * jnp.ones(4)},
        "layers": {"up": -RATE * (1 + 2.0 * before["layers"]["up"])},
        "head": {"kernel": -0.1 * jnp.ones((4, 8))},
    }
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)


def test_a_group_follows_the_schedule_of_all():
    config = OptimizerConfig(name="sgd", learning_rate=RATE, weight_decay=0.0)
    _, updates = first_update(config, groups({"pattern": "head", "learning_rate": 1.0}), lambda step: RATE * (step + 1) / 4)
    np.testing.assert_allclose(updates["head"]["kernel"], -1.0 / 4, rtol=1e-6)
    np.testing.assert_allclose(updates["layers"]["up"], -RATE / 4, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd", "rmsprop"])
def test_every_optimizer_takes_groups_and_frozen_parameters(name):
    made = groups({"pattern": "encoder", "frozen": True}, {"pattern": "head", "learning_rate": 0.1})
    optimizer = freezing(build_grouped(OptimizerConfig(name=name), optax.constant_schedule(RATE), {}, made), made)
    tree = params()
    gradients = trainable(made, jax.tree.map(jnp.ones_like, tree))
    updates, state = jax.jit(lambda p, g: optimizer.update(g, optimizer.init(p), p))(tree, gradients)
    assert parameter_paths(updates) == ["head.kernel", "layers.up"]
    assert not [path for path in parameter_paths(state) if "encoder" in path]


# ---------------------------------------------------------------------- whole runs


def test_what_is_frozen_has_no_state_no_part_in_the_norm_and_keeps_every_bit(tmp_path, events):
    free = trainer(tmp_path / "free", optimizer=ADAMW, checkpoint={"save_at_end": False}, max_num_steps=1)
    free.train()
    norm = of(events, "metrics")[0]["metrics"]["grad_norm"]
    events.clear()
    made = trainer(tmp_path, optimizer=FROZEN_EMBED)
    start = jax.tree.map(np.array, free.training.loop.resume.beginning.make().params)
    start["embed"][0] = -0.0  # + 0 would make it 0
    state = made.train(model_parameters=start)
    assert start["embed"].tobytes() == np.asarray(state.params["embed"]).tobytes()
    assert not np.array_equal(start["out"], state.params["out"])
    assert [path for path in parameter_paths(state.opt_state) if "embed" in path] == []
    assert [path for path in parameter_paths(state.opt_state) if "out" in path] != []
    assert 0 < of(events, "metrics")[0]["metrics"]["grad_norm"] < norm


def test_frozen_parameters_resume_bit_for_bit_and_count_micro_batches(tmp_path, events):
    settings = {"optimizer": {**FROZEN_EMBED, "max_grad_norm": 0.01}, "accumulation_steps": 2}
    whole = trainer(tmp_path / "whole", **settings).train()
    trainer(tmp_path, max_num_steps=6, **settings).train()
    resumed = trainer(tmp_path, **settings).train()
    assert [event["step"] for event in of(events, "restored")] == [6]
    assert_equal(resumed, whole)


class Frozen(BaseTrainer):
    def freeze_module(self):
        return ("embed",)

    def build_param_groups(self):
        return (ParameterGroup(pattern="out", learning_rate=2 * RATE),)


@pytest.mark.slow("trains")
def test_a_subclass_freezes_and_groups(tmp_path, events):
    by_config = {**ADAMW, "groups": [*FROZEN_EMBED["groups"], {"pattern": "out", "learning_rate": 2 * RATE}]}
    a = trainer(tmp_path / "a", cls=Frozen, optimizer=ADAMW).train()
    b = trainer(tmp_path / "b", optimizer=by_config).train()
    assert_equal(a, b)
    rates = [event["metrics"]["learning_rate"] for event in of(events, "metrics") if "learning_rate" in event["metrics"]]
    assert rates == pytest.approx([RATE] * len(rates))


def test_moments_lie_where_their_parameters_do(tmp_path, events):
    sharded = {
        "task": "trainers.tasks.causal_lm:CausalLMTask",
        "model": {"width": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 32},
        "mesh": {"data": 1, "fsdp": 4, "tensor": 2},
        "optimizer": {**ADAMW, "groups": [{"pattern": "mlp_norm", "frozen": True}, {"pattern": "up", "learning_rate": 0.1}]},
    }
    made = trainer(tmp_path, **sharded)
    made.prepare()
    places = made.state_shardings
    parameters = dict(zip(parameter_paths(made.design.state.params), jax.tree.leaves(places.params), strict=True))
    found = dict(zip(parameter_paths(made.design.state.opt_state), jax.tree.leaves(places.opt_state), strict=True))
    moments = {path: place for path, place in found.items() if ".mu." in path or ".nu." in path}
    assert len(moments) == 2 * (len(parameters) - 1)
    for path, place in moments.items():
        assert place.spec == parameters[path.partition(".mu.")[2] or path.partition(".nu.")[2]].spec
    assert any(place.spec != jax.sharding.PartitionSpec() for path, place in moments.items() if "group_1" in path)


# ---------------------------------------------------------------------- errors


def test_a_pattern_that_is_in_no_name_is_reported_before_machines_are_taken(tmp_path):
    made = trainer(tmp_path, optimizer={**ADAMW, "groups": [{"pattern": "embd", "frozen": True}]})
    problems, _ = estimate.plan(made.arguments, num_devices=8)
    assert problems == [
        "the pattern 'embd' is in no parameter's name (optimizer.groups, freeze_module): near are embed",
    ]


def test_nothing_left_to_train_is_an_error():
    with pytest.raises(UsageError, match="every parameter is frozen"):
        check(groups({"pattern": ".", "frozen": True}), params())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "a["}, r"pattern = 'a\[': expected a regular expression"),
        ({"pattern": "a", "learning_rate": 0.0}, "learning_rate = 0.0: expected a positive number; to train nothing, set frozen"),
        ({"pattern": "a", "weight_decay": -1.0}, "weight_decay = -1.0: expected at least 0"),
        ({"pattern": "a", "frozen": True, "learning_rate": 1.0}, "the group 'a' is not trained; leave out its learning_rate"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        ParameterGroup(**settings)


class GroupsAsDicts(BaseTrainer):
    groups = ({"pattern": "embed", "frozen": True}, {"pattern": "out", "learning_rate": 0.5})

    def build_param_groups(self):
        return self.groups


def test_groups_may_be_dicts(tmp_path):
    made = trainer(tmp_path, cls=GroupsAsDicts)
    assert made.design.groups == (
        ParameterGroup(pattern="embed", frozen=True),
        ParameterGroup(pattern="out", learning_rate=0.5),
    )


@pytest.mark.parametrize(
    ("group", "error"),
    [
        (
            {"pattern": "out", "lerning_rate": 1.0},
            "unknown key 'lerning_rate': expected pattern, learning_rate, .*did you mean learning_rate",
        ),
        ({"learning_rate": 1.0}, "has no pattern: expected a regular expression"),
        ({"pattern": "("}, r"build_param_groups: pattern = "),
    ],
)
def test_a_dict_that_is_no_group_is_an_error(tmp_path, group, error):
    with pytest.raises(UsageError, match=error):
        _ = trainer(tmp_path, cls=type("Mine", (GroupsAsDicts,), {"groups": (group,)})).design.groups


def test_the_rates_of_groups_are_published_as_they_are_applied(tmp_path, events):
    groups = [{"pattern": "^embed$|nothing", "learning_rate": 0.2}, {"pattern": "out", "weight_decay": 0.0}]
    schedule = {"name": "cosine", "decay_steps": 12, "warmup_steps": 3}
    optimizer = {"name": "sgd", "learning_rate": 0.5, "weight_decay": 0.0, "max_grad_norm": None, "schedule": schedule}
    metrics = {"per_parameter_grad_norm": True}
    settings = {"optimizer": {**optimizer, "groups": groups}, "metrics": metrics, "checkpoint": {"save_at_end": False}}
    made = trainer(tmp_path, max_num_steps=5, **settings)
    made.train()
    published = [event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"]]
    for step, values in enumerate(published):
        rate = float(made.scheduler(step))
        rates = {"learning_rate": rate, "learning_rate/_embed_nothing": 0.4 * rate, "learning_rate/out": rate}
        assert {name: value for name, value in values.items() if "rate" in name} == pytest.approx(rates, rel=1e-6)
    # As they are applied: the size of a first step of gradient descent over the size of its gradient.
    made = trainer(tmp_path / "one", max_num_steps=1, **settings)
    after, before = made.train().params, made.training.loop.resume.beginning.make().params
    moved = float(np.linalg.norm(np.asarray(after["embed"]) - np.asarray(before["embed"])))
    first = published[0]
    assert moved / first["grad_norm/embed"] == pytest.approx(first["learning_rate/_embed_nothing"], rel=1e-3)


def test_a_frozen_group_has_no_rate_and_of_equal_names_the_first_counts():
    groups = [
        ParameterGroup(pattern="a|b", learning_rate=1.0),
        ParameterGroup(pattern="a b"),
        ParameterGroup(pattern="c", frozen=True),
    ]
    assert rate_names(groups) == {"learning_rate/a_b": groups[0]}
