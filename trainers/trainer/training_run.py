"""One training of a trainer: it restores or begins, compiles, runs the loop, and finishes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax

from gangway.config.section import parse_duration_s
from gangway.errors import OutOfMemoryError, UsageError
from gangway.published import of_task
from trainers import runtime
from trainers.callbacks import Callback
from trainers.checkpoint import assets
from trainers.config.arguments import TrainingArguments, recorded_arguments
from trainers.data.iterated_loader import IteratedLoader
from trainers.data.loader import HasNotes, TellsNumbers
from trainers.diagnostics import memory, nonfinite
from trainers.evaluation.score import ScoreKeeper
from trainers.evaluation.validation import lacks_data
from trainers.loop import lineage, snapshots
from trainers.loop.agreement import Agreement, HostRequests, Limits
from trainers.loop.beginning import Beginning
from trainers.loop.evaluator import Evaluator, Previewer
from trainers.loop.guard import Guard
from trainers.loop.metrics_reporter import MetricsReporter
from trainers.loop.restore import Resume
from trainers.loop.results import describe
from trainers.loop.saver import DataState, Saver, TimeUsed
from trainers.loop.snapshots import Snapshots
from trainers.loop.train_loop import GarbageCollection, Loop, Steps
from trainers.loop.triggers import Due, EndOfData
from trainers.metrics import histograms
from trainers.metrics.peak_flops import fp8_peak_flops_per_s, peak_flops_per_s
from trainers.metrics.publisher import THROUGHPUT, Publisher, Throughput
from trainers.models.remat import choosing
from trainers.protocol import CheckpointManagerProtocol, StopReason, TrainerOutput
from trainers.runtime import multihost
from trainers.runtime.multihost import StageError, note_from_host0
from trainers.step.state import TrainState
from trainers.step.train_step import parameters_seen
from trainers.trainer.beginnings import beginning
from trainers.trainer.build import Parts, forget_loaders

if TYPE_CHECKING:  # it imports this module
    from trainers.trainer.base_trainer import BaseTrainer


class TrainingRun:
    """Trains with the parts of a trainer. All hosts must call its methods alike."""

    def __init__(self, trainer: BaseTrainer, parts: Parts, time_used: TimeUsed):
        self.trainer, self.parts = trainer, parts
        self.arguments, self.info, self.callbacks = trainer.arguments, trainer.info, trainer.callbacks
        self._time_used = time_used
        self.loop: Loop | None = None
        """None until the run is restored and compiled."""

    @property
    def manager(self) -> CheckpointManagerProtocol:
        return self.parts.steps.functions.checkpoint_manager

    def train(self, model_parameters: Any, state: TrainState | None) -> TrainState:
        """Does what `BaseTrainer.train` does."""
        host, trainer, frozen = runtime.current(), self.trainer, self.parts.placement.frozen
        no_units = not self.parts.units and not trainer.evaluations.are_own
        if no_units and (problem := lacks_data(self.arguments.evaluation)):
            note_from_host0(problem)
        host.phase("restore")
        # Before the restore: a checkpoint that was trained on a skipped batch must be refused.
        trainer.lineage = lineage.initial(self.arguments.run_folder, host.skip_batches)
        resume = self.build_resume(beginning(trainer, model_parameters, state))
        if self.arguments.snapshot.num_slots:
            snapshots.check(self.arguments.snapshot, self._train_step, self.manager, resume.abstract)
        # Loads kept programs on another thread while this one reads the checkpoint; first those that restoring itself needs.
        self.manager.load_ahead(resume.abstract)
        self._train_step.load_ahead(*self._step_arguments(resume.abstract))
        if frozen is not None:
            frozen.begin()  # on a thread too
        state = resume.newest()
        # Before the assets are kept: those of another tokenizer would take the places of the run's own.
        is_shared = getattr(self.parts.loaders.dataloader_train, "is_shared", True)
        self.parts.batching.identity.check(resume.meta, host.note, is_shared=is_shared)
        self._finish_frozen(resume.meta)
        self._keep_assets()
        if isinstance(trainer.dataset_train, HasNotes) and not resume.meta:
            for line in trainer.dataset_train.notes():
                note_from_host0(line)
        self.saver.restore(resume.meta)
        self._time_used.resume(resume.meta)
        # A loader of the user's own need not know. Beside the compilation, which takes longer.
        if begin := getattr(self.parts.loaders.dataloader_train, "begin", None):
            begin(int(state.batch_index))
        host.phase("compile")
        # After the restore: the kept executables were loaded meanwhile.
        self.compile(state)
        self.loop = loop = self.build_loop(resume, int(state.batch_index))
        if not resume.meta:  # what was restored could be saved
            loop.tried = self.saver.begin_trial(resume.abstract)
        if self.arguments.checkpoint.saves and loop.agreement.requests.limits.reached(self.info) is None:
            self.saver.wait_for_room(resume.abstract)
        self.callbacks.call(Callback.on_train_begin, self.info)
        state = trainer.on_training_start(state)
        host.phase("train")
        with loop.garbage:
            state, reason = loop.run(state)
        if loop.snapshots is not None:
            loop.snapshots.close()
        state = self.finish(loop, trainer.on_training_end(state), reason)
        self.callbacks.call(Callback.on_train_end, self.info)
        self.manager.close()  # only now: a callback may have read an old checkpoint until here
        return state

    def compile(self, state: TrainState) -> None:
        """Compiles (or loads) the train step and the programs for saving, so that no step has to wait for them. `state` may be
        shapes with shardings."""
        self.manager.prepare(state)
        self._train_step.prepare(*self._step_arguments(state))

    def out_of_memory(self, error: BaseException) -> BaseException:
        """Returns an error that says what to do."""
        made, program = self.parts.placement, getattr(self._train_step, "compiled", None)
        used = memory.usage(made.placed_state, made.step_batch_shapes(), program, made.frozen_shapes)
        message = memory.advice(error, used, self.arguments, dict(self.parts.placement.mesh.shape))
        return OutOfMemoryError(message, deterministic=self.loop is None or not self.loop.first_step_reported)

    # ------------------------------------------------------------------ its objects

    def build_resume(self, first: Beginning) -> Resume:
        """Builds what finds the state to go on from; `first` is where a new run begins."""
        mesh = self.parts.placement.mesh
        gang = {"num_hosts": jax.process_count(), "num_devices": mesh.devices.size, "mesh": dict(mesh.shape)}
        folder, abstract = self.arguments.run_folder, self.parts.placement.placed_state
        memory = snapshots.memory_of_run(folder, self.arguments.snapshot)
        return Resume(folder, self.manager, abstract, first, gang, self.trainer.lineage, memory=memory)

    def _snapshots(self, shapes: TrainState) -> Snapshots | None:
        def prepare() -> Any:
            program = self._train_step.keeping()
            program.prepare(*self._step_arguments(shapes))
            return program

        folder, recorded = self.arguments.run_folder, recorded_arguments(self.arguments)
        return snapshots.of_run(folder, self.arguments.snapshot, recorded, self.trainer, shapes, prepare)

    def build_loop(self, resume: Resume, step: int) -> Loop:
        """Builds the loop that goes on from `step`."""
        arguments, parts, saver = self.arguments, self.parts, self.saver
        loader, manager, epochs = parts.loaders.dataloader_train, self.manager, self.parts.batching.epochs
        self.info.global_step = step
        publisher = Publisher(self._throughput(), parts.steps.step_layout, saver.reporter.report)
        due = Due(
            arguments.checkpoint,
            arguments.evaluation,
            arguments.previews,
            epochs,
            arguments.publish_every_steps,
            arguments.publish_every_epochs,
        )
        limits = HostRequests(self._limits(), arguments.checkpoint.save_minutes, lambda: manager.failing)
        # A user's own loader need not know where its data ends.
        end_of_data = EndOfData(getattr(loader, "ends", None), reason=self._reason_of_end(loader))
        no_sums = partial(parts.placement.zeros, parts.steps.step_layout)
        prepare_batch, taken = parts.batching.prepare_trained, self._snapshots(resume.abstract)
        whole: Any = tuple if taken is None else lambda: (taken.newest,)
        return Loop(
            info=self.info,
            steps=Steps(self._train_step, parts.steps.step_layout, no_sums, arguments.distributions, prepare_batch),
            loader=loader,
            agreement=Agreement(parts.placement.flags(), limits, end_of_data, whole=whole),
            guard=self._guard(),
            due=due,
            saver=saver,
            evaluator=saver.evaluator,
            previewer=Previewer(parts.previews, parts.design.evaluated_parameters, self.info),
            publisher=publisher,
            resume=resume,
            hooks=self.trainer,
            callbacks=self.callbacks,
            garbage=GarbageCollection(arguments.gc_every_steps),
            snapshots=taken,
        )

    def _guard(self) -> Guard:
        manager, prepare_batch = self.manager, self.parts.batching.prepare_trained

        def diagnose(state: TrainState, batch_index: int) -> str:
            batch = self.parts.loaders.dataloader_train.batch(batch_index)
            prepared = batch if prepare_batch is None else prepare_batch(state, batch)
            return self._diagnose(state, prepared, self.info.batch_index)

        return Guard(
            self.arguments.anomalies,
            self.trainer.lineage,
            diagnose,
            # A user's own manager need not know.
            broken=getattr(manager, "broken", lambda state: ()),
            infinite_parameters=lambda: getattr(manager, "infinite_parameters", None),
        )

    @cached_property
    def saver(self) -> Saver:
        """Saves the state, with what a checkpoint records beside it: the published metrics, and the evaluations."""
        trainer, parts, frozen = self.trainer, self.parts, self.parts.placement.frozen
        evaluator = Evaluator(
            trainer.evaluate,
            tuple(parts.units),
            trainer.evaluations.observed,
            ScoreKeeper(self.arguments.evaluation.score, trainer.build_early_stopper()),
            lambda name: getattr(parts.units.get(name), "rates", {}),
        )
        return Saver(
            self.manager,
            self.arguments.seed,
            recorded_arguments(self.arguments),
            self.info,
            trainer.lineage,
            self._build_reporter(),
            evaluator,
            self.callbacks,
            trainer.built.committed,
            self._time_used,
            DataState(parts.loaders.dataloader_train, self.arguments.global_batch_size, note_from_host0),
            lambda: {} if frozen is None else frozen.origins,
            self.parts.batching.identity.recorded,
        )

    def _build_reporter(self) -> MetricsReporter:
        data, size = self.trainer.dataset_train, self.arguments.global_batch_size
        epochs, devices = self.parts.batching.epochs, self.parts.placement.mesh.local_devices
        names = histograms.chosen(self.parts.design.state.params, self.arguments.distributions)
        made = MetricsReporter(self.callbacks, self.info, epochs, devices, names)
        if isinstance(data, TellsNumbers):
            made.once, made.data_numbers = data.numbers(), lambda step: data.numbers_at(step * size)
        return made

    def _limits(self) -> Limits:
        arguments, time_used = self.arguments, self._time_used
        limit_s = None if arguments.time_limit is None else parse_duration_s(arguments.time_limit)
        return Limits(
            max_steps=arguments.max_num_steps,
            max_batches=self._batches_of_data(),
            stop_at=runtime.current().stop_at,
            time_is_up=limit_s is not None and time_used.before_s >= limit_s,
            deadline_s=None if limit_s is None else time_used.deadline_s(limit_s),
        )

    def _batches_of_data(self) -> int | None:
        """Returns the number of batches in `max_num_data_epochs`; None without it, or if only the loader finds its end."""
        loader = self.parts.loaders.dataloader_train
        if self.arguments.max_num_data_epochs is None or isinstance(loader, IteratedLoader):
            return None
        return self.parts.design.batches_of_epochs or 0

    def _reason_of_end(self, loader: Any) -> StopReason:
        """Returns why training ends when the loader has no batch."""
        counts = isinstance(loader, IteratedLoader) and loader.can_begin_anew and self.arguments.max_num_data_epochs is not None
        return StopReason.MAX_EPOCHS if counts else StopReason.END_OF_DATA

    def _throughput(self) -> Throughput:
        design, mesh = self.parts.design, self.parts.placement.mesh
        flops, tokens = design.flops_per_token(self.trainer.task, design.num_parameters), self.trainer.task.tokens_per_example
        return Throughput(
            flops, tokens, mesh.devices.size, *peaks(self.arguments, {device.device_kind for device in mesh.devices.flat})
        )

    @property
    def _train_step(self) -> Any:
        return self.parts.steps.functions.train_step_fn

    def _step_arguments(self, state: TrainState) -> tuple[Any, ...]:
        """Returns what the train step is compiled for. `state` may be shapes."""
        placement = self.parts.placement
        sums, batch = placement.zeros(self.parts.steps.step_layout), placement.step_batch_shapes()
        return state, sums, batch, placement.flags().array()

    # ------------------------------------------------------------------ beginning, trouble and end

    def _finish_frozen(self, meta: dict[str, Any]) -> None:
        """Waits for the frozen weights. `meta` is that of the restored checkpoint, which must have been trained with them."""
        frozen = self.parts.placement.frozen
        if frozen is None:
            return
        frozen.check(meta)
        frozen.finish(record=True)
        for line in frozen.said() if not meta else ():
            note_from_host0(line)

    def _keep_assets(self) -> None:
        """Writes the model's assets to the run's folder. Raises UsageError, on all hosts, if one of them cannot be written."""
        problem = ""
        if jax.process_index() == 0:
            try:
                assets.keep(self.arguments.run_folder, self.trainer.model_assets)
            except UsageError as error:
                problem = str(error)
            except OSError as error:  # training is worth more, and the next start tries again
                runtime.current().note(f"the model's assets could not be written: {error}; the next start tries again")
        if problem := multihost.from_host0("assets", problem):
            raise UsageError(problem)

    def _diagnose(self, state: TrainState, batch: Any, step: int) -> str:
        """Returns where the loss or gradient of a batch stopped being finite, or why that was not found."""
        if self.parts.steps.is_own:
            return "where it began was not looked for: the train step is the user's own"
        design, loss = self.parts.design, self.parts.design.loss

        def objective(params: Any, micro_batch: Any, number: Any, others: tuple[TrainState, Any]) -> jax.Array:
            state, frozen = others
            rest = loss.rest(state.model_state, micro_batch, state.batch_index, number, frozen)
            seen = parameters_seen(design.pruner, design.groups, dataclasses.replace(state, params=params))
            return loss(seen, micro_batch, state.step, rest=rest).loss_sum

        try:
            counters = dataclasses.replace(state, params=None, opt_state=None)
            # With the memory of the step that has run.
            traced = choosing(objective, getattr(self._train_step, "policy", "none"))
            origin = nonfinite.find(traced, self.parts.placement.mesh, state.params, batch, (counters, self.trainer.frozen))
        except StageError as error:
            return f"where it began was not found: {error}"
        return f"{origin}, with the parameters of step {step}"

    def finish(self, loop: Loop, state: TrainState, reason: StopReason) -> TrainState:
        """Evaluates if training is complete, saves, and sets the trainer's `output`."""
        host, saver, evaluator = runtime.current(), self.saver, self.saver.evaluator
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
            saved = saver.finish(state if must_save else None)
        metrics = self._final_metrics(state)
        if reason.finished:
            metrics["sample"] = next((preview["prompt"] + preview["text"] for preview in loop.previewer.generate(state)), None)
        # The state is saved by now: an error below costs no training.
        path = None if saved is None else saver.manager.path(saved)
        name = None if saved is None else str(saved)
        # Kept: `evaluate` and `save_pretrained` then need no state from the caller.
        self.trainer.state = state
        limit = self.arguments.max_num_steps
        if reason is StopReason.END_OF_DATA and limit is not None:
            note_from_host0(f"the data ended after {self.info.global_step} steps: max_num_steps = {limit} was not reached")
        self.trainer.output = TrainerOutput(state, self.parts.placement.mesh, path, name, reason, metrics)
        self.parts.loaders.dataloader_train.close()
        forget_loaders(self.trainer)
        return state

    def _final_metrics(self, state: TrainState) -> dict[str, Any]:
        latest, evaluation = self.saver.reporter.latest, self.saver.evaluator.final_metrics()
        return {
            **describe(state, self.manager.fingerprint(state)),
            "train_loss": latest.get("loss"),
            "train_metrics": of_task(latest),
            "throughput": {name: latest[name] for name in THROUGHPUT if name in latest},
            "evaluation": dict(evaluation),
            **self.trainer.lineage.meta(self.info.batch_index),
            **evaluation,
        }


def peaks(arguments: TrainingArguments, kinds: Collection[str]) -> tuple[float | None, float | None]:
    """Returns the peaks of one device, of these kinds, that `mfu` and `mfu_of_fp8_peak` are shares of; None: there is none."""
    given, in_fp8 = arguments.metrics.peak_flops_per_s, arguments.model.fp8 != "none"
    # A mesh of several kinds of devices has no single peak, and so no MFU.
    if len(kinds) != 1:
        return given, None
    (kind,) = kinds
    # By the peak of bfloat16 also with products of 8 bits: so runs compare with each other, and with what others publish.
    known = peak_flops_per_s(kind, "bfloat16" if in_fp8 else arguments.dtype)
    return known if given is None else given, fp8_peak_flops_per_s(kind) if in_fp8 else None
