"""The training process of one host: `python -m trainers.worker`, started and watched by a host agent.

It first gets a *preparation* (one JSON line on standard input), does all that needs no device, and waits as a warm standby. Its
*orders* (the next line) make it a member of a generation, or of a precompilation, which compiles for a gang of another size.
Later lines ask it to stop or to save. Everything it has to tell goes as JSON lines to the file descriptor named by EVENT_FD.
When its standard input ends, its agent is gone, and it goes too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

from trainers.config.arguments import TrainingArguments, from_dict, load_object

PR_SET_PTRACER = 0x59616D61
HEARTBEAT_INTERVAL_S = 0.1
FAILED_EXIT_CODE = 1


class EventPipe:
    """JSON lines to the agent; any thread may send."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, default=str) + "\n"
        with self._lock:
            self._stream.write(line)
            self._stream.flush()


@dataclass
class Prepared:
    trainer_class: type
    arguments: TrainingArguments
    datasets: tuple[Any, Any]
    trainer: Any | None
    """Built ahead only if its class says, by having `prepare`, that building it touches no device."""


def main() -> None:
    # In order: stacks can be taken from here on, whatever hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    let_trace(os.getppid())
    pipe = EventPipe(os.fdopen(int(os.environ["EVENT_FD"]), "w"))
    try:
        prepared = prepare(next_message())
        pipe.send({"t": time.time(), "ev": "warm"})
        orders = next_message()
        os.environ.update(orders.get("env") or {})  # before JAX looks at its devices: which slices there are is known only now
        (precompile if orders["cmd"] == "precompile" else run)(prepared, orders, pipe)
    except BaseException as error:  # the process's boundary: recorded for the driver, then it ends
        pipe.send(exception_event(error))
        traceback.print_exc()
        finish(FAILED_EXIT_CODE)
    finish(0)


def let_trace(agent: int) -> None:
    """Where the kernel lets none but ancestors look into a process (Yama), its agent may, and what the agent starts, such as
    py-spy, which is no ancestor; nobody else may. Other kernels know no such thing, and refuse."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(agent), 0, 0, 0)


def next_message() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        finish(0)
    return json.loads(line)


def finish(code: int) -> None:
    """Ends the process without waiting for threads of libraries: what must be complete is complete by now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare(message: dict[str, Any]) -> Prepared:
    """All that needs no device: imports, configuration, data, shapes."""
    from trainers.runtime import distributed

    distributed.find_platforms()
    arguments = from_dict(load_object(message["arguments_class"]), message["arguments"])
    trainer_class = load_object(arguments.trainer)
    datasets = load_object(arguments.data.dataset)(arguments)
    trainer = None
    if prepare_ahead := getattr(trainer_class, "prepare", None):
        trainer = trainer_class(arguments, *datasets)
        prepare_ahead(trainer)
    return Prepared(trainer_class, arguments, datasets, trainer)


def run(prepared: Prepared, orders: dict[str, Any], pipe: EventPipe) -> None:
    from trainers import runtime

    host = runtime.Runtime(
        pipe.send,
        restore_from=orders.get("restore_from"),
        program_key=orders.get("program_key"),
        stop_at=orders.get("stop_at"),
        skip_batches=orders.get("skip_batches") or (),
        fence=orders.get("fence"),
        run=orders.get("run"),
        committed_step=orders.get("committed_step"),
        driver_term=orders.get("driver_term") or 0,
        generation=orders.get("generation") or 0,
    )
    runtime.install(host)
    listen(host)
    trainer = join(prepared, orders)
    if os.environ.get("GANGWAY_FAULTS"):
        from trainers.diagnostics import fault_injection

        fault_injection.install(trainer)
    trainer.train()
    host.emit("done", step=host.step, **result(trainer))
    leave()


def precompile(prepared: Prepared, orders: dict[str, Any], pipe: EventPipe) -> None:
    """Compiles and keeps what a gang of this size would run, if the trainer can: no state is made, nothing trained."""
    from trainers import runtime

    host = runtime.Runtime(pipe.send, program_key=orders["program_key"])
    runtime.install(host)
    trainer = join(prepared, orders)
    if compile_ahead := getattr(trainer, "precompile", None):
        compile_ahead()
    host.emit("done", step=0)
    leave()


def join(prepared: Prepared, orders: dict[str, Any]) -> Any:
    """The trainer, with this process in its place in the gang."""
    from trainers import runtime
    from trainers.runtime import distributed

    host = runtime.current()
    host.phase("join")
    member = distributed.Membership(
        host=orders["host"],
        num_hosts=orders["num_hosts"],
        coordinator=orders["coordinator"],
        local_device_ids=orders.get("local_device_ids"),
    )
    if folder := orders.get("cache_dir"):
        distributed.use_compile_cache(folder)
    distributed.join(member)
    host.emit("joined")
    return prepared.trainer or prepared.trainer_class(prepared.arguments, *prepared.datasets)


def leave() -> None:
    from trainers.runtime import distributed, multihost

    multihost.barrier("done")
    distributed.leave()


def result(trainer: Any) -> dict[str, Any]:
    output = getattr(trainer, "output", None)
    if output is None:
        return {"stop_reason": "max_steps", "result": {}}
    return {"stop_reason": str(output.stop_reason), "result": {**output.metrics, "checkpoint": output.checkpoint_path}}


def listen(host: Any) -> None:
    """Starts to take what comes from outside: signals, later orders. From here on heartbeats are told, and notices with them."""

    def terminated(number: int, frame: FrameType | None) -> None:
        host.notice("SIGTERM")  # nobody but the machine sends it: the agent gives orders

    def interrupted(number: int, frame: FrameType | None) -> None:
        host.request_stop("interrupted")

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, interrupted)
    threading.Thread(target=read_commands, args=(host,), name="orders", daemon=True).start()
    threading.Thread(target=heartbeat_loop, args=(host,), name="heartbeat", daemon=True).start()


def read_commands(host: Any) -> None:
    """Reads later orders. The end of input means that the agent is gone: nobody would ever stop this process."""
    for line in sys.stdin:
        message = json.loads(line)
        if message["cmd"] == "stop":
            host.request_stop(message["reason"])
        elif message["cmd"] == "save":
            host.request_save()
        elif message["cmd"] == "profile":
            host.request_profile(message)
        elif message["cmd"] == "fence":
            host.fence(message["path"])
    finish(FAILED_EXIT_CODE)


def heartbeat_loop(host: Any) -> None:
    """Tells how far the loop is, from a thread of its own: the loop never waits for a pipe."""
    told = (0, 0)
    while True:
        if notice := host.take_notice():
            host.emit("notice", **notice)
        if (now := (host.step, host.batch_index)) != told:
            host.emit("heartbeat", step=now[0], batch_index=now[1], busy_s=round(host.busy_s, 6))
            told = now
        time.sleep(HEARTBEAT_INTERVAL_S)


def exception_event(error: BaseException) -> dict[str, Any]:
    from trainers import runtime
    from trainers.errors import kind_of

    return {
        "t": time.time(),
        "ev": "exception",
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "step": runtime.current().step,
        **kind_of(error),
    }


if __name__ == "__main__":
    main()
