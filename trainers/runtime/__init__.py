"""The runtime of one process among many: events to its agent, joining, agreement between hosts, kept executables.

A user's own trainer imports this package alone: `from trainers import runtime; runtime.progress(step)`. Free of JAX.
"""

from gangway.wire.events import Event
from trainers.runtime.context import (
    Runtime,
    current,
    install,
    progress,
    request_stop,
    restore_from,
    saved,
    stop_requested,
)

__all__ = ["Event", "Runtime", "current", "install", "progress", "request_stop", "restore_from", "saved", "stop_requested"]
