"""Measures the train step of a run on the machine that is here: one host of a small gang of plain processes, without Ray.

`python -m trainers.planning.trial` reads JSON and writes JSON.

In: {"arguments_class", "arguments", "host", "num_hosts", "coordinator"}. Out: {"problems": [...], "facts": {"step_s": [seconds of
a step in each of WINDOWS windows]}}.

For a CPU there is no table of what it can do: its cores differ, hosts share them, and what the hosts exchange goes through the
same cores. So the compiled step itself is run for some seconds, on a state and a batch of zeros, by as many processes as the run
has hosts. Nothing is learnt, read or written.
"""

from __future__ import annotations

import os

from gangway.surroundings import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory(os.environ, "trainers.planning.trial")  # as the processes do that train

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gangway.errors import TransientError, UsageError
from trainers.config.arguments import TrainingArguments
from trainers.parallel import mesh as meshes
from trainers.planning.estimate import Facts, answer
from trainers.planning.program import lower, trainer_for
from trainers.runtime import distributed

WINDOWS = 5
"""The fastest of these counts: other programs of the machine make a step slower, and never faster."""
WINDOW_S = 0.4


def asked(arguments: TrainingArguments, request: Mapping[str, Any]) -> tuple[list[str], Facts]:
    distributed.let_cpus_run_one_program_at_a_time()
    distributed.join(distributed.JoinSpec(request["host"], request["num_hosts"], request["coordinator"]))
    return [], {"step_s": tried(arguments)}


def tried(arguments: TrainingArguments) -> list[float]:
    """Returns the seconds of a step, in each window. All hosts must call this."""
    trainer, _ = trainer_for(arguments)
    program = lower(trainer, meshes.make_mesh(arguments.mesh, jax.devices())).compile()
    state, sums, *rest = jax.tree.map(zeros, program.in_avals[0], program.input_shardings[0])

    def window(steps: int) -> float:
        nonlocal state, sums
        begin_s = time.perf_counter()
        for _ in range(steps):
            state, sums, *_ = program(state, sums, *rest)
        jax.block_until_ready((state, sums))
        return (time.perf_counter() - begin_s) / steps

    window(1)  # the first pays for what is done once
    steps = max(1, int(WINDOW_S / slowest(window(1))))
    return [window(steps) for _ in range(WINDOWS)]


def zeros(shape: Any, sharding: Any) -> jax.Array:
    """Returns the part of this host of an array of zeros."""
    part = sharding.shard_shape(shape.shape)
    return jax.make_array_from_callback(shape.shape, sharding, lambda _: np.zeros(part, shape.dtype))


def slowest(seconds: float) -> float:
    """Returns the greatest among the hosts: all of them must run as many steps."""
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


if __name__ == "__main__":
    answer(asked, ValueError, UsageError, TransientError)
