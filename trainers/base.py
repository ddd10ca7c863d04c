"""The trainer that most users want, and the one to subclass.

Its parts are built in `model_builder.py` and `builder.py`; `loop/hooks.py` has the methods that may change the course of
training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax

from trainers import runtime
from trainers.builder import Builder
from trainers.callbacks import Callback
from trainers.checkpoint import assets
from trainers.checkpoint.standalone import load_from, save_to
from trainers.config.section import parse_duration_s
from trainers.data.iterated_loader import IteratedLoader
from trainers.data.loader import Tells, TellsNumbers
from trainers.diagnostics import memory, nonfinite
from trainers.errors import NotConfiguredError, OutOfMemoryError, UsageError
from trainers.evaluation.score import ScoreKeeper
from trainers.evaluation.validation import DEFAULT_UNIT, NO_DATA, ValidationUnit, lacks_data
from trainers.loop import init_from
from trainers.loop.beginning import Beginning, FromSettings, Given, arrays_in, given_arrays, placed_like, with_arrays
from trainers.loop.data_state import DataState
from trainers.loop.evaluator import IS_OBSERVED, Evaluator, Observed, means, observed
from trainers.loop.garbage import GarbageCollection
from trainers.loop.host_requests import HostRequests, Limits
from trainers.loop.inflight import Flags
from trainers.loop.metrics_reporter import MetricsReporter
from trainers.loop.previewer import Previewer
from trainers.loop.restore import Resume, initial_lineage
from trainers.loop.results import describe
from trainers.loop.returned import check_returns
from trainers.loop.saver import Saver
from trainers.loop.start_from import FromCheckpoint
from trainers.loop.time_used import TimeUsed
from trainers.loop.train_loop import Loop
from trainers.loop.triggers import Due, EndOfData, Epochs
from trainers.metrics import histograms
from trainers.metrics.accumulator import MetricSums
from trainers.metrics.peak_flops import peak_flops_per_s
from trainers.metrics.publisher import THROUGHPUT, Publisher, Seconds, Throughput
from trainers.optim.param_groups import parameter_paths
from trainers.parallel import mesh as meshes
from trainers.protocol import TrainerConfigureModelOutput, TrainerOutput
from trainers.published import of_task
from trainers.runtime import multihost, signals
from trainers.runtime.multihost import StageError
from trainers.runtime.stop_reason import StopReason
from trainers.step.state import TrainState, num_parameters, with_shardings
from trainers.step.train_step import parameters_seen


class BaseTrainer(Builder):
    """Trains a task's model on random-access datasets. Conforms to `trainers.protocol.TrainerProtocol`.

    Building one touches no device: a standby process does it, and `prepare`, before its host has joined the gang.
    All hosts must call `train`, `evaluate`, `eval` and `save_pretrained` alike.
    """

    _loop: Loop | None = None
    _saver: Saver | None = None
    _is_training = False

    def train(self, model_parameters: Any = None, state: TrainState | None = None) -> TrainState:
        """Starts or resumes training. Returns the final state and sets `output`. Raises on any failure; a stop is not one.

        What is given is where the run begins: a state, or parameters (in nested dicts, also of NumPy arrays, as
        `trainers.export.from_safetensors` returns them) with a new optimizer state. A run that has a checkpoint goes on from
        that, and says so.

        In the main thread Ctrl-C and SIGTERM save and stop, unless the program handles them; a second Ctrl-C ends it at once.
        """
        self._is_training = True
        try:
            with signals.handled(runtime.current()):
                return self._train(model_parameters, state)
        except BaseException as raised:
            error = self._out_of_memory(raised) if memory.out_of_memory(raised) else raised
            self.callbacks.call(Callback.on_exception, self.info, error=error)
            if error is raised:
                raise
            # `from`: the runtime's own error stays visible below the advice.
            raise error from raised
        finally:
            self._is_training = False
            runtime.current().training_ended()

    def evaluate(
        self,
        state: TrainState | None = None,
        metric_calculator: Callable[[dict[str, float]], dict[str, float]] | None = None,
        *,
        unit: str | None = None,
    ) -> dict[str, float]:
        """Returns means over the whole held-out set of a validation unit (default: the first), or over its `max_batches`, each
        example counted once: `loss`, the parts of the loss, and `perplexity`, without the name of the unit. If a subclass has its
        own `eval`, they are the means of what that yields.

        The hooks and callbacks of an evaluation are called as in training. A hook may donate the state that is given.
        `metric_calculator` gets the means and returns further metrics; metrics of single predictions come from
        `build_evaluation_metrics`. Raises UsageError if there is no held-out data.
        """

        def measure(state: TrainState) -> dict[str, float]:
            metrics = self._measured(chosen, state, unit)
            metrics = self.calculate_metrics(metrics, name) if metrics else {}
            return metrics if metric_calculator is None else {**metrics, **metric_calculator(metrics)}

        name, chosen = self._unit(unit)
        given = self._current(state)
        # In training the evaluator calls the hooks, whatever a subclass makes of this method.
        if self._observed.active:
            return measure(given)
        self._at(given)
        returned, metrics = self._observed.evaluate(given, name, measure)
        self._keep(given, returned)
        return metrics

    def eval(self, model_state: TrainState | None = None, *, unit: str | None = None) -> Iterator[dict[str, float]]:
        """Yields the metrics of each held-out batch. `on_evaluation_end` and the callbacks get those of all batches at the end.
        Raises UsageError if there is no held-out data."""
        name, chosen = self._unit(unit)
        given = self._current(model_state)

        def batches() -> Iterator[dict[str, float]]:
            if chosen is None:
                return
            if self._observed.active:  # a subclass's own `eval` calls this one in an evaluation
                yield from chosen.eval(given)
                return
            self._at(given)
            state = self._observed.begin(given, name)
            metrics = yield from chosen.eval(state)
            state, _ = self._observed.end(state, name, self.calculate_metrics(metrics, name))
            self._keep(given, state)

        return batches()

    def save_pretrained(self, ckpt_path: str, state: TrainState | None = None) -> str:
        """Writes parameters, optimizer state, arguments and everything else of `state` (None: the current one), and the model's
        assets, to the folder `ckpt_path`, which must not exist. Returns the path. `load_pretrained` and
        `trainers.checkpoint.assets.read` read it back."""
        state = self._current(state)
        if self._saver is None:  # not after `train`: data loaders would be built again, to read nothing
            self._configure()
            self._saver = self._build_saver(TimeUsed())
        # Of the state that is given, which need not be the current one.
        save_to(ckpt_path, state, self._saver.meta(int(state.batch_index)), self.model_assets)
        return ckpt_path

    def load_pretrained(self, path: str) -> TrainState:
        """Returns the state that `save_pretrained` or a run's checkpoint has, with this trainer's shardings. `path` may also be a
        run's folder, which stands for its newest whole checkpoint. All hosts must call this. Raises CheckpointError if the
        state is damaged or of another model, and CheckpointUnavailableError if it cannot be read."""
        self.prepare()
        state = self._configured(self._model, "the state", "configure_model").state
        loaded, meta = load_from(init_from.found(path), with_shardings(state, self._state_shardings))
        if self._frozen is not None:
            self._frozen.check(meta)
        return loaded

    def precompile(self) -> None:
        """Optional, instead of `train`, in a process that does nothing else: compiles and keeps the programs that the start of
        a gang of this size needs. All its hosts must call this."""
        self._configure()
        self._compile(with_shardings(self._model_state, self._state_shardings))

    # ------------------------------------------------------------------ inside

    def _train(self, model_parameters: Any, state: TrainState | None) -> TrainState:
        host = runtime.current()
        time_used = TimeUsed(host.time_used_s)
        self._configure()
        if not self.validation_units and not self._has_own_evaluation and (problem := lacks_data(self.arguments.evaluation)):
            self._note_from_host0(problem)
        host.phase("restore")
        # Before the restore: a checkpoint that was trained on a skipped batch must be refused.
        self.lineage = initial_lineage(self._run_folder, host.skip_batches)
        resume = self._build_resume(self._beginning(model_parameters, state))
        self._saver = self._build_saver(time_used)
        # Loads on another thread while this one reads the checkpoint.
        self._load_ahead(resume.abstract)
        if self._frozen is not None:
            self._frozen.begin()  # on a thread too
        state = resume.newest()
        self._finish_frozen(resume.meta)
        self._keep_assets()
        if isinstance(self.dataset_train, Tells) and not resume.meta:
            for line in self.dataset_train.told():
                self._note_from_host0(line)
        self._saver.restore(resume.meta)
        time_used.resume(resume.meta)
        # Only of a new run: what was restored could be saved. Beside the compilation, which takes longer.
        tried = self._saver.begin_trial(resume.abstract) if not resume.meta else None
        host.phase("compile")
        # After the restore: the kept executables were loaded meanwhile (`_load_ahead`).
        self._compile(state)
        if tried is not None:
            tried()
        self._loop = loop = self._build_loop(resume, self._saver, int(state.batch_index))
        self.callbacks.call(Callback.on_train_begin, self.info)
        state = self.on_training_start(state)
        host.phase("train")
        with loop.garbage:
            state, reason = loop.run(state)
        state = self._finish(loop, self.on_training_end(state), reason)
        self.callbacks.call(Callback.on_train_end, self.info)
        self._saver.manager.close()  # only now: a callback may have read an old checkpoint until here
        return state

    def _finish_frozen(self, meta: dict[str, Any]) -> None:
        """Waits for the frozen weights. `meta` is that of the restored checkpoint, which must have been trained with them."""
        if self._frozen is None:
            return
        self._frozen.check(meta)
        self._frozen.finish(record=True)
        for line in self._frozen.said() if not meta else ():
            self._note_from_host0(line)

    def _beginning(self, model_parameters: Any, state: TrainState | None) -> Beginning:
        """Returns where a run without a checkpoint begins. In this order: 1. the given state; 2. the given parameters, with a
        new optimizer state; 3. the arrays in the state of `configure_model`, with the rest from the seed; 4. the state that
        `checkpoint.start_from` names; 5. the parameters that `init_from` names; 6. the seed. Raises UsageError for 3 together
        with 4 or 5."""
        arguments, shardings, shapes = self.arguments, self._state_shardings, self._model_arrays
        # Only a rollback comes back to the beginning within this process.
        keep = "rollback" in (arguments.anomalies.non_finite, arguments.anomalies.loss_spike)
        given = state is not None or model_parameters is not None
        named = {"init_from": arguments.init_from, "checkpoint.start_from": arguments.checkpoint.start_from}
        for name in (name for name, value in named.items() if given and value is not None):
            self._note_from_host0(f"{name} is not used: train was given a state or parameters")
        if state is not None:
            # To this trainer's shardings: the given state may lie on other devices.
            return Given("the given state", lambda: jax.device_put(state, shardings), lambda placed: placed, keep=keep)
        # Jitted with the shardings of the state: every device makes its own part only. Nothing is compiled here: a run that finds
        # a checkpoint never calls it.
        if model_parameters is not None:
            first = jax.jit(self._initial_state, out_shardings=shardings)
            return Given("model_parameters", lambda: self._placed(model_parameters, shapes), first, keep=keep)
        if arrays := arrays_in(self._configured(self._model, "model", "configure_model").state):
            if others := [name for name, value in named.items() if value is not None]:
                raise UsageError(
                    f"{others[0]}: configure_model has returned a state with arrays ({next(iter(arrays))} ...), which begins the "
                    "run: leave one of them out"
                )
            return self._from_arrays(arrays, keep)
        if arguments.checkpoint.start_from is not None:
            return FromCheckpoint(arguments, self._run_folder, with_shardings(self._model_state, shardings))
        # What was loaded becomes part of the state: there are no two of it in memory.
        first = jax.jit(self._initial_state, out_shardings=shardings, donate_argnums=0)

        def fresh(loaded: dict[str, jax.Array], others: dict[str, jax.Array]) -> TrainState:
            base = {name: value for name, value in self._of_base().items() if name not in loaded}
            return first(loaded, {**base, **others})

        return FromSettings(arguments.init_from, self._run_folder, shapes, fresh, self.adapted)

    def _from_arrays(self, arrays: dict[str, Any], keep: bool) -> Beginning:
        """Returns the beginning with these arrays of the state, by path, and the rest from the seed."""
        abstract = with_shardings(self._model_state, self._state_shardings)
        named = [f".params{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(abstract.params)]
        if self.arguments.lora is not None and self.arguments.lora.whole and any(name not in arrays for name in named):
            raise UsageError(
                "configure_model has returned a state in which some parameters are shapes alone, and lora.whole says that they "
                "begin as those of the base: return initial_state() with your arrays in it"
            )
        finish = functools.partial(with_arrays, abstract=abstract, fresh=self._initial_state)
        first = jax.jit(finish, out_shardings=self._state_shardings)
        return Given("", lambda: placed_like(arrays, abstract), first, keep=keep)

    def _placed(self, model_parameters: Any, shapes: Any) -> dict[str, jax.Array]:
        """Returns the given arrays of the model, on the devices, by name. State beside the parameters may be missing."""
        optional = parameter_paths(self._model_state.model_state)
        placed = given_arrays(model_parameters, shapes, optional)
        if missing := [name for name in optional if name not in placed]:
            about = f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            self._note_from_host0(f"model_parameters: {about} are not among them, and begin as in a new run")
        return placed

    def _keep_assets(self) -> None:
        """Writes the model's assets to the run's folder. Raises UsageError, on all hosts, if one of them cannot be written."""
        problem = ""
        if jax.process_index() == 0:
            try:
                assets.keep(self._run_folder, self.model_assets)
            except UsageError as error:
                problem = str(error)
            except OSError as error:  # training is worth more, and the next start tries again
                runtime.current().note(f"the model's assets could not be written: {error}; the next start tries again")
        if problem := multihost.from_host0("assets", problem):
            raise UsageError(problem)

    def _build_resume(self, beginning: Beginning) -> Resume:
        return Resume(
            self._run_folder,
            self.functions.checkpoint_manager,
            with_shardings(self._model_state, self._state_shardings),
            beginning,
            {"num_hosts": jax.process_count(), "num_devices": self._mesh.devices.size, "mesh": dict(self._mesh.shape)},
            self.lineage,
        )

    def _build_saver(self, time_used: TimeUsed) -> Saver:
        """Builds the saver with what a checkpoint records beside the state: the published metrics, and the evaluations."""
        return Saver(
            self.functions.checkpoint_manager,
            self.arguments,
            self.info,
            self.lineage,
            self._build_reporter(),
            Evaluator(
                self.evaluate,
                tuple(self.validation_units),
                self._observed,
                ScoreKeeper(self.arguments.evaluation.score, self.build_early_stopper()),
                lambda name: getattr(self.validation_units.get(name), "rates", {}),
            ),
            self.callbacks,
            self._saved,
            time_used,
            DataState(self.dataloaders.dataloader_train, self.arguments.global_batch_size, self._note_from_host0),
            lambda: {} if self._frozen is None else self._frozen.origins,
        )

    def _build_reporter(self) -> MetricsReporter:
        data, size = self.dataset_train, self.arguments.global_batch_size
        made = MetricsReporter(self.callbacks, self.info, self._epochs, self._mesh.local_devices, self._histogram_names())
        if isinstance(data, TellsNumbers):
            made.once, made.data_numbers = data.numbers(), lambda step: data.numbers_at(step * size)
        return made

    def _histogram_names(self) -> list[str]:
        return histograms.chosen(self._model_state.params, self.arguments.distributions)

    def _load_ahead(self, abstract: TrainState) -> None:
        """Loads kept programs while the state is restored; first those that restoring itself needs."""
        self.functions.checkpoint_manager.load_ahead(abstract)
        self.functions.train_step_fn.load_ahead(*self._step_arguments(abstract))

    def _compile(self, state: TrainState) -> None:
        """Compiles (or loads) the train step and the programs for saving, so that no step has to wait for them."""
        self.functions.checkpoint_manager.prepare(state)
        self.functions.train_step_fn.prepare(*self._step_arguments(state))

    def _step_arguments(self, state: TrainState) -> tuple[Any, ...]:
        return state, self._no_sums(), self._step_batch_shapes(), self._no_requests()

    def _step_batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        model = TrainerConfigureModelOutput(self.model, self._model_state)
        return self._batch_shapes(self._micro_batches_shape, model, meshes.micro_batches(self._mesh))

    def _build_loop(self, resume: Resume, saver: Saver, step: int) -> Loop:
        arguments, time_used = self.arguments, saver.time_used
        limit_s = None if arguments.time_limit is None else parse_duration_s(arguments.time_limit)
        loader, manager = self.dataloaders.dataloader_train, self.functions.checkpoint_manager
        limits = Limits(
            max_steps=arguments.max_num_steps,
            max_batches=self._batches_of_data(loader),
            stop_at=runtime.current().stop_at,
            time_is_up=limit_s is not None and time_used.before_s >= limit_s,
            deadline_s=None if limit_s is None else time_used.deadline_s(limit_s),
        )
        self.info.global_step = step
        publisher = Publisher(self._throughput(), self.step_layout, saver.reporter.report)
        return Loop(
            train_step=self.functions.train_step_fn,
            layout=self.step_layout,
            loader=loader,
            # A user's own loader need not know where its data ends.
            end_of_data=EndOfData(getattr(loader, "ends", None), reason=self._reason_of_end(loader)),
            empty_sums=self._no_sums,
            publisher=publisher,
            flags=Flags(self._mesh),
            host_requests=HostRequests(limits, arguments.checkpoint.save_minutes, lambda: manager.failing),
            due=Due(
                arguments.checkpoint,
                arguments.evaluation,
                arguments.previews,
                self._epochs,
                arguments.publish_every_steps,
                arguments.publish_every_epochs,
            ),
            anomalies=arguments.anomalies,
            distributions=arguments.distributions,
            lineage=self.lineage,
            saver=saver,
            evaluator=saver.evaluator,
            previewer=Previewer(self.previews, self.parameters_to_evaluate, self.info),
            resume=resume,
            diagnose=self._diagnose,
            prepare_batch=None if self._prepare_batch is None else functools.partial(self._prepare_batch, training=True),
            callbacks=self.callbacks,
            hooks=self,
            seconds=Seconds(),
            info=self.info,
            resumed_step=step,
            garbage=GarbageCollection(arguments.gc_every_steps),
            # A user's own manager need not know.
            broken=getattr(manager, "broken", lambda state: ()),
            infinite_parameters=lambda: getattr(manager, "infinite_parameters", None),
        )

    def _finish(self, loop: Loop, state: TrainState, reason: StopReason) -> TrainState:
        """Evaluates if training is complete, saves, and sets `output`."""
        host, saver, evaluator = runtime.current(), loop.saver, loop.evaluator
        # A run that is stopped continues later: without this checkpoint the steps since the last one would be lost.
        must_save = self.arguments.checkpoint.save_at_end or not reason.finished
        # Not twice: the loop may have evaluated at this very step.
        if reason.finished and evaluator.evaluated_step != self.info.global_step:
            host.phase("evaluate")
            state = evaluator.evaluate(state)
        if must_save:
            host.phase("save")
            saver.save(state, patient=True)  # after the evaluation, whose record keeps a later start from repeating it
        if loop.due.save_model(self.info.global_step):
            host.phase("save")
            saver.save_model(state, patient=True)
        host.phase("finish")
        with self.info.showing(state):
            saved = saver.finish(must_have_last=must_save)
        metrics = {
            **describe(state, saver.manager.fingerprint(state)),
            "train_loss": saver.reporter.latest.get("loss"),
            "train_metrics": of_task(saver.reporter.latest),
            "throughput": {name: saver.reporter.latest[name] for name in THROUGHPUT if name in saver.reporter.latest},
            "evaluation": dict(evaluator.final_metrics()),
            **self.lineage.meta(self.info.batch_index),
            **evaluator.final_metrics(),
        }
        if reason.finished:
            metrics["sample"] = next((preview["prompt"] + preview["text"] for preview in loop.previewer.generate(state)), None)
        # The state is saved by now: an error below costs no training.
        path = None if saved is None else saver.manager.path(saved)
        # Kept: `evaluate` and `save_pretrained` then need no state from the caller.
        self._state = state
        self.output = TrainerOutput(state, self._mesh, path, None if saved is None else str(saved), reason, metrics)
        self.dataloaders.dataloader_train.close()
        self._dataloaders = self._given_loaders = self._validation_units = None  # built again if this trainer is used again
        return state

    def _out_of_memory(self, error: BaseException) -> BaseException:
        """Returns an error that says what to do; `error` itself, if it came before the state's shapes were known."""
        if self._functions is None:
            return error
        program = getattr(self.functions.train_step_fn, "compiled", None)
        shapes = with_shardings(self._model_state, self._state_shardings)
        frozen = () if self._frozen is None else self._frozen.shapes
        used = memory.usage(shapes, self._step_batch_shapes(), program, frozen)
        message = memory.advice(error, used, self.arguments, dict(self._mesh.shape))
        return OutOfMemoryError(message, deterministic=self._loop is None or not self._loop.first_step_reported)

    def _diagnose(self, state: TrainState, batch: Any, step: int) -> str:
        """Returns where the loss or gradient of a batch stopped being finite, or why that was not found. All hosts must call
        this."""

        if self.has_own_step:
            return "where it began was not looked for: the train step is the user's own"

        def objective(params: Any, micro_batch: Any, number: Any, others: tuple[TrainState, Any]) -> jax.Array:
            state, frozen = others
            rest = self.loss_function.rest(state.model_state, micro_batch, state.batch_index, number, frozen)
            seen = parameters_seen(self.pruner, self.param_groups, dataclasses.replace(state, params=params))
            return self.loss_function(seen, micro_batch, state.step, rest=rest).loss_sum

        try:
            counters = dataclasses.replace(state, params=None, opt_state=None)
            origin = nonfinite.find(objective, self._mesh, state.params, batch, (counters, self.frozen))
        except StageError as error:
            return f"where it began was not found: {error}"
        return f"{origin}, with the parameters of step {step}"

    @cached_property
    def _observed(self) -> Observed:
        return Observed(self, self.callbacks, self.info)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_returns(cls, BaseTrainer)
        if cls.evaluate is not BaseTrainer.evaluate and not hasattr(cls.evaluate, IS_OBSERVED):
            cls.evaluate = observed(cls.evaluate)  # type: ignore[method-assign]

    @property
    def _has_own_evaluation(self) -> bool:
        """Whether a subclass measures by itself, and so needs no held-out data."""
        return not (type(self).evaluate is BaseTrainer.evaluate and type(self).eval is BaseTrainer.eval)

    def _measured(self, chosen: ValidationUnit | None, state: TrainState, unit: str | None) -> dict[str, float]:
        """Returns the means of a unit, by a subclass's own `eval` if there is one."""
        if type(self).eval is not BaseTrainer.eval:
            found = means(self.eval(state) if unit is None else self.eval(state, unit=unit))
            return {name: value for name, value in found.items() if name not in getattr(chosen, "rates", {})}
        return {} if chosen is None else chosen.evaluate(state)

    def _unit(self, name: str | None) -> tuple[str, ValidationUnit | None]:
        """Returns a unit and its name; None in a training without held-out data."""
        self._configure()
        units = self.validation_units
        if name is not None and name not in units:
            raise UsageError(f"unit = {name!r}: expected one of {', '.join(units) or 'no unit, for there is no held-out data'}")
        # A training may do without: its evaluations measure nothing.
        if not units and not self._observed.active and not self._has_own_evaluation:
            raise UsageError(f"evaluation: {NO_DATA}, or give dataset_eval")
        chosen = name or next(iter(units), DEFAULT_UNIT)
        return chosen, units.get(chosen)

    def _at(self, state: TrainState) -> None:
        """Tells hooks and callbacks at which step the state is that is evaluated."""
        if not self._is_training:  # then it is known, and the state may still be computed
            self.info.global_step = int(state.batch_index)
            self.info.epoch = self._epochs.at(self.info.global_step)

    def _keep(self, given: TrainState, returned: TrainState) -> None:
        """Keeps the current state, if that was evaluated, as the hooks returned it."""
        if given is self._state:
            self._state = returned

    def _current(self, state: TrainState | None) -> TrainState:
        state = state or self._state
        if state is None:
            raise NotConfiguredError("there is no state yet: call train first, or pass a state")
        return state

    def _no_sums(self) -> MetricSums:
        return self._zeros(self.step_layout)

    @property
    def _epochs(self) -> Epochs:
        size, loader = self.arguments.global_batch_size, None if self._dataloaders is None else self.dataloaders.dataloader_train
        if isinstance(loader, IteratedLoader):  # it need not read what `dataset_train` is
            return Epochs(0, size, lambda: loader.batches_of_epoch)
        return Epochs(len(self.dataset_train or ()), size)

    def _batches_of_data(self, loader: Any) -> int | None:
        """Returns the number of batches in `max_num_data_epochs`; None without it, or if only the loader finds its end."""
        if self.arguments.max_num_data_epochs is None or isinstance(loader, IteratedLoader):
            return None
        return self._batches_of_epochs or 0

    def _reason_of_end(self, loader: Any) -> StopReason:
        """Returns why training ends when the loader has no batch."""
        counts = isinstance(loader, IteratedLoader) and loader.can_begin_anew and self.arguments.max_num_data_epochs is not None
        return StopReason.MAX_EPOCHS if counts else StopReason.END_OF_DATA

    def _no_requests(self) -> jax.Array:
        return Flags(self._mesh).array()

    def _throughput(self) -> Throughput:
        flops = self._flops_per_token(self.task, num_parameters(self._model_state.params))
        peak = self.arguments.metrics.peak_flops_per_s
        kinds = {device.device_kind for device in self._mesh.devices.flat}
        # A mesh of several kinds of devices has no single peak, and so no MFU.
        if peak is None and len(kinds) == 1:
            peak = peak_flops_per_s(kinds.pop(), self.arguments.dtype)
        return Throughput(flops, self._mesh.devices.size, peak)
