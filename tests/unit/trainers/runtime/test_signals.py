"""Ctrl-C, SIGTERM and SIGHUP in a program that trains: the state is saved, and the process is as before."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gangway.stop_reason import StopReason
from tests.unit.training import FIXED, arguments, of, trainer
from trainers import runtime
from trainers.callbacks import Callback
from trainers.commands import run
from trainers.runtime import signals

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Sends(Callback):
    """Sends this process signals in step 3."""

    def __init__(self, *numbers):
        self.numbers, self.handlers = numbers, None

    def on_step_end(self, state, **kwargs):
        if state.global_step == 3:
            self.handlers = present()
            for number in self.numbers:
                os.kill(os.getpid(), number)


def present():
    return [signal.getsignal(number) for number in ALL]


@pytest.fixture(autouse=True)
def _as_in_a_program(monkeypatch):
    """The test runner may have handlers of its own."""
    before = present()
    monkeypatch.setattr(signals, "ignores", lambda number: False)  # whatever has started the tests
    for number in ALL:
        signal.signal(number, signals.UNHANDLED[number])
    yield
    for number, handler in zip(ALL, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "reason"), list(signals.REASONS.items()))
def test_a_signal_saves_and_the_process_is_as_before(tmp_path, events, capfd, number, reason):
    before, sends = present(), Sends(number)
    made = trainer(tmp_path, sends, max_num_steps=1000, checkpoint={}, optimizer=FIXED)
    state = made.train()
    assert made.output.stop_reason is reason
    assert of(events, "saved")[-1]["step"] == int(state.step) < 1000
    assert present() == before != sends.handlers
    assert runtime.current().stop_reason is None  # it was for this training
    assert f"{number.name}: training saves and stops. Ctrl-C ends it at once." in capfd.readouterr().err


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_ends_it_at_once(tmp_path, events, numbers):
    before, made = present(), trainer(tmp_path, Sends(*numbers), max_num_steps=1000, checkpoint={})
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.output is None
    assert present() == before
    assert runtime.current().stop_reason is None


def test_what_handles_the_signals_already_goes_on_handling_them():
    taken = []
    for number in ALL:
        signal.signal(number, lambda number, frame: taken.append(number))
    host, before = runtime.Runtime(lambda event: None), present()
    with signals.handled(host):
        assert present() == before
        for number in ALL:
            signal.raise_signal(number)
    assert taken == list(ALL)
    assert host.stop_reason is None


def test_another_thread_touches_no_handler():
    seen = []

    def look():
        with signals.handled(runtime.current()):
            seen.append(present())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [present()]


def test_a_second_interrupt_ends_the_command_at_once_too(tmp_path):
    run.build(arguments(tmp_path), lambda event: None)
    signal.raise_signal(signal.SIGINT)
    assert runtime.current().stop_reason == StopReason.INTERRUPTED
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    runtime.current().training_ended()
    assert runtime.current().stop_reason == StopReason.INTERRUPTED  # of the whole command


def test_a_program_without_a_terminal_trains_on_when_one_is_closed(monkeypatch):
    monkeypatch.setattr(signals, "ignores", lambda number: number == signal.SIGHUP)
    host = runtime.Runtime(lambda event: None)
    with signals.handled(host):
        signal.raise_signal(signal.SIGHUP)
    assert host.stop_reason is None
    signals.handle(host)
    signal.raise_signal(signal.SIGHUP)
    assert host.stop_reason is None
