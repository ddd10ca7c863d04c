"""Who may look into a training process: its memory holds the data, and the keys to it."""

import ctypes
import os
from types import SimpleNamespace

import pytest

from trainers import worker


class StopHere(Exception):
    """Instead of the preparation."""


def test_a_training_process_lets_its_agent_trace_it_and_nobody_else(monkeypatch):
    calls = []

    def prctl(option, argument, *rest):
        calls.append((option, ctypes.c_ulong(getattr(argument, "value", argument)).value, rest))

    def stop_here():
        raise StopHere

    monkeypatch.setattr(worker.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=prctl))
    monkeypatch.setattr(worker.faulthandler, "register", lambda *args, **kwargs: None)
    monkeypatch.setattr(worker.os, "fdopen", lambda *args: stop_here())
    monkeypatch.setenv("EVENT_FD", "1")
    with pytest.raises(StopHere):
        worker.main()
    assert calls == [(0x59616D61, os.getppid(), (0, 0, 0))]
