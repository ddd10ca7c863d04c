"""How long a save keeps training waiting: ours, and raw asynchronous Orbax, in turns in one process.

    python -m benchmarks.saves [--millions 17] [--rounds 7] [--storage disk]

The state is that of AdamW: parameters and two moments of float32, in as many arrays as a model of twelve layers has. Training
waits until `save` returns, and then for as long as the next step, which donates the state, takes more than without a save: an
array that is still being read cannot be written in place. Each waits for its write to end before the other begins. With
`--storage gs` or `s3` ours go to an emulator of that cloud, in a process of its own; requests and bytes are counted then.
"""

from __future__ import annotations

import os

from gangway.surroundings import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory(os.environ, "benchmarks.saves")  # as the processes do that train

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gangway.storage import usage
from trainers.checkpoint.manager import CheckpointManager
from trainers.checkpoint.retention import Retention
from trainers.runtime.executables import ProgramStore
from trainers.step.state import TrainState

LAYERS, ARRAYS_PER_LAYER = 12, 9


def state_of(num_parameters: int, mesh: Mesh, step: int) -> TrainState:
    make, everywhere = maker_of(num_parameters, mesh), NamedSharding(mesh, PartitionSpec())
    params, first, second = (make(jax.random.key(3 * step + n)) for n in range(3))
    # Arrays of their own: none can be donated twice.
    counters = [jax.device_put(np.int32(step), everywhere) for _ in range(3)]
    return TrainState(
        step=counters[0],
        batch_index=counters[1],
        params=params,
        opt_state=(first, second, counters[2]),
        totals={"tokens": jax.device_put(np.zeros(2, np.uint32), everywhere)},
        sums={},
        loss_stats={"mean": jax.device_put(np.float32(1.0), everywhere)},
    )


@cache
def maker_of(num_parameters: int, mesh: Mesh) -> Callable[[jax.Array], Any]:
    """Returns what makes the parameters. It is compiled once: what a compiler leaves behind slows down what comes next."""
    columns = 256
    rows = num_parameters // (LAYERS * ARRAYS_PER_LAYER * columns)
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    rows -= rows % mesh.devices.size
    return jax.jit(
        lambda key: {
            f"layer {n}": {
                f"array {m}": jax.random.normal(jax.random.fold_in(key, n * 100 + m), (rows, columns))
                for m in range(ARRAYS_PER_LAYER)
            }
            for n in range(LAYERS)
        },
        out_shardings=place,
    )


def took_s(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


class Round(NamedTuple):
    """Seconds, of one save."""

    ours: float
    """Until `save` returns."""
    ours_held: float
    """And what the next step takes more than others: all that training waits."""
    complete: float
    """Until it is committed."""
    orbax: float
    orbax_held: float
    copy: float
    fingerprints: float
    """Of the devices, alone. On a CPU they take the cores that copy; on an accelerator the host copies meanwhile."""


@partial(jax.jit, donate_argnums=0)
def trained(state: TrainState) -> TrainState:
    """Returns the state with each number changed, in its own memory."""
    return jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), state)


class Donated:
    """A state in training: each step uses up the last one."""

    def __init__(self, state: TrainState):
        self.state = state

    def step_s(self) -> float:
        """Returns the seconds of a step."""
        began_s = time.perf_counter()
        self.state = jax.block_until_ready(trained(self.state))
        return time.perf_counter() - began_s

    def held_s(self, save: Callable[[TrainState], object]) -> tuple[float, float]:
        """Returns the seconds until a save returns, and those that training waits for it in all."""
        undisturbed_s = statistics.median(self.step_s() for _ in range(3))
        saved_s = took_s(lambda: save(self.state))
        return saved_s, saved_s + max(0.0, self.step_s() - undisturbed_s)


def one_round(step: int, state: TrainState, manager: CheckpointManager, orbax: ocp.AsyncCheckpointer, folder: str) -> Round:
    """Returns the times of one save by each. Uses the state up."""
    copy_s = took_s(lambda: [np.array(leaf) for leaf in jax.tree.leaves(state)])
    fingerprints_s = took_s(lambda: manager.fingerprint(state))
    training = Donated(state)
    began_s = time.perf_counter()
    ours_s, ours_held_s = training.held_s(lambda state: manager.save(step, state, {"batch_index": step}))
    manager.wait()
    complete_s = time.perf_counter() - began_s
    path = Path(folder) / "orbax" / str(step)

    def save(state: TrainState) -> None:
        orbax.save(path, args=ocp.args.PyTreeSave(dict(enumerate(jax.tree.leaves(state)))))

    orbax_s, orbax_held_s = training.held_s(save)
    orbax.wait_until_finished()
    shutil.rmtree(path, ignore_errors=True)
    return Round(ours_s, ours_held_s, complete_s, orbax_s, orbax_held_s, copy_s, fingerprints_s)


@contextmanager
def storage_of(kind: str, folder: str) -> Iterator[str]:
    """Yields where ours are saved: a folder, or a bucket of an emulator in a process of its own."""
    if kind == "disk":
        yield f"{folder}/ours"
        return
    from tests.stores import emulators  # not at the top: what saves to a disk needs no emulators

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(kind, there), daemon=True)
    server.start()
    address = here.recv()
    try:
        os.environ.update(emulators.environment(kind, address))
        yield f"{kind}://{emulators.BUCKET}/saves"
    finally:
        server.kill()


def serve(kind: str, parent: Connection) -> None:
    from tests.stores import emulators

    with {"gs": emulators.fake_gcs, "s3": emulators.moto}[kind]() as address:
        parent.send(address)
        threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a save keeps training waiting.")
    parser.add_argument("--millions", type=float, default=17.0, help="of parameters; default: 17")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--storage", choices=("disk", "gs", "s3"), default="disk", help="of ours; Orbax' own saves are on the disk"
    )
    parser.add_argument("--json", type=Path, help="where to write the seconds of each round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="saves-") as folder, storage_of(options.storage, folder) as place:
        found = measured(jax.devices(), options.millions, options.rounds, folder, place)
    if options.json:
        options.json.write_text(json.dumps(found["rounds"]))
    size, ours_s, orbax_s = found["bytes"], found["ours_held"], found["orbax_held"]
    print(
        f"saves of {options.millions:g} M parameters ({size / 1e6:.0f} MB), {options.storage}: training waits "
        f"{1000 * ours_s:.0f} ms for ours ({1000 * found['ours']:.0f} ms until it returns), {1000 * orbax_s:.0f} ms for raw "
        f"asynchronous Orbax ({1000 * found['orbax']:.0f} ms), ratio {ours_s / orbax_s:.2f}; a copy of all arrays "
        f"{1000 * found['copy']:.0f} ms, fingerprints alone {1000 * found['fingerprints']:.0f} ms; "
        f"committed after {found['complete']:.2f} s; restored in {found['restored']:.2f} s"
    )
    if options.storage != "disk":
        print(f"a save asks {said(found['save_asked'], size)}; a restore asks {said(found['restore_asked'], size)}")


def measured(
    devices: list[jax.Device], millions: float, num_rounds: int, folder: str, place: str | None = None
) -> dict[str, Any]:
    """Returns the medians of the rounds in seconds, the seconds of a restore, the bytes of the state, and what the last save and
    the restore asked of the storage. `place` is where ours are saved; None: in `folder`, where Orbax' own are."""
    mesh = Mesh(np.array(devices), ("data",))
    place = f"{folder}/ours" if place is None else place
    manager = manager_at(place, mesh)
    orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    rounds, asked = [], []
    for step in range(num_rounds + 1):
        state = jax.block_until_ready(state_of(int(millions * 1e6), mesh, step))
        if step == 0:
            manager.prepare(state)
        usage.HERE.take()
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
        rounds.append(one_round(step, state, manager, orbax, folder))
        asked.append(usage.HERE.take())
    reader = manager_at(place, mesh)
    restored_s = took_s(lambda: jax.block_until_ready(reader.restore(abstract)))
    read = usage.HERE.take()
    # The first ones compile, and make folders.
    median = Round(*(statistics.median(column) for column in zip(*rounds[1:], strict=True)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    return {**median._asdict(), "restored": restored_s, "bytes": size, "save_asked": asked[-1], "restore_asked": read} | {
        "rounds": [each._asdict() for each in rounds[1:]]
    }


def said(asked: dict[str, int], size: int) -> str:
    """Returns the requests, and the bytes as a share of the state's."""
    requests = ", ".join(f"{asked.get(kind, 0)} {kind}" for kind in usage.REQUESTS)
    return (
        f"{requests}; sends {asked.get('bytes_out', 0) / size:.3f} and reads {asked.get('bytes_in', 0) / size:.3f} of its bytes"
    )


def manager_at(place: str, mesh: Mesh) -> CheckpointManager:
    return CheckpointManager(
        place,
        Retention(1),
        mesh,
        ProgramStore(None, "saves", print),
        on_saved=lambda step, path: None,
        on_failed=lambda step, error: print(f"step {step}: {error}"),
        note=print,
    )


if __name__ == "__main__":
    main()
