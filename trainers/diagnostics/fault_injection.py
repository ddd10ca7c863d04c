"""Faults on order, from inside a training process: for `python -m orchestrator.chaos` and `verify`. Inactive in every other
run.

The environment variable GANGWAY_FAULTS names a folder that all hosts see. In it:

    host-0001.json          an order to host 1, taken once: {"id": "3-hang", "kind": "hang", "at": 120, ...}; `at`: the first
                            batch index at which the fault may happen
    taken/3-hang.json       what came of it: the order with `host`, `pid`, `batch_index`, `at_s`
    pace.json               {"step_s": 0.1}: as long as it is there, every step takes so much longer, on all hosts
    members/host-0001.json  who is host 1 now: {"host", "num_hosts", "pid", "at_s"}
    batches/                if it is there: what was in each batch, a digest for every row, one file for each process

The kind of an order is the name of a function here, whose docstring says what else the order must have.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from gangway.stop_reason import StopReason
from gangway.storage import durable, ours
from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.runtime import multihost

FOLDER_VARIABLE = "GANGWAY_FAULTS"
LONG_S = 86_400.0
UNCORRECTABLE = (
    "INTERNAL: CUDA error: Failed to synchronize CUDA stream: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"
)


def install(trainer: object) -> None:
    """Makes `trainer` follow the orders in the folder. Called when the process has joined its generation.

    A trainer that takes no callbacks can only be killed from outside; it is listed among the members all the same.
    """
    folder = Path(os.environ[FOLDER_VARIABLE])
    host = jax.process_index()
    member = {"host": host, "num_hosts": jax.process_count(), "pid": os.getpid(), "at_s": time.time()}
    write(folder / "members" / f"host-{host:04d}.json", member)
    if isinstance(callbacks := getattr(trainer, "callbacks", None), CallbackList):
        # Before the other callbacks: it must see a batch as it was read.
        callbacks.callbacks.insert(0, Injector(folder, host))


ORDER = ours.named("an order for a fault", r"host-\d{4}\.\d+")


class Injector(Callback):
    """Looks for an order at the beginning of every step. That costs two or three failed `stat` calls, a few microseconds."""

    def __init__(self, folder: Path, host: int):
        self.folder, self.host = folder, host
        self.slow_steps, self.slow_s = 0, 0.0
        self._order = folder / f"host-{host:04d}.json"
        self._pace = folder / "pace.json"
        self._record = folder / "batches" / f"host-{host:04d}-{os.getpid()}.jsonl"

    def on_step_begin(self, state: RunInfo, *, batch: Any, **kwargs: Any) -> None:
        if self._record.parent.exists():
            with self._record.open("a") as file:
                file.write(json.dumps({"batch": state.batch_index, "rows": row_digests(batch)}) + "\n")
        if pace := read(self._pace):
            time.sleep(pace["step_s"])
        if self.slow_steps > 0:
            self.slow_steps -= 1
            time.sleep(self.slow_s)
        if order := self._claimed_order(state.batch_index):
            FAULTS[order["kind"]](self, order, state, batch)

    def _claimed_order(self, batch_index: int) -> dict[str, Any] | None:
        order = read(self._order)
        # `<`: a process that begins behind the batch (after a restart) takes the order all the same.
        if order is None or batch_index < order.get("at", 0):
            return None
        try:
            # If two processes believe to be this host, only one of them gets the order.
            os.rename(self._order, self._order.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:
            return None
        taken = {**order, "host": self.host, "pid": os.getpid(), "batch_index": batch_index, "at_s": time.time()}
        # Before the fault: afterwards this process may no longer exist.
        write(self.folder / "taken" / f"{order['id']}.json", taken)
        ours.delete(self._order.with_suffix(f".{os.getpid()}"), ORDER)
        return order


def slow(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """`step_s`, `steps`: each of the next steps takes so much longer. It sleeps and does not take CPUs away: fewer CPUs would
    change the last bits."""
    injector.slow_s, injector.slow_steps = order["step_s"], order["steps"]


def hang(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> NoReturn:
    """Waits for ever in Python, while every thread of JAX keeps answering."""
    hang_for_ever()


def skip_collective(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """This host waits in an exchange that no other host takes part in; the others wait for it in the step."""
    multihost.barrier("a collective that the other hosts skip", timeout_s=LONG_S)


def desync(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """Makes this host count one batch too many."""
    state.global_step += 1  # `batch_index` is the same number


def nan(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """Gives this host's rows of this batch the weight NaN: the loss and the gradients of all hosts become NaN."""
    weight = batch["weight"]
    # Only on this host's own devices: no collective, so the other hosts need not know of it.
    shards = [
        jax.device_put(np.full(shard.data.shape, np.nan, weight.dtype), shard.device) for shard in weight.addressable_shards
    ]
    batch["weight"] = jax.make_array_from_single_device_arrays(weight.shape, weight.sharding, shards)


def stuck_save(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """Makes the next checkpoint hang: this host's part of it is never completed."""
    from trainers.checkpoint.array_io import ArrayFiles

    write_whole = ArrayFiles.write

    def never_ends(*args: Any) -> None:
        write_whole(*args)
        write_for_ever()

    # On the class: the manager of this run has its instance already.
    ArrayFiles.write = never_ends  # type: ignore[method-assign, assignment]


def exception(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> NoReturn:
    raise RuntimeError(f"an error on order ({order['id']}) at batch {state.batch_index}")


def device_error(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> NoReturn:
    """Raises what a step raises on a GPU whose memory has an error that cannot be corrected."""
    raise jax.errors.JaxRuntimeError(UNCORRECTABLE)


def odd_event(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """`name`: reports events that are none; one as a trainer's own code does, and one past all that looks at it on the way, as a
    program of another version would."""
    odd: Any = {"ev": order["name"], "step": np.int64(3)}
    past: Any = {"ev": f"{order['name']}_sent", "step": {"not": "a number"}, "t": "now"}
    runtime.current().emit(odd)
    runtime.current().send(past)


def fork(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """Has processes that it forks compute something, as user code does with `multiprocessing`."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]


def kill(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """Ends the process as `kill -9` from outside would, but at a known batch."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(injector: Injector, order: Mapping[str, Any], state: RunInfo, batch: Any) -> None:
    """Asks for a stop, as Ctrl-C would: all hosts agree on a step, save, and stop."""
    runtime.current().request_stop(StopReason.REQUESTED)


FAULTS: dict[str, Callable[[Injector, Mapping[str, Any], RunInfo, Any], None]] = {
    fault.__name__: fault
    for fault in (slow, hang, skip_collective, desync, nan, stuck_save, exception, device_error, odd_event, fork, kill, stop)
}


def hang_for_ever() -> NoReturn:
    while True:
        time.sleep(LONG_S)


def write_for_ever() -> NoReturn:
    while True:
        time.sleep(LONG_S)


def row_digests(batch: Mapping[str, jax.Array]) -> dict[str, str]:
    """Returns `micro-batch.row` -> digest over all leaves, for this host's rows without padding: the same on any number of
    hosts."""
    rows: dict[str, Any] = {}
    padding: set[str] = set()
    # Sorted: the digest must not depend on the order in which a loader adds its leaves.
    for name in sorted(batch):
        # Devices that differ only along the tensor axis hold the same rows.
        for shard in {str(shard.index): shard for shard in batch[name].addressable_shards}.values():
            first_micro, first_row = (part.start or 0 for part in shard.index[:2])
            values = np.asarray(shard.data)
            for micro, row in np.ndindex(*values.shape[:2]):
                key = f"{first_micro + micro}.{first_row + row}"
                rows.setdefault(key, hashlib.blake2b(digest_size=8)).update(name.encode() + values[micro, row].tobytes())
                if name == "weight" and values[micro, row] == 0:
                    padding.add(key)
    return {key: digest.hexdigest() for key, digest in rows.items() if key not in padding}


def read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the file atomically: a reader gets all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_shared(path, json.dumps(data).encode(), 0o666)
