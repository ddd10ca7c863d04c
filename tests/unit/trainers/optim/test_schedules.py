"""Each schedule against its formula, written down once more in plain Python."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from gangway.errors import UsageError
from trainers.config import ScheduleConfig
from trainers.optim.schedules import NAMES, build_schedule

RATE, WARMUP, END, FINAL = 0.02, 5, 45, 0.25
OWN = {
    "polynomial": {"power": 3.0},
    "tri_stage": {"hold_steps": 10},
    "cosine_restarts": {"cycle_steps": 7, "cycle_growth": 3, "cycle_factor": 0.5},
}
"""Settings that one schedule alone has."""


def settings(name, **changes):
    return ScheduleConfig(name=name, **OWN.get(name, {}), **changes)


def expected(name, step):
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    done = min(step - WARMUP, END - WARMUP)
    p = done / (END - WARMUP)
    shapes = {
        "constant": lambda: 1.0,
        "linear": lambda: (1 - p) + FINAL * p,
        "cosine": lambda: FINAL + (1 - FINAL) * math.cos(math.pi * p / 2) ** 2,
        "polynomial": lambda: (1 - p) ** 3 + FINAL * (1 - (1 - p) ** 3),
        "tri_stage": lambda: math.exp(math.log(FINAL) * max(done - 10, 0) / 30),
        "cosine_restarts": lambda: restarted(step - WARMUP),
        "wsd": lambda: 1.0 if done <= 32 else 1 - 0.75 * math.sqrt((done - 32) / 8),
        "inverse_sqrt": lambda: max(math.sqrt(WARMUP / step), FINAL),
    }
    return RATE * shapes[name]()


def restarted(step):
    """Cycle by cycle, in integers: 7, 21, 63, ... steps, each from half the height of the one before."""
    length, height = 7, 1.0
    while step >= length:
        step, length, height = step - length, 3 * length, height / 2
    return height * (FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * step / length)))


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_follows_its_formula_before_during_and_after_the_decay(name):
    schedule = build_schedule(settings(name, warmup_steps=WARMUP, final_factor=FINAL), RATE, END)
    steps = [*range(100), 10_000]
    got = jax.vmap(schedule)(np.array(steps))
    np.testing.assert_allclose(got, [expected(name, step) for step in steps], rtol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_can_be_traced_and_starts_at_its_rate_without_warm_up(name):
    schedule = build_schedule(settings(name), RATE, END)
    np.testing.assert_allclose(jax.jit(schedule)(np.int32(7)), schedule(7), rtol=1e-6)
    assert float(schedule(0)) == pytest.approx(RATE)


def test_decay_steps_go_before_max_num_steps():
    schedule = build_schedule(ScheduleConfig(name="linear", decay_steps=10, final_factor=0.0), RATE, 1000)
    assert float(schedule(5)) == pytest.approx(RATE / 2)
    assert float(schedule(10)) == 0.0


def shifted(config, learning_rate, max_num_steps):
    return lambda step: learning_rate * step / max_num_steps


def test_a_users_function_is_called_with_the_settings():
    schedule = build_schedule(ScheduleConfig(name="tests.unit.trainers.optim.test_schedules:shifted"), 0.5, 10)
    assert schedule(4) == pytest.approx(0.2)


def test_an_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(UsageError) as error:
        build_schedule(ScheduleConfig(name="cosin"), RATE, END)
    assert str(error.value) == (
        "optimizer.schedule.name = 'cosin': expected one of constant, linear, cosine, polynomial, wsd, tri_stage, inverse_sqrt, "
        "cosine_restarts, or package.module:function; did you mean cosine?"
    )


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "wsd", "tri_stage"])
def test_a_decay_without_an_end_is_an_error(name):
    with pytest.raises(UsageError, match=f"name = '{name}' does not know where to end: set optimizer.schedule.decay_steps"):
        build_schedule(ScheduleConfig(name=name), RATE, None)


def test_a_warm_up_that_outlasts_the_decay_is_an_error():
    with pytest.raises(UsageError, match="warmup_steps = 45: expected less than the 45 steps after which the decay has ended"):
        build_schedule(ScheduleConfig(name="linear", warmup_steps=45), RATE, 45)


def test_cycles_of_one_length_restart_exactly():
    schedule = build_schedule(ScheduleConfig(name="cosine_restarts", cycle_steps=3, final_factor=0.0), RATE, None)
    np.testing.assert_allclose(
        [schedule(step) for step in (0, 2, 3, 299_999, 300_000)], RATE * np.array([1, 0.25, 1, 0.25, 1]), rtol=1e-5
    )


# ---------------------------------------------------------------------- of optax

BY_OPTAX = [
    ("constant_schedule", {}, lambda s: RATE),
    ("linear_schedule", {"end_value": 0.0, "transition_steps": 10}, lambda s: RATE * max(0, 1 - s / 10)),
    ("exponential_decay", {"transition_steps": 10, "decay_rate": "5e-1"}, lambda s: RATE * 0.5 ** (s / 10)),
    (
        "piecewise_constant_schedule",
        {"boundaries_and_scales": {"4": 0.5, "8": 0.1}},
        lambda s: RATE * 0.5 ** (s >= 4) * 0.1 ** (s >= 8),
    ),
    (
        "warmup_cosine_decay_schedule",
        {"init_value": 0.0, "warmup_steps": 4, "decay_steps": 20},
        lambda s: RATE * s / 4 if s < 4 else RATE * 0.5 * (1 + math.cos(math.pi * min(1, (s - 4) / 16))),
    ),
]


@pytest.mark.parametrize(("name", "arguments", "formula"), BY_OPTAX)
def test_any_schedule_of_optax_goes_by_the_learning_rate(name, arguments, formula):
    schedule = build_schedule(ScheduleConfig(name=f"optax.{name}", arguments=arguments), RATE, None)
    np.testing.assert_allclose(
        [schedule(step) for step in range(25)], [formula(step) for step in range(25)], rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("optax.cosine_decay", {}, r"optax .* has no such function; did you mean optax\.cosine_decay_schedule"),
        (
            "optax.linear_schedule",
            {"end": 0},
            r"schedule\.arguments\.end: optax.linear_schedule has no such argument; expected among end_value,",
        ),
        ("optax.linear_schedule", {"end_value": 0}, "schedule.arguments: optax.linear_schedule needs transition_steps"),
        ("optax.constant_schedule", {"value": 1.0}, "schedule.arguments.value: it is optimizer.learning_rate; leave it out"),
        ("optax.adam", {}, "it takes no peak_value or init_value or value"),
    ],
)
def test_what_optax_does_not_have_is_named(name, arguments, message):
    with pytest.raises(UsageError, match=message):
        build_schedule(ScheduleConfig(name=name, arguments=arguments), RATE, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cosine", "power": 3.0}, "power = 3.0: it is a setting of polynomial, and name is 'cosine'; leave it out"),
        ({"name": "linear", "arguments": {"a": 1}}, "arguments = .* it is a setting of optax"),
        (
            {"name": "optax.constant_schedule", "warmup_steps": 3},
            "warmup_steps = 3: optax.constant_schedule takes arguments alone",
        ),
        ({"name": "cosine_restarts"}, "cycle_steps = null: expected the length of the first cycle of cosine_restarts"),
        ({"name": "tri_stage", "final_factor": 0.0}, "final_factor = 0.0: expected a positive number"),
        ({"name": "polynomial", "power": 0.0}, "power = 0.0: expected a positive number"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings)


def test_holding_counts_towards_the_end():
    with pytest.raises(UsageError, match=r"warmup_steps = 5 \+ hold_steps = 40: expected less than the 45 steps"):
        build_schedule(ScheduleConfig(name="tri_stage", warmup_steps=5, hold_steps=40), RATE, END)


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_up_may_be_a_share_of_the_runs_steps(name):
    """The run's steps, not those of the decay, if they differ."""
    by_ratio = build_schedule(settings(name, warmup_ratio=0.1, decay_steps=30), RATE, END)
    by_steps = build_schedule(settings(name, warmup_steps=4, decay_steps=30), RATE, END)
    assert [float(by_ratio(step)) for step in range(50)] == [float(by_steps(step)) for step in range(50)]
    without_limit = build_schedule(settings(name, warmup_ratio=0.1, decay_steps=30), RATE, None)
    assert float(without_limit(0)) == pytest.approx(RATE / (3 + 1))


def test_a_decay_may_be_a_share_of_the_runs_steps():
    by_ratio = build_schedule(ScheduleConfig(name="linear", decay_ratio=0.5, final_factor=0.0), RATE, 40)
    assert float(by_ratio(10)) == pytest.approx(RATE / 2)
    assert float(by_ratio(20)) == float(by_ratio(39)) == 0.0


def test_a_warm_up_may_start_at_any_factor():
    schedule = build_schedule(ScheduleConfig(name="constant", warmup_steps=4, start_factor=0.5), RATE, None)
    np.testing.assert_allclose([schedule(step) / RATE for step in range(6)], [0.5, 0.625, 0.75, 0.875, 1.0, 1.0], rtol=1e-6)
    assert float(build_schedule(ScheduleConfig(name="constant", start_factor=0.2), RATE, None)(0)) == pytest.approx(RATE)


def test_a_users_schedule_gets_steps_for_ratios():
    seen = build_schedule(ScheduleConfig(name=f"{__name__}:seen", warmup_ratio=0.25, decay_ratio=0.75), RATE, 40)
    assert (seen.warmup_ratio, seen.warmup_steps, seen.decay_ratio, seen.decay_steps) == (None, 10, None, 30)


def seen(config, learning_rate, max_num_steps):
    return config


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"warmup_ratio": 1.0}, "warmup_ratio = 1.0: expected 0 <= warmup_ratio < 1"),
        ({"decay_ratio": 0.0}, "decay_ratio = 0.0: expected 0 < decay_ratio <= 1"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "warmup_ratio = 0.1: warmup_steps = 3 says the same"),
        ({"decay_ratio": 0.1, "decay_steps": 3}, "decay_ratio = 0.1: decay_steps = 3 says the same"),
        ({"start_factor": -0.1}, "start_factor = -0.1: expected at least 0"),
        ({"name": "optax.constant_schedule", "warmup_ratio": 0.1}, "takes arguments alone; leave it out"),
    ],
)
def test_ratios_that_cannot_be(changes, problem):
    with pytest.raises(ValueError, match=problem):
        ScheduleConfig(**changes)


def test_a_share_of_nothing_known_is_an_error():
    with pytest.raises(UsageError, match=r"warmup_ratio = 0\.1: nothing says how many steps the run has; set max_num_steps"):
        build_schedule(ScheduleConfig(name="constant", warmup_ratio=0.1), RATE, None)
    with pytest.raises(UsageError, match=r"decay_ratio = 0\.01: that is no step of 10"):
        build_schedule(ScheduleConfig(decay_ratio=0.01), RATE, 10)
