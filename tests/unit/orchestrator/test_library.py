"""`orchestrator.library` without a process: what a launch sends, what it refuses, and how it ends. tests/ray/test_library.py
launches."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gangway
from gangway.config import importable
from gangway.errors import UsageError
from orchestrator import library
from orchestrator.commands import launched
from orchestrator.config.job import build
from trainers.callbacks import Callback
from trainers.library import PiecesTrainer, Training

X = np.linspace(-2, 2, 24).astype(np.float32)
HERE = __name__


class Line(nnx.Module):
    def __init__(self, slope=0.0):
        self.slope = nnx.Param(jnp.full((), slope))

    def __call__(self, x):
        return self.slope * x


class Seen(Callback):
    steps: list[int] = []  # noqa: RUF012

    def on_publish(self, state, *, step, **kwargs):
        self.steps.append(step)


def squared_error(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def points():
    return X, 2 * X


def training(tmp_path, **changes):
    pieces = {"model": Line, "loss": squared_error, "data": points, **{key: changes.pop(key) for key in PIECES & changes.keys()}}
    return Training(**pieces, **{"steps": 4, "batch_size": 8, "run_dir": tmp_path / "run", "progress": False, **changes})


PIECES = {"model", "loss", "data"}


def test_the_package_gives_its_public_names_when_they_are_asked_for():
    assert gangway.launch is library.launch
    assert {name for name in gangway.PUBLIC if not hasattr(gangway, name)} == set()
    assert {*gangway.PUBLIC} <= {*dir(gangway)}
    with pytest.raises(AttributeError, match="module 'gangway' has no attribute 'lunch'"):
        _ = gangway.lunch


def test_importing_the_package_imports_none_of_what_it_gives():
    loaded = "import sys, gangway; print(*sorted({name.partition('.')[0] for name in sys.modules} & {'jax', 'ray', 'trainers'}))"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout == "\n"


def test_the_configuration_of_a_launch(tmp_path):
    config, data = library.configuration(
        training(tmp_path, callbacks=[Seen], recorders=["tensorboard"]),
        2,
        {"tracking.mlflow": False, "driver": {"dashboard": True}},
    )
    assert (config.hosts.count, config.tracking.mlflow, config.driver.dashboard) == (2, False, True)
    assert config.run_dir == str(tmp_path / "run")
    pieces = config.training.pieces
    assert (pieces.model, pieces.loss, pieces.data) == (f"{HERE}:Line", f"{HERE}:squared_error", f"{HERE}:points")
    assert config.training.recorders == ("jsonl", "tensorboard")  # of which the history is read
    # On every host: what the launch starts must not launch.
    assert build(json.loads(json.dumps(data))).hosts.env == {importable.LAUNCHING: "1"}
    elastic, data = library.configuration(training(tmp_path), {"min": 1, "max": 3, "env": {"A": "b"}}, {})
    assert (elastic.hosts.min, elastic.hosts.max) == (1, 3)
    assert data["hosts"]["env"] == {"A": "b", importable.LAUNCHING: "1"}


def test_a_class_of_callbacks_is_used_here_and_there(tmp_path):
    config, _ = library.configuration(training(tmp_path, callbacks=[Seen]), 1, {})
    assert config.training.trainer == "trainers.library:PiecesTrainer"
    Seen.steps.clear()
    training(tmp_path, callbacks=[Seen], run_dir=None).fit()
    assert Seen.steps == [1, 2, 3, 4]
    made = PiecesTrainer(config.training)
    Seen.steps.clear()
    made.callbacks.call(Callback.on_publish, made.info, step=1, metrics={}, seconds={})
    assert len(Seen.steps) == 1
    with pytest.raises(UsageError, match=r"callbacks: Line is Line: expected a trainers\.callbacks:Callback"):
        training(tmp_path, callbacks=[Line], run_dir=None).fit()
    own = training(tmp_path, callbacks=[Seen], trainer="tests.unit.training:OneDevice")
    with pytest.raises(UsageError, match=r"callbacks: trainer = 'tests\.unit\.training:OneDevice' is your own: add them there"):
        library.configuration(own, 1, {})
    assert library.configuration(training(tmp_path), 1, {})[0].training.trainer == "trainers.base:BaseTrainer"


def test_pieces_may_be_given_by_name(tmp_path):
    named = training(tmp_path, model=f"{HERE}:Line", loss=f"{HERE}:squared_error", data=f"{HERE}:DATA", steps=60, optimizer=ADAM)
    config, _ = library.configuration(named, 1, {})
    assert config.training.pieces.data == f"{HERE}:DATA"  # an object that has no name of its own
    named.run_dir = None
    assert float(named.fit().model.slope[...]) == pytest.approx(2, abs=0.1)
    with pytest.raises(UsageError, match=r"model: 'a:b': no module named 'a'.*\nloss: 'loss' is no name of an object"):
        training(tmp_path, model="a:b", loss="loss")


DATA = {"x": X, "y": 2 * X}
ADAM = {"name": "adam", "learning_rate": 0.1}


def test_everything_that_a_launch_cannot_take_is_reported_at_once(tmp_path):
    wrong = training(tmp_path, loss=lambda model, batch: 0, optimizer=optax.sgd(0.1), run_dir=None)
    with pytest.raises(UsageError) as raised:
        library.launch(wrong, hosts=2, seed=3, drivr={})
    told = str(raised.value)
    assert "seed: launch takes hosts, driver, tracking, notify and their keys, and Training(...) takes all others" in told
    assert "drivr: launch takes" in told
    assert "did you mean driver?" in told
    assert "run_dir: a launch keeps its checkpoints there" in told
    assert "loss: it is a lambda" in told
    assert "optimizer: an optax transformation" in told
    with pytest.raises(UsageError, match=r"(?s)hosts.cuont: unknown key .*did you mean hosts.count.*driver.agent_lease: unknown"):
        library.launch(training(tmp_path), hosts={"cuont": 2}, driver={"agent_lease": 3})
    with pytest.raises(
        UsageError, match=r"^other processes .*\n  data: the data is a dict of columns of different lengths .*ones$"
    ):
        library.launch(training(tmp_path, data=(X, X[:3])))
    assert list(tmp_path.iterdir()) == []


def test_what_a_launch_imports_does_not_launch(tmp_path, monkeypatch):
    monkeypatch.setenv(importable.LAUNCHING, "1")
    with pytest.raises(UsageError, match=r'launch\(\) was called while launch.* below if __name__ == "__main__":'):
        library.launch(training(tmp_path), hosts=2)


@pytest.mark.parametrize(("private", "mode"), [(True, 0o700), (False, 0o755)])
def test_data_in_memory_is_for_this_user_alone_unless_the_run_is_not(tmp_path, private, mode):
    before = os.umask(0o022)
    try:
        training(tmp_path, data=(X, X)).write_data(str(tmp_path / "run"), private=private)
    finally:
        os.umask(before)
    (folder,) = (tmp_path / "run" / "data").iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run", tmp_path / "run" / "data", folder)] == [mode] * 3


def test_the_process_of_the_run_finds_the_modules_of_this_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "gone"), *sys.path])
    made = library.environment()
    paths = made["PYTHONPATH"].split(os.pathsep)
    assert str(tmp_path) in paths
    assert str(tmp_path / "gone") not in paths
    assert made[importable.LAUNCHING] == "1"
    assert importable.LAUNCHING not in os.environ


class Ended:
    """A process, as far as signals are sent to it."""

    def __init__(self):
        self.signals = []

    def send_signal(self, number):
        self.signals.append(number)


def test_ctrl_c_is_passed_on_and_a_second_one_ends_the_call():
    child, before = Ended(), signal.getsignal(signal.SIGINT)
    with library.passed_on(child):
        os.kill(os.getpid(), signal.SIGINT)
        assert child.signals == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert child.signals == [signal.SIGINT] * 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_has_no_signals():
    entered = []

    def work():
        with library.passed_on(Ended()):
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


def test_a_process_that_ends_without_a_word_is_reported_with_its_last_lines():
    told = library._without_a_word(-9, ["one", "two"])
    assert told == {"status": "failed", "error": "the process of the run ended without an outcome (exit status -9):\none\ntwo"}
    for status in (-signal.SIGINT, 130):
        with pytest.raises(KeyboardInterrupt):
            library._without_a_word(status, [])


@pytest.mark.parametrize(
    ("end", "error"),
    [({"status": "refused", "error": "no"}, UsageError), ({"status": "failed", "error": "no"}, library.LaunchError)],
)
def test_how_a_run_ends_is_what_the_call_does(tmp_path, monkeypatch, end, error):
    monkeypatch.setattr(library, "run_elsewhere", lambda data, show: end | {"stop_reason": None})
    with pytest.raises(error, match=r"^no$"):
        library.launch(training(tmp_path))


def test_a_run_that_stopped_before_its_first_checkpoint_has_a_result_without_a_state(tmp_path, monkeypatch):
    end = {"status": "stopped", "error": None, "stop_reason": None}
    monkeypatch.setattr(library, "run_elsewhere", lambda data, show: end)
    result = library.launch(training(tmp_path, run_dir=tmp_path / "new"))
    assert repr(result) == "Result(steps=0, stop_reason=interrupted)"
    with pytest.raises(
        UsageError, match=r"there is no state: the run in .*new ended \(interrupted\) before its first checkpoint"
    ):
        _ = result.state


def test_the_process_says_what_was_refused(tmp_path):
    end = launched.end_of({"name": "run", "storage": str(tmp_path), "max_num_stesp": 3})
    assert (end["status"], end["stop_reason"]) == ("refused", None)
    assert "did you mean max_num_steps" in end["error"]


def test_output_is_kept_and_shown(capsys):
    child = subprocess.Popen(["seq", "30"], stdout=subprocess.PIPE, text=True)
    output = library.Output(child, show=True)
    child.wait()
    output.close()
    assert list(output.lines) == [str(number) for number in range(11, 31)]
    assert capsys.readouterr().out.split() == [str(number) for number in range(1, 31)]
