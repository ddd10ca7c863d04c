"""Training as a library: a model, a loss and data, without YAML. `docs/library.md` shows it.

    result = Training(model, loss, data, steps=1000, batch_size=32, optimizer="adam").fit()

`fit` trains in this process. `orchestrator.library.launch` trains the same object on many hosts, and recovers from failures.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import jax
import optax
from flax import nnx

from gangway.config.importable import path_of, why_not_here
from gangway.config.masking import masked
from gangway.config.section import PATH, did_you_mean
from gangway.errors import NotConfiguredError, UsageError, is_of_user, notes_of
from gangway.stop_reason import StopReason
from gangway.storage.documents import is_url
from gangway.storage.row import BEST
from gangway.wire.events import Event
from trainers import runtime
from trainers.callbacks import Callback
from trainers.checkpoint import going_on
from trainers.config.arguments import TrainingArguments, from_dict, load_object
from trainers.config.keywords import NO_END, PiecesArguments, as_given, plain, put, unknown
from trainers.console.view import lines
from trainers.data.sources import pieces
from trainers.optim.optimizers import build_optimizer
from trainers.optim.schedules import build_schedule
from trainers.recorders.dispatch import Recorders
from trainers.recorders.jsonl import FILE, read
from trainers.recorders.progress import Progress
from trainers.recorders.recorder import About
from trainers.step.state import TrainState, abstract_model
from trainers.tasks.pieces import PiecesTask
from trainers.trainer.base_trainer import BaseTrainer
from trainers.trainer.beginnings import saved_state
from trainers.trainer.model_design import module

ARGUMENTS, TASK = "trainers.config.keywords:PiecesArguments", "trainers.tasks.pieces:PiecesTask"
DATASETS, JSONL = "trainers.data.sources.pieces:datasets", "jsonl"
BASE_TRAINER, TRAINER = "trainers.base:BaseTrainer", "trainers.library:PiecesTrainer"
Row = dict[str, float]

_fitting = threading.Lock()


class Result:
    """What a training has made."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        stop_reason: StopReason,
        trained: Callable[[], tuple[TrainState, nnx.Module]],
        best: Callable[[], nnx.Module],
        schedule: str,
    ):
        """`rows` are (step, metrics) of each publish. `trained` returns the state and the model, and `best` the best model, when
        they are used."""
        self.history = history(rows)
        """A row for each step at which metrics were published, with the step: `pandas.DataFrame(result.history)`."""
        self.stop_reason = stop_reason
        self.schedule = schedule
        """The course of the learning rate, in words, such as `0.03, cosine`."""
        self._trained, self._best = trained, best

    @property
    def metrics(self) -> Row:
        """The newest value of each metric."""
        return {name: value for row in self.history for name, value in row.items()}

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Returns (step, value) of a metric, such as `eval_loss`, for a plot: of the steps at which it was published. Raises
        UsageError if it never was."""
        found = [(int(row["step"]), row[name]) for row in self.history if name in row]
        if not found:
            known = sorted({each for row in self.history for each in row} - {"step"})
            raise UsageError(f"{name}: there is no such metric{did_you_mean(name, known)}; there are {', '.join(known)}")
        return found

    @property
    def state(self) -> TrainState:
        """The whole state after the last step: parameters, optimizer and counters."""
        return self._both[0]

    @property
    def model(self) -> nnx.Module:
        """The trained module in evaluation mode, ready to be called."""
        return self._both[1]

    @cached_property
    def best_model(self) -> nnx.Module:
        """The module of the checkpoint with the best score (`evaluation.score`), in evaluation mode. Raises UsageError if there
        is none."""
        return self._best()

    @cached_property
    def _both(self) -> tuple[TrainState, nnx.Module]:
        return self._trained()

    def __repr__(self) -> str:
        metrics = self.metrics
        steps = metrics.get("step", 0)
        shown = [f"{name}={metrics[name]:.4g}" for name in ("loss", "eval_loss") if name in metrics]
        return f"Result({', '.join([f'steps={steps}', *shown, f'stop_reason={self.stop_reason}'])})"


def history(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Returns one row for each step: of what was published twice for a step, the later."""
    by_step: dict[int, Row] = {}
    for row in rows:
        # What is not finite is null in the files.
        numbers = {name: math.nan if value is None else value for name, value in row["metrics"].items()}
        by_step.setdefault(row["step"], {"step": row["step"]}).update(numbers)
    return [by_step[step] for step in sorted(by_step)]


class PiecesTrainer(BaseTrainer):
    """The trainer of a launch, with the callbacks that `pieces` names."""

    names_are_final = False  # the pieces may be objects, which are set later

    def post_init(self) -> None:
        assert isinstance(self.arguments, PiecesArguments)
        for name in self.arguments.pieces.callbacks:
            self.add_callback(callback_of(name))


class Training:
    """What to train, and how."""

    def __init__(
        self,
        model: Any,
        loss: Callable[..., Any],
        data: Any,
        *,
        eval_data: Any = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int = 16,
        optimizer: Any = "adamw",
        run_dir: str | os.PathLike[str] | None = None,
        progress: bool = True,
        callbacks: Iterable[Any] = (),
        **settings: Any,
    ):
        """Raises UsageError with what is wrong with the settings.

        Each piece may also be the name of one, such as `"pieces:Net"`.

        `model`: a class of Flax NNX modules, a function that returns a module (both may take `rngs`), or a module.
        `loss`: a function (model, batch) of the loss of each example [batch], or a pair of that and a dict of metrics [batch].
        `data`, `eval_data`: a dict of arrays, a pair (x, y) of arrays, a list of examples, a dataset, or a function that
        returns one of these. `steps` or `epochs` of batches of `batch_size` examples.
        `optimizer`: a name, a dict with the keys of the section `optimizer`, an optax transformation, or a function (config,
        schedule) that returns one.
        `callbacks`: callbacks, classes of them, or functions () that return one.
        `run_dir`: the folder of the run, with its checkpoints: a later training goes on from there. None: no file is left.
        `settings`: any other key of a configuration, such as `seed=1`, `checkpoint={"save_steps": 100}`, or, for a key whose
        section has the name of a piece, `**{"data.shuffle": False}`.
        """
        problems: list[str] = []
        functions = {"model": model, "loss": loss, "data": data, "eval_data": eval_data}
        self.model, self.loss, self.data, self.eval_data = (taken(*item, problems) for item in functions.items())
        self._names = {name: value for name, value in functions.items() if isinstance(value, str)}
        """Of the pieces that were given by name."""
        self.optimizer, self.callbacks, self.progress = optimizer, tuple(callbacks), progress
        if run_dir is not None and is_url(run_dir):
            problems.append(f"run_dir = {str(run_dir)!r}: expected a folder; for a run in a bucket: a configuration with storage")
        self.run_dir = None if run_dir is None else os.path.abspath(os.path.expanduser(run_dir))
        self._settings = self._checked(
            {"max_num_steps": steps, "max_num_data_epochs": epochs, "global_batch_size": batch_size}, settings, problems
        )
        if problems:
            raise UsageError("\n".join(problems))

    def __repr__(self) -> str:
        return f"Training({pieces_named(self.model)}, {pieces_named(self.loss)}, {type(self.data).__name__})"

    # ------------------------------------------------------------------ in this process

    def fit(self) -> Result:
        """Trains in this process, and returns the result. Ctrl-C, and the button that interrupts a notebook, end it between two
        steps; a second one at once. Raises what training raises: UsageError with everything that is wrong with the pieces; an
        error in the user's own code without the frames of gangway around it, which `JAX_TRACEBACK_FILTERING=off` shows. Only one
        thread at a time may call it."""
        if why_not := why_not_here("fit", os.environ):
            raise UsageError(why_not)
        if not _fitting.acquire(blocking=False):
            raise UsageError("another fit() is running in this process: wait for its end")
        try:
            with _folder(self.run_dir) as folder:
                return self._fit(folder)
        except Exception as error:
            fold(error)
            raise
        finally:
            _fitting.release()

    def _fit(self, folder: str) -> Result:
        arguments = self._arguments(folder)
        shown = Progress(sys.stdout, arguments.max_num_steps) if self.progress else None
        tell = shown.tell if shown else lambda text: None
        rows = list(self._recorded(arguments, folder))
        recorders = self._recorders(arguments, folder, tell)

        def send(event: Event) -> None:
            self._hear(event, rows, recorders, shown)

        for line in going_on.of_run(going_on.newest(folder), arguments):
            tell(line)
        schedule = self._schedule(arguments)
        tell(f"learning rate: {schedule}")
        trainer: BaseTrainer | None = None
        with installed(runtime.Runtime(send)):
            try:
                trainer = self._trainer(arguments, tuple(map(callback_of, self.callbacks)))
                trainer.train()
            except UsageError as error:
                found = [*self._wrong(arguments, is_built=trainer is not None)]
                first = as_given(str(error))
                error.args = ("\n".join(found if any(first in each for each in found) else [*found, first]),)
                raise
            finally:
                if trainer is not None and trainer.output is None:
                    # Threads that read ahead would stay after an error.
                    with suppress(NotConfiguredError):
                        trainer.dataloaders.dataloader_train.close()
                recorders.close()
                if shown:
                    shown.close()
        output = trainer.output
        assert output is not None
        return Result(rows, output.stop_reason, lambda: (output.state, module(trainer, output.state)), self._best_model, schedule)

    def _wrong(self, arguments: PiecesArguments, *, is_built: bool) -> Iterator[str]:
        """Yields what is wrong with each piece that can be tried alone. `is_built`: data and callbacks have made a trainer."""
        schedule, rate = arguments.optimizer.schedule, arguments.optimizer.learning_rate
        tries: list[tuple[str, Callable[[], Any]]] = [
            ("model", lambda: abstract_model(cast(Any, PiecesTask.of(self.model, self.loss)), arguments.seed)),
            ("optimizer", lambda: build_schedule(schedule, rate, arguments.max_num_steps or 1)),
            ("optimizer", lambda: build_optimizer(arguments.optimizer, optax.constant_schedule(rate), {})),
        ]
        if not is_built:
            tries += [
                ("data", lambda: pieces.check(self.data, arguments)),
                ("eval_data", lambda: pieces.check_held_out(self.eval_data)),
                *(("callbacks", partial(callback_of, each)) for each in self.callbacks),
            ]
        for piece, look in tries:
            try:
                look()
            except UsageError as error:
                text = as_given(str(error))
                yield text if text.startswith(piece) else f"{piece}: {text}"

    def _hear(self, event: Event, rows: list[Any], recorders: Recorders, shown: Progress | None) -> None:
        if event["ev"] == "metrics":
            metrics = self._true(event["metrics"])
            rows.append({"step": event["step"], "metrics": metrics})
            recorders.record(event["step"], metrics, event.get("distributions"))
            if shown:
                shown.record(event["step"], metrics)
        # Nobody can use a checkpoint of a folder that is about to be deleted.
        elif shown and not (event["ev"] == "saved" and self.run_dir is None):
            for line in lines(event):
                shown.tell(line)

    def _true(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Leaves out the rate of the schedule, which a transformation of the user's own does not follow."""
        own = is_transformation(self.optimizer)
        return {name: value for name, value in metrics.items() if not (own and name == "learning_rate")}

    def _recorded(self, arguments: TrainingArguments, folder: str) -> Iterator[dict[str, Any]]:
        """Yields what an earlier training in this folder has published."""
        return read(About("", folder, {}, arguments.recorder_folders.get(JSONL)).output_folder() / FILE)

    def _recorders(self, arguments: TrainingArguments, folder: str, tell: Callable[[str], None]) -> Recorders:
        names = dict.fromkeys((JSONL, *arguments.recorders) if self.run_dir else arguments.recorders)
        about = About(arguments.name, folder, masked(dataclasses.asdict(arguments)))
        return Recorders(tuple(names), about, tell, folders=arguments.recorder_folders)

    def _trainer(self, arguments: PiecesArguments, callbacks: tuple[Callback, ...] = ()) -> BaseTrainer:
        """Returns a trainer of the pieces. Touches no device."""
        data = pieces.as_data(self.data), None if self.eval_data is None else pieces.as_data(self.eval_data)
        trainer = load_object(arguments.trainer)(arguments, *data, callbacks=callbacks)
        trainer.task = PiecesTask.of(self.model, self.loss)
        if is_transformation(self.optimizer):
            trainer.optimizer = self.optimizer
        elif callable(self.optimizer):
            trainer.optimizer = self.optimizer(arguments.optimizer, trainer.scheduler)
        return trainer

    # ------------------------------------------------------------------ on many hosts

    def configuration(self, run_dir: str) -> dict[str, Any]:
        """Returns the configuration with which other processes train the same, as data for JSON. Data in memory is named as the
        folder of `write_data`. Raises UsageError with every piece that cannot be imported."""
        problems: list[str] = []
        pieces_by_name = self._named_pieces(run_dir, problems)
        optimizer = self._named_optimizer(problems)
        callbacks = [named("callbacks", callback, problems) for callback in self.callbacks]
        settings = {**plain(self._settings), **named_after(run_dir)}
        if callbacks and settings.setdefault("trainer", BASE_TRAINER) != BASE_TRAINER:
            problems.append(f"callbacks: trainer = {settings['trainer']!r} is your own: add them there (`self.add_callback`)")
        if problems:
            raise UsageError("other processes cannot import what they need:\n  " + "\n  ".join(problems))
        if callbacks:
            settings["trainer"] = TRAINER
        settings["optimizer"] |= optimizer
        # The history of the result is read from there.
        settings["recorders"] = list(dict.fromkeys((JSONL, *settings.get("recorders", ()))))
        return {**settings, "arguments": ARGUMENTS, "pieces": {**pieces_by_name, "callbacks": callbacks}}

    def _named_pieces(self, run_dir: str, problems: list[str]) -> dict[str, str | None]:
        """Returns the names of the pieces; adds to `problems` what has none."""
        functions = {"model": self.model, "loss": self.loss}
        functions |= {name: value for name, value in self._data.items() if name in self._names or pieces.is_function(value)}
        names = {name: self._names.get(name) or named(name, value, problems) for name, value in functions.items()}
        return names | {name: str(data_folder(run_dir, columns)) for name, columns in self._in_memory(problems).items()}

    def _named_optimizer(self, problems: list[str]) -> dict[str, Any]:
        """Returns the setting that names an optimizer of the user's own."""
        if is_transformation(self.optimizer):
            problems.append(
                "optimizer: an optax transformation is an object in memory: give a name, a dict, or a function (config, "
                "schedule) that returns it, at the top level of a file"
            )
        elif callable(self.optimizer):
            return {"name": named("optimizer", self.optimizer, problems)}
        return {}

    def write_data(self, run_dir: str, *, private: bool = True) -> None:
        """Writes data that is in memory to the run's folder, where other processes read it. `private`: for this user alone."""
        for columns in self._in_memory([]).values():
            pieces.write(columns, data_folder(run_dir, columns), private=private)

    def _in_memory(self, problems: list[str]) -> dict[str, dict[str, Any]]:
        """Returns the columns of the data that is given as objects; adds to `problems` what cannot be written."""
        found = {}
        for name, value in self._data.items():
            try:
                if name not in self._names and not pieces.is_function(value):
                    found[name] = pieces.columns_of(value)
            except UsageError as error:
                problems.append(f"{name}: {error}")
        return found

    @property
    def _data(self) -> dict[str, Any]:
        return {"data": self.data} | ({} if self.eval_data is None else {"eval_data": self.eval_data})

    def result(self, run_dir: str, stop_reason: str) -> Result:
        """Returns the result of a run on other hosts. Its state is read from the newest checkpoint when it is used."""

        def trained() -> tuple[TrainState, nnx.Module]:
            if going_on.newest(run_dir) is None:
                raise UsageError(f"there is no state: the run in {run_dir} ended ({stop_reason}) before its first checkpoint")
            with installed(runtime.Runtime(lambda event: None)):
                trainer = self._trainer(self._arguments(run_dir))
                state = trainer.load_pretrained(run_dir)
                return state, module(trainer, state)

        arguments = self._arguments(run_dir)
        rows, schedule = self._recorded(arguments, run_dir), self._schedule(arguments)
        return Result(rows, StopReason(stop_reason), trained, self._best_model, schedule)

    def _schedule(self, arguments: TrainingArguments) -> str:
        if is_transformation(self.optimizer):
            return "that of the transformation"
        name = arguments.optimizer.schedule.name
        otherwise = "" if name == "constant" else " (for a constant one: optimizer={..., 'schedule': {'name': 'constant'}})"
        return f"{arguments.optimizer.learning_rate:g}, {name}{otherwise}"

    def _best_model(self) -> nnx.Module:
        if self.run_dir is None:
            raise UsageError(
                "best_model: a training without run_dir keeps no checkpoint: give run_dir, eval_data, evaluation={'every_steps': "
                "100, 'score': {}} and checkpoint={'save_steps': 100, 'keep_best': 1}"
            )
        with installed(runtime.Runtime(lambda event: None)):
            trainer = self._trainer(self._arguments(self.run_dir))
            _, state, _ = saved_state(trainer, os.path.join(self.run_dir, BEST))
            return module(trainer, state)

    # ------------------------------------------------------------------ settings

    def _arguments(self, folder: str) -> PiecesArguments:
        try:
            return from_dict(PiecesArguments, {**self._settings, **named_after(folder)})
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _checked(self, own: dict[str, Any], given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        """Returns the settings of a configuration. Adds to `problems` what is wrong with them."""
        own_names = [*inspect.signature(Training).parameters]
        wrong = {name: texts for name in given if (texts := [*unknown(name, own_names)])}
        problems += [text for texts in wrong.values() for text in texts]
        made = self._made(own, {name: value for name, value in given.items() if name not in wrong}, problems)
        try:
            from_dict(PiecesArguments, {**made, **named_after("nowhere")})
        except ValueError as error:
            # A misspelt `steps` ends nothing: that is no problem of its own.
            problems += [line for line in map(as_given, str(error).splitlines()) if not (wrong and line == NO_END)]
        return made

    def _made(self, own: dict[str, Any], given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        made: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        made |= {"task": TASK, "data": {"dataset": DATASETS}, "optimizer": self._optimizer_section(problems)}
        if self.run_dir is None:
            made["checkpoint"] = {"save_at_end": False}
        if own["max_num_steps"]:
            # So that a short training has a history too.
            made["publish_every_steps"] = min(10, max(1, own["max_num_steps"] // 10))
        for name, value in given.items():
            put(made, name.split("."), plain(value))
        return made

    def _optimizer_section(self, problems: list[str]) -> dict[str, Any]:
        if isinstance(self.optimizer, str):
            return {"name": self.optimizer}
        if is_transformation(self.optimizer):
            return {"max_grad_norm": None}  # it clips itself, if that is wanted
        if isinstance(section := plain(self.optimizer), Mapping):
            return dict(section)
        if callable(self.optimizer):
            return {}
        problems.append(f"optimizer = {self.optimizer!r}: expected a name, a dict, an optax transformation, or a function")
        return {}


def named(piece: str, value: Any, problems: list[str]) -> str | None:
    """Returns the name by which others import a piece; adds to `problems` why there is none."""
    if isinstance(value, str):
        return value
    try:
        return path_of(value)
    except ValueError as error:
        problems.append(f"{piece}: {error}")
        return None


def taken(piece: str, value: Any, problems: list[str]) -> Any:
    """Returns a piece, or the one that `value` names; adds to `problems` what is wrong with the name."""
    if not isinstance(value, str):
        return value
    try:
        if not PATH.fullmatch(value):
            raise ValueError(f"{value!r} is no name of an object: expected 'package.module:Name', or the object itself")
        return load_object(value)
    except ValueError as error:
        problems.append(f"{piece}: {error}")
        return None


def callback_of(value: Any) -> Callback:
    """Returns a callback, or the one that a class or a function makes. Raises UsageError."""
    value = load_object(value) if isinstance(value, str) else value
    made = value() if callable(value) and not isinstance(value, Callback) else value
    if not isinstance(made, Callback):
        raise UsageError(f"callbacks: {pieces_named(value)} is {type(made).__name__}: expected a trainers.callbacks:Callback")
    return made


def fold(error: Exception) -> None:
    """Puts an error into the words of the call, and takes away the frames that lead to the user's code. An error in the program
    itself, which is no UsageError, keeps all."""
    is_usage = isinstance(error, UsageError)
    notes = notes_of(error) if is_usage else getattr(error, "__notes__", ())
    error.__notes__ = [*map(as_given, notes)]
    if is_usage:
        error.args, error.__cause__ = (as_given(str(error)),), None
    frames = [*traceback.walk_tb(error.__traceback__)]
    own = [number for number, (frame, _) in enumerate(frames) if is_of_user(frame.f_code.co_filename)]
    if jax.config.jax_traceback_filtering == "off" or not (own or is_usage):  # type: ignore[attr-defined]
        return
    kept = None
    for number in reversed(own if is_usage else [*own, *range(own[-1] + 1, len(frames))]):
        frame, line = frames[number]
        kept = TracebackType(kept, frame, frame.f_lasti, line)
    error.__traceback__ = kept


def is_transformation(value: Any) -> bool:
    return isinstance(value, optax.GradientTransformation)


def named_after(folder: str) -> dict[str, str]:
    return {"storage": os.path.dirname(folder) or ".", "name": os.path.basename(folder)}


def data_folder(run_dir: str, columns: Mapping[str, Any]) -> Path:
    # By what it holds: a later launch with other data finds its own, and says that the setting has changed.
    return Path(run_dir, "data", pieces.digest(columns))


def pieces_named(piece: Any) -> str:
    return getattr(piece, "__qualname__", None) or type(piece).__name__


# ---------------------------------------------------------------------- what a process has one of


@contextmanager
def installed(host: runtime.Runtime) -> Iterator[runtime.Runtime]:
    before = runtime.current()
    runtime.install(host)
    try:
        yield host
    finally:
        runtime.install(before)


@contextmanager
def _folder(run_dir: str | None) -> Iterator[str]:
    """Gives the run's folder, or one that is deleted afterwards."""
    if run_dir is not None:
        yield run_dir
        return
    with tempfile.TemporaryDirectory(prefix="gangway-", ignore_cleanup_errors=True) as storage:
        yield os.path.join(storage, "training")
