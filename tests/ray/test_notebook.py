"""`examples/first_steps.ipynb`: its cells run in a new folder, and show what the committed ones show."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.programs.processes import PATIENCE_S

WINGS = ("examples", "orchestrator/library.py", "trainers/library.py", "trainers/console")

"""It takes one minute on two idle cores."""
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def shown(notebook):
    """What each cell of code shows, by kind."""
    return [[kind_of(one) for one in cell["outputs"]] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kind_of(output):
    return (output["output_type"], *sorted(output.get("data", ())))


@pytest.mark.slow("trains on two hosts")
def test_the_notebook_runs_and_its_two_hosts_learn_what_one_process_does(tmp_path):
    # In a Python process of its own: Jupyter's packages are no part of the environment.
    env = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-m", "tests.notebooks", str(NOTEBOOK), "out.ipynb"]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    made, committed = json.loads((tmp_path / "out.ipynb").read_text()), json.loads(NOTEBOOK.read_text())
    assert shown(made) == shown(committed)
    here, there = ("".join(cell["outputs"][0]["text"]).split()[-3:] for cell in cells_that_train(made))
    assert here == there
    assert here[0] == "max_steps"
    assert float(here[2]) < 0.02


def cells_that_train(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and "stop_reason" in "".join(cell["source"])]
