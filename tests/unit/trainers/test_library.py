"""`trainers.library`: a model, a loss and arrays, in this process."""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import tempfile
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gangway.config import importable
from gangway.config.importable import path_of
from gangway.errors import CheckpointError, UsageError
from gangway.stop_reason import StopReason
from tests.programs.processes import PATIENCE_S
from tests.unit.training import assert_equal
from tests.unit.training import trainer as small_trainer
from trainers import runtime
from trainers.callbacks import Callback
from trainers.checkpoint import export, going_on, weights
from trainers.config.arguments import from_dict
from trainers.config.keywords import PiecesArguments
from trainers.data.sources import pieces
from trainers.library import Result, Training
from trainers.loop import start_from
from trainers.recorders.progress import Progress

X = np.linspace(-2, 2, 24).astype(np.float32)
ADAM = {"name": "adam", "learning_rate": 0.1, "schedule": {"name": "constant"}}


class Line(nnx.Module):
    def __init__(self, slope=0.0):
        self.slope, self.offset = nnx.Param(jnp.full((), slope)), nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return self.slope * x + self.offset


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dropout = nnx.BatchNorm(1, momentum=0.9, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(1, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x[:, None])))[:, 0]


def squared_error(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def with_metrics(model, batch):
    errors = model(batch["x"]) - batch["y"]
    return errors**2, {"missed": jnp.abs(errors) > 1}


def points():
    return X, 3 * X - 1


def sgd(config, schedule):
    return optax.sgd(schedule)


def training(model=Line, loss=squared_error, data=points, **changes):
    return Training(model, loss, data, **{"steps": 80, "batch_size": 8, "optimizer": ADAM, "progress": False, **changes})


def learnt(result):
    return float(result.model.slope[...]), float(result.model.offset[...])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "data",
    [
        {"x": X, "y": 3 * X - 1},
        (X, 3 * X - 1),
        (list(X), list(3 * X - 1)),
        [{"x": x, "y": 3 * x - 1} for x in X],
        [(x, 3 * x - 1) for x in X],
        points,
    ],
    ids=["dict", "pair", "pair of lists", "list of dicts", "list of pairs", "function"],
)
def test_a_model_learns_from_arrays(data):
    result = training(data=data).fit()
    assert learnt(result) == pytest.approx((3, -1), abs=0.1)
    assert np.asarray(result.model(jnp.array([1.0, 2.0]))) == pytest.approx([2, 5], abs=0.2)
    assert int(result.state.step) == 80
    assert result.stop_reason is StopReason.MAX_STEPS


def test_the_history_has_every_published_step_and_the_metrics_are_the_last():
    result = training(loss=with_metrics, eval_data=points, steps=7, publish_every_steps=1, evaluation={"every_steps": 3}).fit()
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in result.history if "eval_missed" in row] == [3, 6, 7]  # with the training of that step
    assert all({"loss", "missed", "learning_rate"} <= row.keys() for row in result.history)
    assert result.curve("loss") == [(row["step"], row["loss"]) for row in result.history]
    assert result.metrics["loss"] == result.history[-1]["loss"]
    assert result.metrics["step"] == 7
    text = repr(result)
    assert text.startswith("Result(steps=7, loss=")
    assert "eval_loss=" in text
    assert len(text) < 100


def test_a_short_training_has_a_history_too():
    assert [row["step"] for row in training(steps=3).fit().history] == [1, 2, 3]


def test_rows_that_fill_up_a_batch_do_not_count():
    y = 3 * X[:12] - 1
    result = training(data=(X[:12], y), batch_size=12, steps=1, eval_data=(X[:5], y[:5])).fit()  # on 8 devices
    assert result.history[0]["loss"] == pytest.approx(np.mean(y**2), rel=1e-6)
    assert result.metrics["eval_loss"] == pytest.approx(np.mean((np.asarray(result.model(X[:5])) - y[:5]) ** 2), rel=1e-5)


def test_a_loss_of_one_number_for_the_batch_is_refused():
    with pytest.raises(UsageError, match=r"loss .*<lambda> returned one number for the batch: expected one for each example"):
        training(loss=lambda model, batch: jnp.mean(squared_error(model, batch))).fit()
    with pytest.raises(UsageError, match="returned one number"):
        training(loss=lambda model, batch: (jnp.mean(squared_error(model, batch)), {})).fit()


def test_a_loss_may_ask_whether_it_is_training():
    seen = []

    def loss(model, batch, training):
        seen.append(training)
        return squared_error(model, batch)

    training(loss=loss, eval_data=points, steps=1).fit()
    assert set(seen) == {True, False}


@pytest.mark.parametrize("model", [lambda: Line(2.0), functools.partial(Line, 2.0), None], ids=["function", "partial", "module"])
def test_a_model_may_be_a_function_or_a_module_with_its_values(model):
    model = model or Line(2.0)
    result = training(model, steps=1, optimizer={"learning_rate": 1e-9}).fit()
    assert learnt(result) == pytest.approx((2, 0), abs=1e-6)
    if isinstance(model, Line):
        training(model).fit()
        assert float(model.slope[...]) == 2  # the user's own stays as it was


def test_a_model_with_dropout_and_batch_statistics_is_returned_in_evaluation_mode():
    result = training(Noisy, steps=5).fit()
    assert np.all(np.asarray(result.model(X)) == np.asarray(result.model(X)))
    assert set(result.state.model_state["norm"]) == {"mean", "var"}


def test_a_model_that_needs_more_is_refused():
    with pytest.raises(UsageError, match=r"model Linear needs in_features, out_features: give a function that returns a model"):
        training(nnx.Linear).fit()
    with pytest.raises(UsageError, match="returned int: expected a Flax NNX module"):
        training(lambda: 3).fit()


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), sgd, {"name": "sgd", "betas": (0.0, 0.9), "weight_decay": 0.0}],
    ids=["transformation", "function", "section"],
)
def test_an_optimizer_may_be_a_transformation_a_function_or_a_section(optimizer):
    settings = {} if isinstance(optimizer, optax.GradientTransformation) else {"optimizer.learning_rate": 0.1}
    settings |= {} if isinstance(optimizer, optax.GradientTransformation) else {"optimizer.schedule": {"name": "constant"}}
    settings |= {} if isinstance(optimizer, optax.GradientTransformation) else {"optimizer.max_grad_norm": None}
    y = 3 * X - 1
    result = training(data=(X, y), batch_size=24, steps=1, optimizer=optimizer, **settings).fit()
    # One step from 0: minus the rate, times the gradient, which nothing has clipped.
    assert learnt(result) == pytest.approx((0.2 * np.mean(X * y), 0.2 * np.mean(y)), rel=1e-4)
    assert ("learning_rate" in result.history[0]) == bool(settings)  # a transformation's own rate is not known


def test_no_file_is_left_and_the_process_is_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before, handlers = runtime.current(), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    first, second = training().fit(), training().fit()
    assert_equal(first.state.params, second.state.params)
    assert list(tmp_path.iterdir()) == []
    assert runtime.current() is before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.slow("trains twice; that without an error is in `make test`")
def test_after_an_error_the_process_is_as_before_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, num_threads = runtime.current(), threading.active_count()

    class Arm(Callback):
        def on_publish(self, state, **kwargs):
            raise RuntimeError("a user's mistake")

    with pytest.raises(RuntimeError, match="a user's mistake"):
        training(callbacks=(Arm(),)).fit()
    assert runtime.current() is before
    assert list(tmp_path.iterdir()) == []
    assert learnt(training().fit()) == pytest.approx((3, -1), abs=0.1)
    assert threading.active_count() <= num_threads + 2


def test_it_trains_in_a_thread_and_one_at_a_time():
    made, began, go_on = [], threading.Event(), threading.Event()

    class Wait(Callback):
        def on_publish(self, state, **kwargs):
            began.set()
            assert go_on.wait(PATIENCE_S)

    thread = threading.Thread(target=lambda: made.append(training(callbacks=(Wait(),)).fit()))
    thread.start()
    assert began.wait(PATIENCE_S)
    with pytest.raises(UsageError, match="another fit"):
        training().fit()
    go_on.set()
    thread.join()
    assert learnt(made[0]) == pytest.approx((3, -1), abs=0.1)


def test_an_interrupt_ends_it_with_what_was_learnt_and_a_later_one_goes_on(tmp_path):
    class Interrupt(Callback):
        def on_publish(self, state, *, step, **kwargs):
            if step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    settings = {"steps": 40, "publish_every_steps": 1}
    whole = training(**settings).fit()
    # A shell's background job ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        first = training(**settings, run_dir=tmp_path / "run", callbacks=(Interrupt(),)).fit()
    finally:
        signal.signal(signal.SIGINT, before)
    assert first.stop_reason is StopReason.INTERRUPTED
    assert 5 <= first.metrics["step"] < 40
    second = training(**settings, run_dir=tmp_path / "run").fit()
    assert second.stop_reason is StopReason.MAX_STEPS
    assert_equal(second.state.params, whole.state.params)
    assert [row["step"] for row in second.history] == list(range(1, 41))
    assert [row["loss"] for row in second.history] == [row["loss"] for row in whole.history]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kept", ["none", "best"])
def test_the_best_model_is_that_of_the_best_score_wherever_it_is_named(tmp_path, kept):
    folder = str(tmp_path / "run")
    run = training(
        run_dir=folder,
        eval_data=(X, X - 0.5),  # the model passes it on the way to the training data
        steps=60,
        evaluation={"every_steps": 10, "score": {}},
        checkpoint={"save_steps": 10, "save_total_limit": 1, "keep_best": 1, "keep_model_only": kept},
    )
    result = run.fit()
    curve = dict(result.curve("eval_loss"))
    step = min(curve, key=curve.get)
    assert 0 < step < 60
    for made in (result, run.result(folder, "max_steps")):
        assert float(jnp.mean((made.best_model(X) - (X - 0.5)) ** 2)) == pytest.approx(curve[step], rel=1e-5)
    found = weights.find(f"{folder}/best")
    assert (found.parent.name, found.name.partition("-")[0]) == ("models" if kept == "best" else "checkpoints", str(step))
    export.to_safetensors(f"{folder}/best", tmp_path / "best.safetensors")
    assert weights.open_model(weights.find(str(tmp_path / "best.safetensors"))).here("slope") == result.best_model.slope[...]
    if kept == "none":
        assert start_from.found(f"{folder}/best")[1]["step"] == step


def test_a_training_without_a_best_model_says_how_to_get_one(tmp_path):
    with pytest.raises(UsageError, match=r"without run_dir keeps no checkpoint: give run_dir, eval_data, evaluation="):
        _ = training(steps=1).fit().best_model
    with pytest.raises(CheckpointError, match=r"run/best: no whole checkpoint of this run has a score\. .*set evaluation\.score"):
        _ = training(steps=1, run_dir=tmp_path / "run").fit().best_model


def test_a_folder_with_a_run_of_another_model_is_refused(tmp_path):
    training(steps=2, run_dir=tmp_path / "run").fit()
    with pytest.raises(CheckpointError):
        training(Noisy, steps=2, run_dir=tmp_path / "run").fit()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"stesp": 3}, "stesp: there is no such setting; did you mean steps"),
        ({"sead": 3}, "sead: there is no such setting; did you mean seed"),
        ({"learning_rate": 0.1}, r"learning_rate: .*it is a key of optimizer: optimizer={'learning_rate': ...}"),
        ({"name": "a"}, "name: give run_dir=FOLDER instead"),
        ({"hosts": 2}, r"hosts: give launch\(training, hosts=...\) instead"),
        ({"steps": None}, "nothing ends this training: give steps or epochs"),
        ({"batch_size": 0}, "^batch_size = 0: expected at least 1"),
        ({"optimizer": 3}, "optimizer = 3: expected a name"),
        ({"checkpoint": {"save_step": 3}}, "save_step"),
        ({"sead": 3, "task": "a:b"}, r"(?s)sead.*\ntask: give model and loss"),
    ],
)
def test_a_wrong_setting_is_reported_where_it_is_given(settings, told):
    with pytest.raises(UsageError, match=told):
        training(**settings)


def test_what_is_wrong_with_the_pieces_comes_at_once_in_the_words_of_the_call():
    wrong = {"data": {"x": X, "y": X[:3]}, "eval_data": 3, "callbacks": (3,), "optimizer": "adamm"}
    with pytest.raises(UsageError) as raised:
        training(nnx.Linear, **wrong).fit()
    told = str(raised.value).splitlines()
    assert [line.split()[0] for line in told] == ["model", "optimizer", "data:", "eval_data", "callbacks:"]
    assert "lengths (x 24, y 3)" in told[2]
    assert told[1].startswith("optimizer = 'adamm': expected one of ")
    assert told[3].endswith("such as list(...) of an iterable")
    with pytest.raises(UsageError, match=r"^data: epochs = 2: .*; set steps$"):
        training(data=lambda: iter([{"x": 0.0, "y": 1.0}]), steps=None, epochs=2).fit()


@pytest.mark.parametrize(
    ("changes", "error", "frames"),
    [
        ({"loss": lambda model, batch: 0.0 * jnp.sum(batch["x"])}, UsageError, []),
        ({"loss": lambda model, batch: model(batch["z"])}, KeyError, ["<lambda>"]),
        ({"data": lambda: np.zeros(3).reshape(2)}, ValueError, ["<lambda>"]),
        # A mistake that no code of the user's has met may be one of the program: nothing is left out.
        ({"optimizer": lambda config: None}, TypeError, ["_fit", "_trainer"]),
    ],
)
def test_an_error_shows_the_frames_of_the_user_and_no_others(changes, error, frames):
    with pytest.raises(error) as raised:
        training(**changes).fit()
    shown = [frame.name for frame in traceback.extract_tb(raised.tb)]
    assert raised.value.__suppress_context__ is (error is UsageError), "what a user's error was raised from is shown"
    assert [name for name in shown[1:] if name != "fit"] == frames
    if error is KeyError:
        assert "it has no column 'z'; give the examples one, or" in raised.value.__notes__[0]
        before = jax.config.jax_traceback_filtering
        jax.config.update("jax_traceback_filtering", "off")
        try:
            with pytest.raises(error) as raised:
                training(**changes).fit()
        finally:
            jax.config.update("jax_traceback_filtering", before)
        assert "_fit" in [frame.name for frame in traceback.extract_tb(raised.tb)]


def test_keys_of_a_section_that_has_the_name_of_a_piece():
    plain, ordered = (training(steps=1, seed=3, **{"data.shuffle": shuffle}).fit() for shuffle in (True, False))
    y = 3 * X[:8] - 1
    assert ordered.history[0]["loss"] == pytest.approx(np.mean(y**2), rel=1e-6)
    assert plain.history[0]["loss"] != ordered.history[0]["loss"]


def test_epochs_end_it():
    result = training(steps=None, epochs=2, publish_every_steps=1).fit()
    assert result.metrics["step"] == 6
    assert result.stop_reason is StopReason.MAX_EPOCHS


# ---------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_that_changes_and_notes_stay():
    screen, seconds = Terminal(), iter([10.0, 12.0, 12.0])
    progress = Progress(screen, 30, lambda: next(seconds))
    progress.record(10, {"loss": 1.0})
    progress.record(20, {"loss": 0.5})
    progress.tell("saved")
    progress.record(20, {"eval_loss": 0.25})
    progress.close()
    first, second = "step 10/30  loss 1", "step 20/30  loss 0.5  2 s left"
    last = "step 20/30  loss 0.5  eval_loss 0.25  2 s left"
    cleared = "\r" + " " * len(second) + "\r"
    assert screen.getvalue() == f"\r{first}\r{second}{cleared}saved\n\r{second}\r{last}\n"


def test_without_a_terminal_progress_is_lines(capsys):
    training(steps=2, progress=True).fit()
    shown = capsys.readouterr().out
    assert "step 1/2  loss " in shown
    assert "\r" not in shown
    assert "saved" not in shown  # to a folder that is deleted


def test_a_notebook_is_no_terminal_and_gets_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    cell = io.StringIO()
    Progress(cell, None).record(10, {"loss": 1.0})
    assert cell.getvalue() == "\rstep 10  loss 1"


def test_the_course_of_the_learning_rate_is_told(capsys):
    told = "0.1, cosine (for a constant one: optimizer={..., 'schedule': {'name': 'constant'}})"
    assert training(steps=1, progress=True, optimizer={"name": "adam", "learning_rate": 0.1}).fit().schedule == told
    assert f"learning rate: {told}" in capsys.readouterr().out
    assert training(steps=1, optimizer=ADAM).fit().schedule == "0.1, constant"
    assert training(steps=1, optimizer=optax.sgd(0.1)).fit().schedule == "that of the transformation"


def test_progress_can_be_turned_off(capsys):
    training(steps=2, eval_data=points).fit()
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------------- what other processes import


def test_the_pieces_are_named_in_a_configuration(tmp_path):
    made = training(data=points, eval_data=(X, X), optimizer=sgd, seed=5).configuration(str(tmp_path / "run"))
    assert made["pieces"]["model"] == f"{__name__}:Line"
    assert made["pieces"]["loss"] == f"{__name__}:squared_error"
    assert made["pieces"]["data"] == f"{__name__}:points"
    assert made["optimizer"]["name"] == f"{__name__}:sgd"
    assert (made["seed"], made["storage"], made["name"]) == (5, str(tmp_path), "run")
    assert not (tmp_path / "run").exists()  # a configuration that is refused later leaves nothing


def test_every_piece_that_cannot_be_imported_is_reported_at_once(tmp_path):
    class Local(Line): ...

    wrong = Training(
        Local,
        lambda model, batch: model,
        [{"x": X[:2]}, {"x": X[:3]}],
        eval_data=lambda: X,
        steps=1,
        optimizer=optax.sgd(0.1),
        callbacks=(Callback(),),
    )
    with pytest.raises(UsageError) as raised:
        wrong.configuration(str(tmp_path / "run"))
    told = dict(line.strip().split(": ", 1) for line in str(raised.value).splitlines()[1:])
    assert told.keys() == {"model", "loss", "data", "eval_data", "optimizer", "callbacks"}
    assert "Local is defined inside a function: write it at the top level of a file" in told["model"]
    assert "it is a lambda, which has no name" in told["loss"]
    assert "of different shapes" in told["data"]


def test_what_has_no_name_to_import_it_by(monkeypatch):
    with pytest.raises(ValueError, match="Line is an object in this process's memory"):
        path_of(Line(1.0))
    with pytest.raises(ValueError, match="defined inside a class"):
        path_of(Terminal.isatty)
    monkeypatch.setattr(sys.modules[__name__], "points", None)
    with pytest.raises(ValueError, match="has another object named points"):
        path_of(POINTS)


POINTS = points


def test_what_a_notebook_defines_cannot_be_imported_and_a_script_can(monkeypatch, tmp_path):
    main = sys.modules["__main__"]
    Shown = type("Shown", (), {"__module__": "__main__"})
    monkeypatch.setattr(main, "Shown", Shown, raising=False)
    monkeypatch.setattr(main, "__spec__", None, raising=False)
    monkeypatch.delattr(main, "__file__", raising=False)
    with pytest.raises(ValueError, match="Shown is defined in a notebook or at a prompt: write it at the top level of a file"):
        path_of(Shown)
    script = tmp_path / "my_script.py"
    script.write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    with pytest.raises(ValueError, match="cannot be imported as 'my_script'"):
        path_of(Shown)
    monkeypatch.syspath_prepend(tmp_path)
    assert path_of(Shown) == "my_script:Shown"


def test_data_in_memory_is_written_once_and_read_back(tmp_path):
    made = training(data=[(x, 3 * x - 1) for x in X], eval_data=X)
    folder = str(tmp_path / "run")
    names = made.configuration(folder)["pieces"]
    made.write_data(folder)
    made.write_data(folder)
    train, held_out = pieces.named(names["data"]), pieces.named(names["eval_data"])
    np.testing.assert_array_equal(train["y"], (3 * X - 1).astype(np.float32))
    np.testing.assert_array_equal(held_out["x"], X)
    assert len(list((tmp_path / "run" / "data").iterdir())) == 2
    assert training(data=(X, X)).configuration(folder)["pieces"]["data"] != names["data"]  # other data, another name


def test_a_file_that_is_imported_by_launch_must_not_train(monkeypatch):
    monkeypatch.setenv(importable.LAUNCHING, "1")
    with pytest.raises(UsageError, match='if __name__ == "__main__"'):
        training().fit()


def test_the_result_reads_the_state_of_a_run_elsewhere_when_it_is_used(tmp_path):
    run = training(run_dir=tmp_path / "run", steps=20)
    here = run.fit()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"t": 1.0, "step": 30, "metrics": {"loss": null}}\n')
    later = run.result(str(tmp_path / "run"), "max_steps")
    assert np.isnan(later.metrics["loss"])
    assert [row["step"] for row in later.history] == [*(row["step"] for row in here.history), 30]
    assert_equal(later.state.params, here.state.params)
    assert learnt(later) == learnt(here)
    assert isinstance(jax.tree.leaves(later.state.params)[0], jax.Array)


def test_what_is_printed_is_short(tmp_path):
    state = training(steps=1).fit().state
    assert repr(state) == "TrainState(step=1, batch_index=1, 2 parameters)"
    step = jax.jit(lambda state: state.step + len(repr(state)), donate_argnums=0)  # a tracer has no number
    assert int(step(state)) > 1
    assert repr(state).startswith("TrainState(step=deleted")
    trainer = small_trainer(tmp_path, max_num_steps=2)
    trainer.train()
    text = repr(trainer.output)
    assert text.startswith("TrainerOutput(state=TrainState(step=2, ")
    assert f"stop_reason=max_steps, checkpoint_path='{trainer.output.checkpoint_path}'" in text
    assert "'train_loss': " in text
    assert "lineage" not in text
    assert len(text) < 800
    assert len(repr(trainer.output._replace(state=np.zeros(1000)))) < 800  # of a trainer that inherits nothing


def test_a_launch_that_goes_on_from_a_fit_is_the_same_experiment(tmp_path):
    folder = str(tmp_path / "run")
    training(steps=2, run_dir=folder, seed=1, loss=with_metrics).fit()
    made = training(steps=2, run_dir=folder, seed=2).configuration(folder)
    del made["arguments"]
    told = going_on.of_run(going_on.newest(folder), from_dict(PiecesArguments, made))
    assert told[0] == "goes on from step 2"
    assert "seed 1 -> 2" in told[-1]
    assert "pieces" not in "".join(told)


def test_a_curve_has_the_steps_at_which_the_metric_was_published():
    rows = [{"step": step, "metrics": {"loss": 1.0 / step}} for step in (1, 2, 3)]
    result = Result([*rows, {"step": 2, "metrics": {"eval_loss": 4.0}}], StopReason.MAX_STEPS, lambda: None, lambda: None, "")
    assert result.curve("eval_loss") == [(2, 4.0)]
    assert [step for step, _ in result.curve("loss")] == [1, 2, 3]
    with pytest.raises(
        UsageError, match=r"^evl_loss: there is no such metric; did you mean eval_loss\?; there are eval_loss, loss$"
    ):
        result.curve("evl_loss")
