"""What a trial of a step on CPUs says, and when there is none."""

from __future__ import annotations

import pytest

from orchestrator.planning import trial


def test_a_step_takes_as_long_as_on_the_slowest_host_in_the_fastest_window():
    assert trial.trial_of([[3.0, 1.0, 2.0], [2.5, 1.5, 9.0]]) == trial.Trial(1.5, 9.0)


def test_what_cannot_be_tried_here_says_why(monkeypatch):
    monkeypatch.setattr(trial, "_cores", lambda: 2)
    monkeypatch.setattr(trial, "_free_bytes", lambda: 4e9)
    assert trial.why_not(1e12, 2e9, 8, spread=False) == ""
    assert "hosts.spread" in trial.why_not(1e9, 1e6, 2, spread=True)
    assert "3 TFLOP" in trial.why_not(3e12, 1e6, 2, spread=False)
    assert "9 hosts are too many for this machine (8 at most)" in trial.why_not(1e9, 1e6, 9, spread=False)
    assert "2.1 GB, more than half of the 4 GB" in trial.why_not(1e9, 2.1e9, 2, spread=False)


def test_what_is_too_large_starts_no_process(monkeypatch, tmp_path):
    from orchestrator.config.job import load
    from tests import ROOT

    monkeypatch.setattr(trial, "Child", None)
    with pytest.raises(trial.NotTried, match="TFLOP"):
        trial.of(load(ROOT / "configs" / "tiny.yaml", [f"storage={tmp_path}"]), flops=1e15, peak_bytes=1)
