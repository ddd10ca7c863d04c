"""Each schedule against its formula, written down once more in plain Python."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from trainers.errors import UsageError
from trainers.schedules import NAMES, build_schedule
from trainers.sections import ScheduleConfig

RATE, WARMUP, END, FINAL = 0.02, 5, 45, 0.25


def expected(name, step):
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    done = min(step - WARMUP, END - WARMUP)
    p = done / (END - WARMUP)
    shapes = {
        "constant": lambda: 1.0,
        "linear": lambda: (1 - p) + FINAL * p,
        "cosine": lambda: FINAL + (1 - FINAL) * math.cos(math.pi * p / 2) ** 2,
        "polynomial": lambda: (1 - p) * (1 - p) + FINAL * (1 - (1 - p) * (1 - p)),
        "wsd": lambda: 1.0 if done <= 32 else 1 - 0.75 * math.sqrt((done - 32) / 8),
        "inverse_sqrt": lambda: max(math.sqrt(WARMUP / step), FINAL),
    }
    return RATE * shapes[name]()


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_follows_its_formula_before_during_and_after_the_decay(name):
    schedule = build_schedule(ScheduleConfig(name=name, warmup_steps=WARMUP, final_factor=FINAL), RATE, END)
    steps = [*range(END + 10), 10_000]
    np.testing.assert_allclose([schedule(step) for step in steps], [expected(name, step) for step in steps], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_can_be_traced_and_starts_at_its_rate_without_warm_up(name):
    schedule = build_schedule(ScheduleConfig(name=name), RATE, END)
    np.testing.assert_allclose(jax.jit(schedule)(np.int32(7)), schedule(7), rtol=1e-6)
    assert float(schedule(0)) == pytest.approx(RATE)


def test_decay_steps_go_before_max_num_steps():
    schedule = build_schedule(ScheduleConfig(name="linear", decay_steps=10, final_factor=0.0), RATE, 1000)
    assert float(schedule(5)) == pytest.approx(RATE / 2)
    assert float(schedule(10)) == 0.0


def shifted(config, learning_rate, max_num_steps):
    return lambda step: learning_rate * step / max_num_steps


def test_a_users_function_is_called_with_the_settings():
    schedule = build_schedule(ScheduleConfig(name="tests.unit.test_schedules:shifted"), 0.5, 10)
    assert schedule(4) == pytest.approx(0.2)


def test_an_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(UsageError) as error:
        build_schedule(ScheduleConfig(name="cosin"), RATE, END)
    assert str(error.value) == (
        "optimizer.schedule.name = 'cosin': expected one of constant, linear, cosine, polynomial, wsd, inverse_sqrt, "
        "or package.module:function; did you mean 'cosine'?"
    )


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "wsd"])
def test_a_decay_without_an_end_is_an_error(name):
    with pytest.raises(UsageError, match=f"name = '{name}' does not know where to end: set optimizer.schedule.decay_steps"):
        build_schedule(ScheduleConfig(name=name), RATE, None)


def test_a_warm_up_that_outlasts_the_decay_is_an_error():
    with pytest.raises(UsageError, match="warmup_steps = 45: expected less than the 45 steps after which the decay has ended"):
        build_schedule(ScheduleConfig(name="linear", warmup_steps=45), RATE, 45)
