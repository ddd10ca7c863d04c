"""A training loop of a decoder in the Llama form, written by hand in its best form. It imports nothing of this project.

    python -m benchmarks.by_hand [--workload main]

It has flat activations [B * T, D], unrolled layers, optax's AdamW with clipping, a donated state, one step in flight, and batches
that lie ready. It has no evaluation, no checkpoint, no metrics but the loss, and no check of anything. The command trains on the
sources of Python's standard library, as bytes, and says when its first step is complete. Then it takes as many steps as each line
of its standard input says, and tells their seconds.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Workload(NamedTuple):
    """A model, and the rows of a step: `batch` of `time` tokens."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    batch: int
    time: int

    def model_settings(self) -> dict[str, Any]:
        """Returns the same model as the section `model` of this project has it."""
        sizes = {name: value for name, value in self._asdict().items() if name not in ("batch", "time")}
        return {**sizes, "num_kv_heads": self.num_heads, "tie_embeddings": False}


WORKLOADS = {
    "2 ms": Workload(vocab_size=256, width=64, num_layers=2, num_heads=2, mlp_width=128, batch=4, time=32),
    "20 ms": Workload(vocab_size=512, width=128, num_layers=4, num_heads=4, mlp_width=384, batch=8, time=64),
    "main": Workload(vocab_size=8192, width=384, num_layers=6, num_heads=6, mlp_width=1024, batch=8, time=256),
}
"""By about how long a step of theirs takes on two cores; that of `main` takes a second."""
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
NORM_EPS, ROPE_THETA = 1e-5, 10_000.0
WARM_UP_STEPS = 5
FIRST_STEP = "first step: loss"
"""How the line of the command begins that says so."""
TOOK = "took"
"""How each later line begins, which has the seconds of the steps that were asked for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="main")
    load = WORKLOADS[parser.parse_args().workload]
    written = HandWritten(load, jax.jit(first_params, static_argnums=0)(load, jax.random.key(0)), batches_of_files(load, 4))
    print(f"{FIRST_STEP} {written.step():.4f}", flush=True)
    for line in sys.stdin:
        print(f"{TOOK} {written.run(int(line))}", flush=True)


def write(load: Workload, folder: Path) -> None:
    """Writes the sizes, the first parameters and the batches, for a loop in another library."""
    params = jax.jit(first_params, static_argnums=0)(load, jax.random.key(0))
    layers = {f"layers.{n}.{name}": leaf for n, layer in enumerate(params.pop("layers")) for name, leaf in layer.items()}
    names = sorted({name.rpartition(".")[2] for name in layers})
    of_optimizer = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "max_norm": MAX_NORM}
    of_model = {**load._asdict(), "norm_eps": NORM_EPS, "rope_theta": ROPE_THETA, "layer": names}
    (folder / "sizes.json").write_text(json.dumps({**of_model, **of_optimizer, "first_step": FIRST_STEP, "took": TOOK}))
    arrays = {name: np.asarray(leaf) for name, leaf in {**params, **layers}.items()}
    np.savez(folder / "arrays.npz", batches=np.stack(batches_of_files(load, 4)), **arrays)


def batches_of_files(load: Workload, count: int) -> list[np.ndarray]:
    """Returns batches [B, T + 1] of the bytes of Python's own sources."""
    need, found = count * load.batch * (load.time + 1), b""
    for file in sorted(Path(argparse.__file__).parent.glob("*.py")):
        found += file.read_bytes()
        if len(found) >= need:
            break
    return list(np.frombuffer(found[:need], np.uint8).astype(np.int32).reshape(count, load.batch, load.time + 1))


def first_params(load: Workload, key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 2 + 7 * load.num_layers))
    width, mlp = load.width, load.mlp_width

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    shapes = {"query": (width, width), "key": (width, width), "value": (width, width), "out": (width, width)}
    shapes |= {"gate": (width, mlp), "up": (width, mlp), "down": (mlp, width)}
    return {
        "embed": matrix(load.vocab_size, width),
        "unembed": matrix(width, load.vocab_size),
        "final_norm": jnp.ones(width),
        "layers": [
            {
                **{name: matrix(*shape) for name, shape in shapes.items()},
                "attention_norm": jnp.ones(width),
                "mlp_norm": jnp.ones(width),
            }
            for _ in range(load.num_layers)
        ],
    }


class HandWritten:
    def __init__(self, load: Workload, params: Any, batches: Sequence[Any]):
        """`params` are those of `first_params`; each batch is [B, T + 1]."""
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(MAX_NORM),
            optax.adamw(
                LEARNING_RATE,
                *BETAS,
                EPS,
                weight_decay=WEIGHT_DECAY,
                mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
            ),
        )
        self._load, self._params = load, params
        self._opt_state = self._optimizer.init(self._params)
        self._batches = batches
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1))

    def step(self) -> float:
        """Returns the loss of a step, when it is complete."""
        self._params, self._opt_state, loss = self._step(self._params, self._opt_state, self._batches[0])
        return float(jax.block_until_ready(loss))

    def run(self, steps: int) -> float:
        """Returns the seconds of so many steps."""
        in_flight: collections.deque[jax.Array] = collections.deque()
        start = time.perf_counter()
        for k in range(steps):
            self._params, self._opt_state, loss = self._step(self._params, self._opt_state, self._batches[k % len(self._batches)])
            in_flight.append(loss)
            if len(in_flight) > 1:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready((self._params, self._opt_state))
        return time.perf_counter() - start

    def _train_step(self, params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens, self._load)
        updates, opt_state = self._optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss


def mean_loss(params: Any, tokens: jax.Array, load: Workload) -> jax.Array:
    inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    x = params["embed"][inputs].reshape(-1, load.width)
    cos, sin = angles(load)
    for layer in params["layers"]:
        x = x + attention(norm(x, layer["attention_norm"]), layer, cos, sin, load)
        y = norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    logits = norm(x, params["final_norm"]) @ params["unembed"]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0])


def attention(x: jax.Array, layer: Any, cos: jax.Array, sin: jax.Array, load: Workload) -> jax.Array:
    def heads(name: str) -> jax.Array:
        return (x @ layer[name]).reshape(load.batch, load.time, load.num_heads, -1)

    query, key = rotate(heads("query"), cos, sin), rotate(heads("key"), cos, sin)
    return jax.nn.dot_product_attention(query, key, heads("value"), is_causal=True).reshape(x.shape) @ layer["out"]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + NORM_EPS) * scale


def angles(load: Workload) -> tuple[jax.Array, jax.Array]:
    channels = load.width // load.num_heads
    frequencies = ROPE_THETA ** (-jnp.arange(0, channels, 2) / channels)
    turned = jnp.arange(load.time)[:, None] * frequencies
    return jnp.cos(turned)[:, None], jnp.sin(turned)[:, None]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


if __name__ == "__main__":
    main()
