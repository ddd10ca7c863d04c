"""`gangway history`: the course of the metrics that a run has tracked."""

from __future__ import annotations

import json

import pytest

from orchestrator.runs import history


@pytest.fixture
def run(tmp_path):
    """A run that was evaluated at some of its steps, and repeated one."""
    folder = tmp_path / "runs" / "mine"
    (folder / "tracking").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    rows: list[dict] = [{"params": {"seed": "0"}}]
    for step in range(10, 60, 10):
        rows.append({"step": step, "metrics": {"loss": 100.0 / step, "z_loss": 0.1, "accuracy": None if step == 30 else 0.5}})
        if step % 20 == 0:
            rows.append({"step": step, "metrics": {"eval_loss": 120.0 / step, "far_loss": 9.0}})
    rows.append({"step": 50, "metrics": {"loss": 7.0}})
    lines = [json.dumps({"t": 0.0, **row}) for row in rows]
    (folder / "tracking" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 60, "met']))
    return str(folder)


def test_the_losses_are_drawn_those_of_evaluations_with_marks_of_their_own(run, capsys):
    assert history.main([run]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].split() == ["●", "loss", "◆", "eval_loss", "▲", "far_loss"]
    assert out.count("◆") == 1 + 2
    assert out.count("●") == 1 + 5


def test_the_numbers_of_chosen_metrics_the_newest_of_each_step(run, capsys):
    assert history.main([run, "eval_loss", "loss", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["eval_loss", "loss"]
    assert found["eval_loss"] == [[20, 6.0], [40, 3.0]]
    assert found["loss"][-1] == [50, 7.0]
    assert history.main([run, "--list"]) == 0
    assert capsys.readouterr().out.split() == ["accuracy", "eval_loss", "far_loss", "loss", "z_loss"]


@pytest.mark.parametrize(
    ("more", "told"),
    [(["evl_loss"], "evl_loss: the run has no such metric; did you mean eval_loss?; --list shows all names"), (["x"], "no such")],
)
def test_a_metric_that_is_not_there_is_named(run, capsys, more, told):
    assert history.main([run, *more]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_metrics_or_no_run_at_all(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert history.main([str(tmp_path)]) == 2
    assert "has tracked no metrics yet" in capsys.readouterr().err
    assert history.main([str(tmp_path / "gone")]) == 2
    assert "there is no" in capsys.readouterr().err
