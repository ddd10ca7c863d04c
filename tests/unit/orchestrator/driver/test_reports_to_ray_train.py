"""What reaches Ray Train when it takes reports slower than the run publishes."""

from __future__ import annotations

import threading

from orchestrator.driver.ray_train import TrainReporter
from tests.programs.processes import PATIENCE_S


class Reporter(TrainReporter):
    """To a Ray Train that takes a report only when it may."""

    def __init__(self):
        self.taken, self.asked, self.may = [], threading.Event(), threading.Semaphore(0)
        super().__init__(supervised=False)
        self.report({"step": 0})
        assert self.asked.wait(PATIENCE_S)

    def _send(self, *report):
        self.asked.set()
        self.may.acquire()
        self.taken.append(report)


def test_metrics_that_wait_are_one_report_and_each_checkpoint_is_its_own():
    reporter = Reporter()
    reporter.report({"step": 1, "eval_loss": 3.0})
    for step in range(2, 1000):
        reporter.report({"step": step, "loss": 1 / step})
    saved = ["/run/checkpoints/1000", "/run/checkpoints/1001"]
    for step, path in enumerate(saved, 1000):
        reporter.report({"step": step}, path)
    for step in range(1002, 1010):
        reporter.report({"step": step})
    reporter.may.release(5)
    reporter.close()
    of_waiting = {"step": 999, "eval_loss": 3.0, "loss": 1 / 999}
    expected = [({"step": 0}, None), (of_waiting, None), ({"step": 1000}, saved[0]), ({"step": 1001}, saved[1])]
    assert reporter.taken == [*expected, ({"step": 1009}, None)]


def test_a_worker_whose_reports_are_not_taken_ends_all_the_same_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(TrainReporter, "CLOSE_TIMEOUT_S", 0.1)
    reporter = Reporter()
    for step in (1, 2):
        reporter.report({"step": step}, f"/run/checkpoints/{step}")
    reporter.close()
    reporter.may.release(3)
    reporter._thread.join(PATIENCE_S)
    assert not reporter._thread.is_alive()
    assert reporter.taken == [({"step": 0}, None)]
    assert "2 reports did not reach Ray Train within 0 s" in caplog.text
