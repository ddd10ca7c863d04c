"""The silence of a process that reports nothing: what breaks it, and what does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster.agent import printed
from cluster.agent.hang_monitor import HangMonitor
from cluster.agent.inputs import Now
from orchestrator.policies.watchdog import WatchdogConfig

PROCESS = SimpleNamespace(position=lambda: {"step": None, "batch_index": None})
JOINED = {"t": 0.0, "ev": "joined"}


def monitor(**limits):
    """One that has observed a process join at second 1000."""
    made = HangMonitor(WatchdogConfig(**limits).limits(), 1000.0)
    made.observe(JOINED, 1000.0)
    return made


def silence(watched, at_s):
    return watched.silence(PROCESS, Now(at_s, 5e9 + at_s))


def test_a_process_is_silent_after_its_limit():
    watched = monitor(silent_s=60.0)
    assert silence(watched, 1059.0) is None
    told = silence(watched, 1061.0)
    assert (told["ev"], told["phase"], told["limit_s"], told["waited_s"]) == ("overdue", "silence", 60.0, 61.0)


@pytest.mark.parametrize(
    "sign", [lambda watched: watched.printed(1061.0), lambda watched: watched.observe({"t": 0.0, "ev": "metrics"}, 1061.0)]
)
def test_a_printed_line_or_an_event_breaks_the_silence(sign):
    watched = monitor(silent_s=60.0)
    sign(watched)
    assert silence(watched, 1061.0) is None
    assert silence(watched, 1121.0) is not None


def test_who_has_other_limits_or_none_or_has_ended_is_not_silent():
    reporting, free, ended = monitor(silent_s=60.0), monitor(silent_s=None), monitor(silent_s=60.0)
    reporting.observe({"t": 0.0, "ev": "phase", "phase": "evaluate"}, 1000.0)
    ended.end()
    assert [silence(watched, 1e6) for watched in (reporting, free, ended)] == [None, None, None]


def test_only_a_log_that_grows_is_a_sign(tmp_path):
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    first.write_text("a line\n")
    second.write_text("another line\n")
    heard, looks = [], iter([str(first), str(first), str(first), str(second), str(second), None])

    class Closed:
        looked = 0

        def wait(self, timeout_s):
            self.looked += 1
            if self.looked == 3:
                first.write_text("a line\nand one more\n")
            return self.looked > 6

    closed = Closed()
    printed.follow(lambda: next(looks), lambda: heard.append(closed.looked), closed)
    assert heard == [3]
