"""Callbacks: observers of a run, called in the order they were added; none may change a result."""

from trainers.callbacks.callback import Callback, CallbackList, RunInfo

__all__ = ["Callback", "CallbackList", "RunInfo"]
