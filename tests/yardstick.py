"""How fast this machine is: CPU-seconds of a fixed program that XLA compiles and of a fixed product. `python -m tests.yardstick`.

Costs of two machines, or of two days, are compared after a division by it."""

from __future__ import annotations

import os
import statistics
import time

import numpy as np

from tests.environment import as_users_compile, prepare

NUM_TIMES = 5


def main() -> None:
    prepare(os.environ)
    os.environ.update(as_users_compile(os.environ))  # how the tests compile does not change what a machine can do
    import jax
    import jax.numpy as jnp

    jax.devices()

    def step(weights, batch, number):  # type: ignore[no-untyped-def]
        for layer in range(3):
            batch = jnp.tanh(batch @ weights + layer + number)
        return jax.nn.logsumexp(batch * number)

    weights, batch = np.ones((32, 32), np.float32), np.ones((8, 32), np.float32)
    product = np.ones((512, 512), np.float32)

    def once(number: int) -> float:
        started_s = time.process_time()
        # Another number is another program: none of them was compiled before.
        jax.jit(jax.grad(step), static_argnums=2)(weights, batch, number).block_until_ready()
        for _ in range(20):
            product @ product
        return time.process_time() - started_s

    print(statistics.median(once(number) for number in range(1, NUM_TIMES + 1)))


if __name__ == "__main__":
    main()
