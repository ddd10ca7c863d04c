"""Keys are functions of (seed, name, step) and of nothing else."""

from __future__ import annotations

import itertools

import jax
import numpy as np

from trainers.step import rng


def data(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_every_seed_name_and_step_has_its_own_key():
    keys = [data(rng.key(*address)) for address in itertools.product((0, 1), ("init", "sample"), (0, 1, 2))]
    assert len(set(keys)) == len(keys)


def test_the_same_address_gives_the_same_key_in_every_process():
    # Written down once: a key that changed would break the resumption of every run made before.
    assert data(rng.key(7, "init", 3)) == (2981680008, 2527656651)


def test_the_step_may_be_traced():
    traced = jax.jit(lambda step: rng.key(7, "sample", step))(3)
    assert data(traced) == data(rng.key(7, "sample", 3))
