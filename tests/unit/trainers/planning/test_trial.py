"""The trial of a step: the compiled step itself runs, on zeros."""

from __future__ import annotations

from tests.unit.training import arguments
from trainers.planning import trial


def test_a_trial_runs_the_step_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "WINDOW_S", 0.01)
    monkeypatch.chdir(tmp_path)
    seconds = trial.tried(arguments(tmp_path))
    assert len(seconds) == trial.WINDOWS
    assert 0 < min(seconds) < 5
    assert list(tmp_path.iterdir()) == []
