"""The training process of one host: `python -m trainers.worker`, started and watched by a host agent.

It first gets a *preparation* (one JSON line on standard input), does everything that needs no device, and waits as a warm
standby. Its *orders* (the next line) make it a member of a generation, or of a precompilation, which compiles for a gang of
another size. Later lines ask it to stop or to save. It sends its events as JSON lines to the file descriptor named by EVENT_FD.
When its standard input ends, its agent is gone, and the process ends too.
"""

from __future__ import annotations

import os

from gangway.surroundings import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory(os.environ, "trainers.worker")  # first: it begins the process anew

import ctypes
import faulthandler
import importlib
import json
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from gangway.errors import code_missing, kind_of, user_frame, user_traceback
from gangway.storage import failed_requests, usage
from gangway.storage.documents import is_url
from gangway.terminal import STANDARD_INPUT, shown
from gangway.text import MAX_TRACEBACK, cut
from gangway.wire import orders as orders_of
from gangway.wire.events import Event, ExceptionRaised, FailureKind, Result
from gangway.wire.orders import Command, Member, Precompile, Preparation, Start
from trainers import runtime
from trainers.config.arguments import TrainingArguments, dataset_function, from_dict, load_object
from trainers.runtime import load_attempts
from trainers.runtime.context import SnapshotFiles

if TYPE_CHECKING:  # it imports JAX, and a preparation says first whether it may be imported
    from trainers.protocol import TrainerProtocol

PR_SET_PTRACER = 0x59616D61
HEARTBEAT_INTERVAL_S = 0.1
REQUESTS_INTERVAL_S = 60.0
"""How often it reports what was asked of buckets; also at its end."""
FAILED_EXIT_CODE = 1
IMPORTED_AHEAD = ("psutil", "encodings.idna", "orbax.checkpoint", "etils.epath", "grain")
"""See `import_ahead`."""
READ_BYTES = 1 << 16
MAX_FILES = 250
"""As many as come with one message."""


class Messages:
    """The lines that the agent writes to this process. They are read without a lock of Python's: a child that the user's code
    forks while a thread waits for the next one would find it held for ever."""

    def __init__(self, descriptor: int):
        self._descriptor, self._rest = descriptor, b""

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.next, b"")

    def next(self) -> bytes:
        """Returns the next line; an empty one when there are no more."""
        while b"\n" not in self._rest and (more := os.read(self._descriptor, READ_BYTES)):
            self._rest += more
        line, newline, self._rest = self._rest.partition(b"\n")
        return line + newline

    def take_apart(self) -> None:
        """Goes on with a descriptor of its own. Standard input is empty from here on: no order is lost to what the user's code
        reads from it, or starts."""
        self._descriptor = os.dup(self._descriptor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, STANDARD_INPUT)
        os.close(nothing)


messages = Messages(STANDARD_INPUT)


class EventPipe:
    """Sends JSON lines to the agent; any thread of the process that made it may send. What a forked child says is dropped."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lock = threading.Lock()
        self._process = os.getpid()

    def send(self, event: Event) -> None:
        # Before the lock: a thread that is not in the child may have held it when the child was forked.
        if os.getpid() != self._process:
            return
        # `default=str`: a value that JSON does not have must not keep an event from going out.
        line = json.dumps(event, default=str) + "\n"
        with self._lock:
            self._stream.write(line)
            # At once: what is still in a buffer is lost when the process is killed.
            self._stream.flush()


@dataclass
class Prepared:
    trainer_class: type
    arguments: TrainingArguments
    datasets: tuple[Any, Any]
    trainer: TrainerProtocol | None
    """Built ahead only if its class has `prepare`, which means that building it touches no device."""


def main() -> None:
    # First: from here on the agent can take stacks, whatever hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    load_attempts.report_crashes()
    # What is printed is a log on a disk, which may be full: no `print` of a user's code ends the training for it.
    sys.stdout, sys.stderr = (cast(TextIO, shown(stream, tries_again=True)) for stream in (sys.stdout, sys.stderr))
    let_trace(os.getppid())
    messages.take_apart()
    pipe = EventPipe(os.fdopen(int(os.environ.pop("EVENT_FD")), "w"))
    memory = os.environ.pop(orders_of.SNAPSHOT_SOCKET, None)
    process = os.getpid()
    try:
        prepared = prepare_or_explain(orders_of.read_preparation(next_message()))
        pipe.send({"t": time.time(), "ev": "warm"})
        orders = orders_of.read_orders(next_message())
        os.environ.update(orders.get("env", {}))  # before JAX looks for devices; only the orders say which slices there are
        if orders["cmd"] == "precompile":
            precompile(prepared, orders, pipe)
        else:
            run(prepared, orders, pipe, None if memory is None else received(int(memory)))
    except BaseException as error:  # the process's boundary: recorded for the driver, then it ends
        if os.getpid() != process:
            end_of_child(error)
        pipe.send(exception_event(error))
        traceback.print_exc()
        finish(FAILED_EXIT_CODE)
    finish(0)


def let_trace(agent: int) -> None:
    """Allows the agent, and the processes that it starts, such as py-spy, to trace this process. A kernel with Yama allows that
    only to ancestors, and py-spy is none. Kernels without Yama refuse the call, which does no harm."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(agent), 0, 0, 0)


def received(descriptor: int) -> SnapshotFiles:
    """Returns the memory for snapshots that the agent has sent before the orders."""
    with socket.socket(fileno=descriptor) as agent:
        own, kept = (socket.recv_fds(agent, READ_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC)[1] for _ in range(2))
    return SnapshotFiles(tuple(own), tuple(kept))


def next_message() -> Any:
    line = messages.next()
    if not line:
        finish(0)
    return json.loads(line)


def finish(code: int) -> NoReturn:
    """Ends the process without waiting for threads of libraries: everything that must be complete is complete by now."""
    # `os._exit` flushes nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_of_child(error: BaseException) -> NoReturn:
    """Ends a process that the user's code has forked, as Python would end it: it is not the host, and says nothing for it."""
    if not isinstance(error, SystemExit):
        traceback.print_exc()
        finish(FAILED_EXIT_CODE)
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
        finish(FAILED_EXIT_CODE)
    finish(error.code or 0)


def prepare_or_explain(message: Preparation) -> Prepared:
    """Prepares. Of a module that is not on this machine it says what a user needs to know of this machine."""
    try:
        return prepare(message)
    except (ImportError, ValueError) as error:
        # The parent's entries of `sys.path` come in PYTHONPATH; the rest is Python's own.
        own = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        explained = code_missing(error, socket.gethostname(), own)
        if explained is None:
            raise
        raise explained from error


def prepare(message: Preparation) -> Prepared:
    """Does everything that needs no device: imports, configuration, data, shapes."""
    from trainers.runtime import distributed

    distributed.find_platforms()
    trainer = None
    with distributed.no_devices_yet():
        arguments = from_dict(load_object(message["arguments_class"]), message["arguments"])
        import_ahead(arguments.run_folder)
        trainer_class = load_object(arguments.trainer)
        datasets = dataset_function(arguments)(arguments)
        if prepare_ahead := getattr(trainer_class, "prepare", None):
            trainer = trainer_class(arguments, *datasets)
    if trainer is not None and prepare_ahead is not None:
        prepare_ahead(trainer)
    return Prepared(trainer_class, arguments, datasets, trainer)


def import_ahead(run_folder: str) -> None:
    """Imports what training imports only inside the functions that need it. An import between a warm process and its first step
    would be a part of each recovery: tens of milliseconds on a disk, a second with a bucket."""
    for module in IMPORTED_AHEAD:
        importlib.import_module(module)
    if is_url(run_folder):
        from trainers.checkpoint import orbax_bucket

        orbax_bucket.import_ahead(run_folder)


def run(prepared: Prepared, orders: Start, pipe: EventPipe, snapshot_files: SnapshotFiles | None = None) -> None:
    host = runtime.Runtime(
        pipe.send,
        restore_from=orders.get("restore_from"),
        program_key=orders.get("program_key"),
        stop_at=orders.get("stop_at"),
        skip_batches=orders.get("skip_batches", ()),
        committed_step=orders.get("committed_step"),
        driver_term=orders.get("driver_term", 0),
        generation=orders["generation"],
        time_used_s=orders.get("time_used_s", 0.0),
        retry_for_s=orders.get("retry_for_s"),
    )
    host.snapshot_files, host.snapshots_since = snapshot_files, orders.get("snapshots_since", 0)
    runtime.install(host)
    # Before `join`: a stop or a notice that comes while the hosts wait for each other is not lost.
    listen(host)
    trainer = join(prepared, orders)
    if os.environ.get("GANGWAY_FAULTS"):
        from trainers.diagnostics import fault_injection

        fault_injection.install(trainer)
    process = os.getpid()
    # Whatever it raises is recorded in `main`.
    trainer.train()
    if os.getpid() != process:  # a child of the user's code has come back from the training, too
        finish(0)
    report_requests(host)
    host.emit({"ev": "done", "step": host.step, **result(trainer)})
    leave()


def precompile(prepared: Prepared, orders: Precompile, pipe: EventPipe) -> None:
    """Compiles and keeps the programs of a gang of this size, if the trainer can. Creates no state and trains nothing."""
    host = runtime.Runtime(pipe.send, program_key=orders["program_key"])
    runtime.install(host)
    trainer = join(prepared, orders)
    if compile_ahead := getattr(trainer, "precompile", None):
        compile_ahead()
    host.emit({"ev": "done", "step": 0})
    leave()


def join(prepared: Prepared, orders: Member) -> Any:
    """Joins the gang, and returns the trainer."""
    from trainers.runtime import distributed

    host = runtime.current()
    host.phase("join")
    devices = orders.get("local_device_ids")
    member = distributed.JoinSpec(
        host=orders["host"],
        num_hosts=orders["num_hosts"],
        coordinator=orders["coordinator"],
        local_device_ids=None if devices is None else tuple(devices),
    )
    if folder := orders.get("cache_dir"):
        distributed.use_compile_cache(folder)
    distributed.join(member)
    host.emit({"ev": "joined", "pid": os.getpid(), "machine": socket.gethostname()})
    tells = orders["host"] == 0 and orders.get("generation") == 0
    distributed.check_platform(host.note if tells else lambda message: None, of_gang=True)
    return prepared.trainer or prepared.trainer_class(prepared.arguments, *prepared.datasets)


def leave() -> None:
    from trainers.runtime import distributed, multihost

    # All hosts have sent `done` before host 0, whose process is the coordinator, may leave.
    multihost.barrier("done")
    distributed.leave()


def result(trainer: object) -> Result:
    from gangway.stop_reason import StopReason
    from trainers.runtime.context import plain

    host, output = runtime.current(), getattr(trainer, "output", None)
    reason = host.stop_reason or StopReason.MAX_STEPS
    if output is None:  # it does not say why it has ended
        return {"stop_reason": str(reason), "result": {}}
    try:
        result = plain({**output.metrics, "checkpoint": output.checkpoint_path})
        reason = StopReason(plain(output.stop_reason))
    except Exception as error:  # a trainer of the user's own, whose work is done
        host.tell_odd(f"the trainer's output: {type(error).__name__}: {error}")
        return {"stop_reason": str(reason), "result": {}}
    return {"stop_reason": str(reason), "result": result}


def listen(host: Any) -> None:
    """Starts to listen for signals and later orders, and to send heartbeats and notices."""

    process = os.getpid()

    def terminated(number: int, frame: FrameType | None) -> None:
        if not of_child(number):
            host.notice("SIGTERM")  # only the machine sends SIGTERM: the agent sends orders

    def interrupted(number: int, frame: FrameType | None) -> None:
        if not of_child(number):
            host.request_stop("interrupted")

    def of_child(number: int) -> bool:
        """Ends a process that the user's code has forked, as the signal does that was meant for it."""
        if os.getpid() == process:
            return False
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return True

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, interrupted)
    threading.Thread(target=read_commands, args=(host,), name="orders", daemon=True).start()
    threading.Thread(target=heartbeat_loop, args=(host,), name="heartbeat", daemon=True).start()


def read_commands(host: runtime.Runtime) -> None:
    """Reads later orders. When the input ends, the agent is gone, and nobody else would ever stop this process."""
    for line in messages:
        try:
            obey(host, orders_of.read_command(json.loads(line)))
        except ValueError as error:  # this thread must not end: the next order may be to save and stop
            host.note(f"an order is not followed: {error}")
    finish(FAILED_EXIT_CODE)


def obey(host: runtime.Runtime, command: Command) -> None:
    match command["cmd"]:
        case "stop":
            host.request_stop(command["reason"])
        case "save":
            host.request_save()
        case "profile":
            host.request_profile(command)
        case "taken_over":
            host.taken_over(command["driver_term"])


def heartbeat_loop(host: Any) -> None:
    """Reports the progress of the loop, from a thread of its own: the loop never waits for a pipe."""
    reported, requests_at_s = (0, 0, 0), time.monotonic()
    while True:
        # Sent from here: the signal handler that took it must not write to the pipe.
        if notice := host.take_notice():
            host.emit({"ev": "notice", **notice})
        failed, why = failed_requests.HERE.take()
        if failed:
            host.emit({"ev": "requests_failed", "number": failed, "why": why})
        if time.monotonic() - requests_at_s > REQUESTS_INTERVAL_S:
            report_requests(host)
            requests_at_s = time.monotonic()
        # Only when something has changed: without heartbeats the agent sees that there is no progress.
        if (now := (host.step, host.batch_index, host.evaluated_batches)) != reported:
            progress = {"step": now[0], "batch_index": now[1], "evaluated_batches": now[2], "busy_s": round(host.busy_s, 6)}
            host.emit({"ev": "heartbeat", **progress, "usage": host.usage})
            reported = now
        time.sleep(HEARTBEAT_INTERVAL_S)


def report_requests(host: Any) -> None:
    """Reports what was asked of buckets since the last time."""
    if counts := usage.HERE.take():
        host.emit({"ev": "requests_made", "counts": counts})


def exception_event(error: BaseException) -> ExceptionRaised:
    frame = user_frame(error)
    return {
        "t": time.time(),
        "ev": "exception",
        "type": type(error).__name__,
        "message": cut(text_of(error)),
        "traceback": cut("".join(traceback.format_exception(error)), MAX_TRACEBACK),
        "user_frame": frame and cut(frame),
        "user_traceback": cut(user_traceback(error)),
        "step": runtime.current().at_step,
        **kind_or_user(error, kind_of),
    }


def kind_or_user(error: BaseException, kind_of: Callable[[BaseException], FailureKind]) -> FailureKind:
    try:
        return kind_of(error)
    except Exception:  # it cannot say its message
        return {"kind": "user", "deterministic": False}


def text_of(error: BaseException) -> str:
    """Returns the message of an exception, also of one of the user's own that cannot say it."""
    try:
        return str(error)
    except Exception as failed:
        return f"({type(error).__name__}.__str__ raises {type(failed).__name__})"


if __name__ == "__main__":
    main()
