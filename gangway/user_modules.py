"""What a user's module may not do to the process that imports it. Free of JAX."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import thread as futures
from contextlib import redirect_stdout
from fnmatch import fnmatchcase
from types import ModuleType

from gangway.errors import ModuleError, user_frame

TAKEN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_JAX = ("JAX_*", "XLA_*", "CUDA_VISIBLE_DEVICES")
"""Variables that JAX reads, and does not set as it is imported."""
_one_at_a_time = threading.RLock()


def imported(name: str) -> ModuleType:
    """Imports a module of the user's, as many commands and each host do: without the words of the command, and with standard
    error for what it prints, since standard output may be read by a program.

    Raises ModuleError if it ends the process, or leaves it changed: see `_done_to_process`. It is imported again next time, and
    refused again."""
    with _one_at_a_time:
        if name in sys.modules:
            return importlib.import_module(name)
        changes, words, ended = _done_to_process(), sys.argv[1:], ""
        try:
            with redirect_stdout(sys.stderr):
                del sys.argv[1:]
                module = importlib.import_module(name)
        except SystemExit as error:
            ended = f"ends the process, with the exit status {error.code} ({user_frame(error)})"
        finally:
            sys.argv[1:] = words
            done = [change for look in changes if (change := look())]
        if ended or done:
            file = getattr(sys.modules.pop(name, None), "__file__", None)
            what = ended or ", ".join(done)
            raise ModuleError(
                f"as it is imported, {file or name} {what}: a module must only define things; put the rest into a "
                'function, or below if __name__ == "__main__":'
            )
        return module


def _done_to_process() -> list[Callable[[], str]]:
    """Returns functions that look at what has been done to this process since: each undoes it, and says what; empty: nothing."""
    here, filters, variables = os.getcwd(), [*warnings.filters], _variables_of_jax()
    in_main = threading.current_thread() is threading.main_thread()  # no other thread can take signals
    handlers = {number: signal.getsignal(number) for number in TAKEN_SIGNALS if in_main}
    start, started = threading.Thread.start, []

    def start_as_daemon(thread: threading.Thread) -> None:
        # Those of pools end with the process.
        if not thread.daemon and thread._target is not futures._worker:  # type: ignore[attr-defined]
            thread.daemon = True
            started.append(thread)
        start(thread)

    threading.Thread.start = start_as_daemon  # type: ignore[assignment, method-assign]

    def threads() -> str:
        threading.Thread.start = start  # type: ignore[method-assign]
        alive = [thread.name for thread in started if thread.is_alive()]
        return f"starts a thread for which the process would not end ({', '.join(alive)})" if alive else ""

    def folder() -> str:
        if (now := os.getcwd()) == here:
            return ""
        os.chdir(here)
        return f"changes the working folder to {now}"

    def signals() -> str:
        taken = [number for number, handler in handlers.items() if signal.getsignal(number) is not handler]
        for number in taken:
            signal.signal(number, handlers[number] or signal.SIG_DFL)
        return f"takes {', '.join(number.name for number in taken)}, with which a run is stopped" if taken else ""

    def errors() -> str:
        of_all = [each for each in warnings.filters if (each[0], each[1], each[3]) == ("error", None, None)]
        new = [each for each in of_all if each not in filters]
        for each in new:
            warnings.filters.remove(each)  # type: ignore[attr-defined]
        return "makes errors of the warnings of all modules" if new else ""

    def of_jax() -> str:
        now = _variables_of_jax()
        changed = sorted(name for name in {*now, *variables} if now.get(name) != variables.get(name))
        for name in changed:
            os.environ.pop(name, None)
            os.environ.update({name: variables[name]} if name in variables else {})
        return f"sets {', '.join(changed)} (the shell, or hosts.env, is the place)" if changed else ""

    return [threads, folder, signals, errors, of_jax]


def _variables_of_jax() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, each) for each in OF_JAX)}
