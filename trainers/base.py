"""The trainer most users want, and the one to subclass.

What it is made of is in `builder.py`; what may change its course, in `hooks.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax
import numpy as np

from trainers import runtime
from trainers.builder import Builder
from trainers.callbacks import Callback
from trainers.checkpoint.standalone import save_to
from trainers.config.masking import masked
from trainers.config.section import parse_duration_s
from trainers.diagnostics import memory, nonfinite
from trainers.errors import NotConfiguredError, OutOfMemoryError, SaveFailedError, UsageError
from trainers.evaluation.score import ScoreKeeper
from trainers.evaluation.validation import DEFAULT_UNIT, ValidationUnit
from trainers.loop.anomalies import Decision
from trainers.loop.host_requests import HostRequests, Limits
from trainers.loop.inflight import Flags
from trainers.loop.restore import Resume, known_lineage
from trainers.loop.results import describe
from trainers.loop.train_loop import Loop
from trainers.loop.triggers import Due, EndOfData, Epochs
from trainers.metrics import histograms
from trainers.metrics.accumulator import MetricSums
from trainers.metrics.peak_flops import peak_flops_per_s
from trainers.metrics.publisher import Publisher, Seconds, Throughput, device_memory
from trainers.parallel import mesh as meshes
from trainers.protocol import TrainerOutput
from trainers.runtime import multihost
from trainers.runtime.stop_reason import StopReason
from trainers.step.state import TrainState, num_parameters, with_shardings


@dataclasses.dataclass(frozen=True)
class LastEvaluation:
    step: int
    metrics: dict[str, float]
    """As published."""


class BaseTrainer(Builder):
    """Trains a task's model on random-access datasets. Conforms to `trainers.protocol.TrainerProtocol`.

    Building one touches no device: a standby process does it, and `prepare`, before its host has joined the gang.
    All hosts must call `train`, `evaluate`, `eval` and `save_pretrained` alike.
    """

    _loop: Loop | None = None
    _last_evaluation: LastEvaluation | None = None
    _latest_metrics: dict[str, float] = {}  # noqa: RUF012 - replaced, never written into
    """Of the last publish, if need be the last before the checkpoint that was restored."""

    def train(self, model_parameters: Any = None, state: TrainState | None = None) -> TrainState:
        """Starts or resumes; returns the final state and sets `output`. Raises on any failure; a stop is not one."""
        try:
            return self._train(model_parameters, state)
        except BaseException as raised:
            error = self._out_of_memory(raised) if memory.out_of_memory(raised) else raised
            self.callbacks.call(Callback.on_exception, self.info, error=error)
            if error is raised:
                raise
            raise error from raised

    def evaluate(
        self,
        state: TrainState | None = None,
        metric_calculator: Callable[[dict[str, float]], dict[str, float]] | None = None,
        *,
        unit: str | None = None,
    ) -> dict[str, float]:
        """Means over the whole held-out set of a validation unit (default: the first), or over its `max_batches`, each example
        counted once.

        `metric_calculator` gets the means and returns further metrics. Empty if there is no held-out data.
        """
        state, chosen = self._current(state), self._unit(unit)
        metrics = {} if chosen is None else chosen.evaluate(state)
        if metric_calculator is not None:
            metrics.update(metric_calculator(metrics))
        return metrics

    def eval(self, state: TrainState | None = None, *, unit: str | None = None) -> Iterator[dict[str, float]]:
        """Yields the metrics of each held-out batch."""
        state, chosen = self._current(state), self._unit(unit)
        if chosen is not None:
            yield from chosen.eval(state)

    def save_pretrained(self, ckpt_path: str, state: TrainState | None = None) -> str:
        """Writes parameters, optimizer state, arguments and all else of `state` (None: the current one), and the model's assets,
        to the folder `ckpt_path`, which must not exist. Returns the path; `trainers.checkpoint.standalone.load_from` and
        `trainers.checkpoint.assets.read` read it back."""
        state = self._current(state)
        save_to(ckpt_path, state, self._meta(), self.build_model_assets)
        return ckpt_path

    def precompile(self) -> None:
        """Optional, instead of `train`, in a process that does nothing else: compiles and keeps what the start of a gang of this
        size needs. All its hosts must call this."""
        self._configure()
        self._compile(with_shardings(self._model_state, self._state_shardings))

    # ------------------------------------------------------------------ inside

    def _train(self, model_parameters: Any, state: TrainState | None) -> TrainState:
        host = runtime.current()
        started_s = time.monotonic()
        self._configure()
        host.phase("restore")
        self.lineage = known_lineage(self._run_folder, host.skip_batches)
        self._resume = self._build_resume()
        self._load_ahead()
        state = self._starting_state(model_parameters, state)
        host.phase("compile")
        self._compile(state)
        self._loop = loop = self._build_loop(int(state.batch_index), started_s)
        self.callbacks.call(Callback.on_train_begin, self.info)
        state = self.on_training_start(state)
        host.phase("train")
        state, reason = loop.run(state)
        state = self._finish(self.on_training_end(state), reason)
        self.callbacks.call(Callback.on_train_end, self.info)
        return state

    def _starting_state(self, model_parameters: Any, state: TrainState | None) -> TrainState:
        """1. the state given; 2. the parameters given, with a new optimizer state; 3. the newest whole checkpoint; 4. step 0."""
        places, resume = self._state_shardings, self._resume
        if state is not None:
            state = resume.begin_with(jax.device_put(state, places))
        elif model_parameters is not None:
            fresh = jax.jit(self._fresh_state, out_shardings=places)
            state = resume.begin_with(fresh(jax.device_put(model_parameters, places.params)))
        else:
            state = resume.newest()
        self._take_up()
        return state

    def _build_resume(self) -> Resume:
        places = self._state_shardings
        return Resume(
            self._run_folder,
            self.functions.checkpoint_manager,
            with_shardings(self._model_state, places),
            jax.jit(self._initial_state, out_shardings=places),
            {"num_hosts": jax.process_count(), "num_devices": self._mesh.devices.size, "mesh": dict(self._mesh.shape)},
            self.lineage,
        )

    def _go_back(self, decision: Decision) -> tuple[TrainState, int]:
        found = self._resume.go_back(decision)
        self._take_up()
        return found

    def _take_up(self) -> None:
        """What the restored checkpoint knew; at the beginning of the run, nothing."""
        meta = self._resume.meta
        self._latest_metrics = meta.get("metrics", {})
        self._last_evaluation = LastEvaluation(**meta["evaluation"]) if meta.get("evaluation") else None
        self._score.go_back(meta.get("scores"))

    def _load_ahead(self) -> None:
        """Kept programs are loaded while the state is restored; those first that this needs."""
        self.functions.checkpoint_manager.load_ahead(self._resume.abstract)
        self.functions.train_step_fn.load_ahead(*self._step_arguments(self._resume.abstract))

    def _compile(self, state: TrainState) -> None:
        """Compiles (or loads) the train step and what saving needs, so that no step has to wait for it."""
        self.functions.checkpoint_manager.prepare(state)
        self.functions.train_step_fn.prepare(*self._step_arguments(state))

    def _step_arguments(self, state: TrainState) -> tuple[Any, ...]:
        return state, self._no_sums(), self._step_batch_shapes(), self._no_requests()

    def _step_batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.arguments.accumulation_steps, meshes.padded_rows(self._mesh, self.arguments.micro_batch_size))
        return self._batch_shapes(shape, sharding=meshes.micro_batches(self._mesh))

    def _build_loop(self, step: int, started_s: float) -> Loop:
        arguments = self.arguments
        loader, manager = self.dataloaders.dataloader_train, self.functions.checkpoint_manager
        epochs = arguments.max_num_data_epochs
        limits = Limits(
            max_steps=arguments.max_num_steps,
            max_batches=None if epochs is None else -(-epochs * len(self.dataset_train or ()) // arguments.global_batch_size),
            stop_at=runtime.current().stop_at,
            deadline_s=None if arguments.time_limit is None else started_s + parse_duration_s(arguments.time_limit),
        )
        self.info.global_step = step
        publisher = Publisher(arguments.publish_every_steps, self._throughput(), self.step_layout, self._publish)
        return Loop(
            train_step=self.functions.train_step_fn,
            layout=self.step_layout,
            loader=loader,
            end_of_data=EndOfData(getattr(loader, "ends", None)),
            empty_sums=self._no_sums,
            publisher=publisher,
            flags=Flags(self._mesh),
            host_requests=HostRequests(limits, arguments.checkpoint.save_minutes, lambda: manager.failing),
            due=Due(arguments.checkpoint, arguments.evaluation, arguments.previews, self._epochs),
            anomalies=arguments.anomalies,
            distributions=arguments.distributions,
            lineage=self.lineage,
            save=self._save,
            evaluate=self._evaluate_and_publish,
            evaluated_step=lambda: None if self._last_evaluation is None else self._last_evaluation.step,
            stop_early=lambda: self._score.wants_stop,
            preview=self._preview_and_tell,
            diagnose=self._diagnose,
            go_back=self._go_back,
            callbacks=self.callbacks,
            hooks=self,
            seconds=Seconds(),
            info=self.info,
            resumed_step=step,
            saved=self._saved,
        )

    def _finish(self, state: TrainState, reason: StopReason) -> TrainState:
        host, manager, step = runtime.current(), self.functions.checkpoint_manager, self.info.global_step
        wanted = self.arguments.checkpoint.save_at_end or not reason.finished
        if reason.finished and (self._last_evaluation is None or self._last_evaluation.step != step):
            host.phase("evaluate")
            state = self._evaluate_and_publish(state)
        if wanted:
            host.phase("save")
            self._save(state, patient=True)  # tells of the evaluation, so that no later start repeats it
        host.phase("finish")
        manager.wait()
        self.callbacks.tell_saved(self.info, self._saved)
        if wanted and not multihost.every_host("saved at the end", manager.last_saved_step == step):
            raise SaveFailedError(f"training is over, but the checkpoint of its last step, {step}, could not be saved")
        saved = multihost.from_host0("last checkpoint", manager.last_saved_step)
        path = None if saved is None else manager.path(saved)
        metrics = self._final_metrics(state)
        if reason.finished:
            metrics["sample"] = next((shown["prompt"] + shown["text"] for shown in self._preview(state)), None)
        self._state = state
        self.output = TrainerOutput(state, self._mesh, path, None if saved is None else str(saved), reason, metrics)
        self.dataloaders.dataloader_train.close()
        self._dataloaders = self._validation_units = None  # made anew if this trainer goes on
        return state

    def _final_metrics(self, state: TrainState) -> dict[str, Any]:
        metrics = describe(state, self.functions.checkpoint_manager.fingerprint(state))
        metrics["train_loss"] = self._latest_metrics.get("loss")
        metrics.update(self.lineage.meta(self.info.batch_index))
        if self._last_evaluation is not None:
            metrics.update(self._last_evaluation.metrics)
        if self._score.scores.best is not None:
            metrics.update({"best_score": self._score.scores.best, "best_score_step": self._score.scores.best_step})
        return metrics

    def _out_of_memory(self, error: BaseException) -> BaseException:
        """The error that says what to do about `error`; itself, if it came before the state's shapes were known."""
        if self._functions is None:
            return error
        program = getattr(self.functions.train_step_fn, "compiled", None)
        shapes = with_shardings(self._model_state, self._state_shardings)
        used = memory.usage(shapes, self._step_batch_shapes(), program)
        message = memory.advice(error, used, self.arguments, dict(self._mesh.shape))
        return OutOfMemoryError(message, deterministic=self._loop is None or not self._loop.first_step_told)

    def _diagnose(self, state: TrainState, batch: Any, step: int) -> str:
        """All hosts must call this."""

        def objective(params: Any, micro_batch: Any, updates: Any) -> jax.Array:
            return self.loss_function(params, micro_batch, updates).loss_sum

        where, problem = nonfinite.find(objective, self._mesh, state.params, batch, state.step)
        return f"{where}, with the parameters of step {step}" if where else f"where it began was not found: {problem}"

    def _preview(self, state: TrainState) -> list[dict[str, str]]:
        """What the model makes of the prompts, if its task can. A look at what was learnt, never a reason to fail."""
        host = runtime.current()
        if self.previews is None:
            return []
        host.phase("preview")
        previews, problem = self.previews(self.parameters_to_evaluate(state), self.info.global_step)
        if problem and jax.process_index() == 0:
            host.note(f"no previews at step {self.info.global_step}: {problem}")
        return previews

    def _preview_and_tell(self, state: TrainState) -> None:
        previews = self._preview(state)
        if previews and jax.process_index() == 0:
            runtime.current().emit("preview", step=self.info.global_step, previews=previews)

    def _save(self, state: TrainState, *, patient: bool = False) -> None:
        step, manager = self.info.batch_index, self.functions.checkpoint_manager
        manager.wait_for_save()
        if step == manager.last_saved_step:
            return  # `saving` would be told, and never `saved`
        runtime.current().emit("saving", step=step)
        manager.save(step, state, self._meta(), patient=patient)

    def _meta(self) -> dict[str, Any]:
        return {
            "batch_index": self.info.batch_index,
            "seed": self.arguments.seed,
            **self.lineage.meta(self.info.batch_index),
            "metrics": self._latest_metrics,
            "evaluation": None if self._last_evaluation is None else dataclasses.asdict(self._last_evaluation),
            "scores": self._score.meta(),
            "arguments": masked(dataclasses.asdict(self.arguments)),
        }

    def _evaluate_and_publish(self, state: TrainState) -> TrainState:
        """All units. Returns the state, which a hook may replace."""
        step, metrics = self.info.global_step, {}
        for name in tuple(self.validation_units) or (DEFAULT_UNIT,):  # who overrides `evaluate` may need no unit
            state, own = self._evaluate_unit(state, name)
            metrics.update({f"{name}_{metric}": value for metric, value in own.items()})
        if not metrics:
            return state
        metrics.update(self._score.add(step, metrics))
        self._last_evaluation = LastEvaluation(step, metrics)
        if jax.process_index() == 0:
            runtime.current().emit("metrics", step=step, metrics=metrics, seconds={}, kind="eval")
        return state

    def _evaluate_unit(self, state: TrainState, name: str) -> tuple[TrainState, dict[str, float]]:
        self.callbacks.call(Callback.on_evaluate_begin, self.info, unit=name)
        state = self.on_evaluation_start(state)
        first = name == next(iter(self.validation_units), name)
        # The first is what `evaluate(state)` is of: so an override of it need not know of units.
        metrics = self.evaluate(state) if first else self.evaluate(state, unit=name)
        if metrics:
            state, metrics = self.on_evaluation_end(state, metrics)
            self.callbacks.call(Callback.on_evaluate, self.info, unit=name, metrics=metrics)
        return state, metrics

    def _unit(self, name: str | None) -> ValidationUnit | None:
        self._configure()
        units = self.validation_units
        if name is not None and name not in units:
            raise UsageError(f"unit = {name!r}: expected one of {', '.join(units) or 'no unit, for there is no held-out data'}")
        return units.get(name or next(iter(units), ""))

    def _publish(self, step: int, metrics: dict[str, float], seconds: dict[str, float], measured: np.ndarray | None) -> None:
        if self._epochs.num_samples:
            metrics["epoch"] = self._epochs.at(step)
        metrics |= device_memory(self._mesh.local_devices)
        self._latest_metrics = metrics
        own: dict[str, Any] = {"step": step, "metrics": metrics, "seconds": seconds}
        if measured is not None:
            own["distributions"] = histograms.read(measured, self._chosen_parameters)
        self.callbacks.call(Callback.on_publish, self.info, **own)
        if jax.process_index() == 0:
            runtime.current().emit("metrics", **own)

    def _current(self, state: TrainState | None) -> TrainState:
        state = state or self._state
        if state is None:
            raise NotConfiguredError("there is no state yet: call train first, or pass a state")
        return state

    def _no_sums(self) -> MetricSums:
        return self._zeros(self.step_layout)

    @property
    def _epochs(self) -> Epochs:
        return Epochs(len(self.dataset_train or ()), self.arguments.global_batch_size)

    def _no_requests(self) -> jax.Array:
        return Flags(self._mesh).array()

    def _throughput(self) -> Throughput:
        flops = self.task.flops_per_token(num_parameters(self._model_state.params))
        peak = self.arguments.metrics.peak_flops_per_s
        kinds = {device.device_kind for device in self._mesh.devices.flat}
        if peak is None and len(kinds) == 1:
            peak = peak_flops_per_s(kinds.pop(), self.arguments.dtype)
        return Throughput(flops, self._mesh.devices.size, peak)

    @cached_property
    def _score(self) -> ScoreKeeper:
        return ScoreKeeper(self.arguments.evaluation.score)

    @cached_property
    def _chosen_parameters(self) -> list[str]:
        return histograms.chosen(self._model_state.params, self.arguments.distributions)
