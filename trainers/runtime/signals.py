"""Ctrl-C, SIGTERM and the end of its terminal (SIGHUP) ask a training to stop: it then ends between two steps, with its state
saved. Under `nohup`, and in a session without a terminal, it goes on without one; behind `&` in a script, Ctrl-C is not its."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from gangway.stop_reason import StopReason
from gangway.terminal import ignores
from trainers.runtime.context import Runtime

REASONS = {
    signal.SIGINT: StopReason.INTERRUPTED,
    signal.SIGTERM: StopReason.TERMINATED,
    signal.SIGHUP: StopReason.INTERRUPTED,
}
UNHANDLED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
"""The handlers of a process in which nobody handles these signals."""
STDERR = 2


def handler(host: Runtime, *, of_training: bool = False) -> Callable[[int, FrameType | None], None]:
    """Returns a handler of the signals, which asks `host` for a stop. After the first signal, Ctrl-C raises KeyboardInterrupt,
    as it does without a handler. `of_training`: the request is done with at the end of the training (`training_ended`)."""
    taken: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if taken and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not taken:
            # Not by `print`: the handler may interrupt one.
            with suppress(OSError):
                os.write(STDERR, f"\n{signal.Signals(number).name}: training saves and stops. Ctrl-C ends it at once.\n".encode())
        taken.append(number)
        host.request_stop(REASONS[signal.Signals(number)], of_training=of_training)

    return ask


def handle(host: Runtime) -> None:
    """Lets the signals ask `host` for a stop, for the rest of the process. Must be called in the main thread."""
    ask = handler(host)
    for number in REASONS:
        signal.signal(number, signal.SIG_IGN if ignores(number) else ask)


@contextmanager
def handled(host: Runtime) -> Iterator[None]:
    """Lets the signals ask for the end of this training, where nobody handles them: neither an agent's process, nor the user's
    program. After SIGTERM too the program goes on. Elsewhere than in the main thread there are no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ask, before = handler(host, of_training=True), dict[signal.Signals, Any]()
    for number, unhandled in UNHANDLED.items():
        # What another language has set is None, and stays.
        if signal.getsignal(number) == unhandled:
            before[number] = signal.signal(number, signal.SIG_IGN if ignores(number) else ask)
    try:
        yield
    finally:
        for number, restored in before.items():
            signal.signal(number, restored)
