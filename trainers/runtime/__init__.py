"""One process among many: what a trainer may ask of whoever runs it, joining, agreement between hosts, kept executables.

A trainer of one's own imports this package alone: `from trainers import runtime; runtime.progress(step)`. Free of JAX.
"""

from trainers.runtime.context import Event, Runtime, current, install, progress, restore_from, saved, stop_requested

__all__ = ["Event", "Runtime", "current", "install", "progress", "restore_from", "saved", "stop_requested"]
