"""How long a save keeps training waiting: ours, and raw asynchronous Orbax, in turns in one process.

    python -m benchmarks.saves [--millions 17] [--rounds 7]

The state is that of AdamW: parameters and two moments of float32, in as many arrays as a model of twelve layers has. Blocking is
the time until `save` returns, when the state may be donated. Both write to a folder of this machine; each waits for its write to
end before the other begins.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainers.checkpoint.manager import CheckpointManager
from trainers.checkpoint.retention import Retention
from trainers.runtime.executables import ProgramStore
from trainers.step.state import TrainState

LAYERS, ARRAYS_PER_LAYER = 12, 9


def state_of(num_parameters: int, mesh: Mesh, step: int) -> TrainState:
    columns = 256
    rows = num_parameters // (LAYERS * ARRAYS_PER_LAYER * columns)
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows -= rows % mesh.devices.size
    make = jax.jit(
        lambda key: {
            f"layer {n}": {
                f"array {m}": jax.random.normal(jax.random.fold_in(key, n * 100 + m), (rows, columns))
                for m in range(ARRAYS_PER_LAYER)
            }
            for n in range(LAYERS)
        },
        out_shardings=place,
    )
    params, first, second = (make(jax.random.key(3 * step + n)) for n in range(3))
    counter = jax.device_put(jnp.int32(step), everywhere)
    return TrainState(
        step=counter,
        batch_index=counter,
        params=params,
        opt_state=(first, second, counter),
        totals={"tokens": jax.device_put(np.zeros(2, np.uint32), everywhere)},
        sums={},
        loss_stats={"mean": jax.device_put(np.float32(1.0), everywhere)},
    )


def blocked_s(save: Any) -> float:
    began_s = time.perf_counter()
    save()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a save keeps training waiting.")
    parser.add_argument("--millions", type=float, default=17.0, help="of parameters; default: 17")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    folder = Path(tempfile.mkdtemp(prefix="saves-"))
    store = ProgramStore(None, "saves", print)
    manager = CheckpointManager(
        str(folder / "ours"),
        Retention(1),
        mesh,
        store,
        on_saved=lambda step, path: None,
        on_failed=lambda step, error: print(f"step {step}: {error}"),
        note=print,
    )
    orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    ours, theirs, copies = [], [], []
    for step in range(options.rounds + 1):
        state = jax.block_until_ready(state_of(int(options.millions * 1e6), mesh, step))
        if step == 0:
            manager.prepare(state)
        copies.append(blocked_s(lambda state=state: [np.array(leaf) for leaf in jax.tree.leaves(state)]))
        ours.append(blocked_s(lambda state=state, step=step: manager.save(step, state, {"batch_index": step})))
        manager.wait()
        args = ocp.args.PyTreeSave(dict(enumerate(jax.tree.leaves(state))))
        theirs.append(blocked_s(lambda step=step, args=args: orbax.save(folder / "orbax" / str(step), args=args)))
        orbax.wait_until_finished()
        shutil.rmtree(folder / "orbax" / str(step), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    # The first ones compile, and make folders.
    medians = {name: statistics.median(times[1:]) for name, times in (("ours", ours), ("orbax", theirs), ("copy", copies))}
    print(
        f"saves of {options.millions:g} M parameters: ours {1000 * medians['ours']:.0f} ms, raw asynchronous Orbax "
        f"{1000 * medians['orbax']:.0f} ms, ratio {medians['ours'] / medians['orbax']:.2f}; a copy of all arrays "
        f"{1000 * medians['copy']:.0f} ms"
    )


if __name__ == "__main__":
    main()
