"""The examples that are programs of their own: each as it stands, and what it prints."""

from __future__ import annotations

import re
import runpy

from tests import ROOT


def test_a_regression_on_arrays(capsys):
    made = runpy.run_module("examples.regression", run_name="__main__")
    printed = capsys.readouterr().out
    assert "python -m examples.regression" in made["__doc__"]
    assert made["result"].metrics["loss"] < 0.01
    found = re.search(r"stop_reason=max_steps\) sin\(2 \* 0.5\) is about \[([\d.]+)\]", printed)
    assert abs(float(found[1]) - 0.8415) < 0.1
    assert len((ROOT / "examples" / "regression.py").read_text().splitlines()) < 30
