"""The trainer most users want, and the one to subclass.

What it is made of is in `builder.py`; what may change its course, in `hooks.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from trainers import agree, runtime
from trainers import mesh as meshes
from trainers.anomalies import Decision
from trainers.bag import Bag
from trainers.builder import Builder
from trainers.callbacks import Callback
from trainers.checkpoints import save_to
from trainers.checks import parse_duration_s
from trainers.errors import NotConfiguredError, SaveFailedError
from trainers.loop import Loop
from trainers.metrics import Publisher, Seconds, Throughput, with_perplexity
from trainers.protocol import TrainerOutput
from trainers.results import describe
from trainers.resume import Resume, known_lineage
from trainers.state import TrainState, num_parameters, with_shardings
from trainers.stop_reason import StopReason
from trainers.wishes import Flags, Limits, Wishes


class BaseTrainer(Builder):
    """Trains a task's model on random-access datasets. Conforms to `trainers.protocol.TrainerProtocol`.

    Building one touches no device: a standby process does it, and `prepare`, before its host has joined the gang.
    All hosts must call `train`, `evaluate`, `eval` and `save_pretrained` alike.
    """

    _last_evaluation: tuple[int, dict[str, float]] | None = None
    _latest_metrics: dict[str, float] = {}  # noqa: RUF012 - replaced, never written into
    """Of the last publish, if need be the last before the checkpoint that was restored."""

    def train(self, model_parameters: Any = None, state: TrainState | None = None) -> TrainState:
        """Starts or resumes; returns the final state and sets `output`. Raises on any failure; a stop is not one."""
        try:
            return self._train(model_parameters, state)
        except BaseException as error:
            self.callbacks.call(Callback.on_exception, self.info, error=error)
            raise

    def evaluate(
        self, state: TrainState | None = None, metric_calculator: Callable[[dict[str, float]], dict[str, float]] | None = None
    ) -> dict[str, float]:
        """Means over the whole held-out set (or `evaluation.max_batches` of it), each example counted once.

        `metric_calculator` gets the means and returns further metrics. Empty if there is no held-out data.
        """
        state, layout = self._current(state), self.loss_layout
        bag = self._zeros(layout)
        for batch in self._eval_batches():
            bag = self.functions.eval_step_fn(state, bag, batch)
        metrics = with_perplexity(layout.read(np.asarray(bag))) if self.dataset_eval is not None else {}
        if metric_calculator is not None:
            metrics.update(metric_calculator(metrics))
        return metrics

    def eval(self, state: TrainState | None = None) -> Iterator[dict[str, float]]:
        """Yields the metrics of each held-out batch."""
        state = self._current(state)
        for batch in self._eval_batches():
            yield with_perplexity(
                self.loss_layout.read(np.asarray(self.functions.eval_step_fn(state, self._zeros(self.loss_layout), batch)))
            )

    def save_pretrained(self, ckpt_path: str, state: TrainState | None = None) -> str:
        """Writes parameters, optimizer state, arguments and all else of `state` (None: the current one) to the folder
        `ckpt_path`, which must not exist. Returns the path; `trainers.checkpoints.load_from` reads it back."""
        state = self._current(state)
        save_to(ckpt_path, state, self._meta())
        return ckpt_path

    # ------------------------------------------------------------------ inside

    def _train(self, model_parameters: Any, state: TrainState | None) -> TrainState:
        host = runtime.current()
        started_s = time.monotonic()
        self._configure()
        host.phase("restore")
        self.lineage = known_lineage(self._run_folder, host.skip_batches)
        self._resume = self._build_resume()
        state = self._starting_state(model_parameters, state)
        host.phase("compile")
        self._compile(state)
        loop = self._build_loop(int(state.batch_index), started_s)
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
            return resume.begin_with(jax.device_put(state, places))
        if model_parameters is not None:
            fresh = jax.jit(self._fresh_state, out_shardings=places)
            return resume.begin_with(fresh(jax.device_put(model_parameters, places.params)))
        state = resume.newest()
        self._latest_metrics = resume.metrics
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
        self._latest_metrics = self._resume.metrics
        return found

    def _compile(self, state: TrainState) -> None:
        """Compiles (or loads) the train step and what saving needs, so that no step has to wait for it."""
        self.functions.checkpoint_manager.prepare(state)
        shape = (self.arguments.accumulation_steps, meshes.padded_rows(self._mesh, self.arguments.micro_batch_size))
        batch = self._batch_shapes(shape, sharding=meshes.micro_batches(self._mesh))
        self.functions.train_step_fn.prepare(state, self._empty_bag(), batch, self._no_wishes())

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
            empty_bag=self._empty_bag,
            publisher=publisher,
            flags=Flags(self._mesh),
            wishes=Wishes(limits, arguments.checkpoint.save_minutes, lambda: manager.failing),
            checkpoint=arguments.checkpoint,
            evaluation=arguments.evaluation,
            anomalies=arguments.anomalies,
            lineage=self.lineage,
            save=self._save,
            evaluate=self._evaluate_and_publish,
            go_back=self._go_back,
            callbacks=self.callbacks,
            hooks=self,
            seconds=Seconds(),
            info=self.info,
            samples_per_epoch=len(self.dataset_train or ()),
            resumed_step=step,
            saved=self._saved,
        )

    def _finish(self, state: TrainState, reason: StopReason) -> TrainState:
        host, manager, step = runtime.current(), self.functions.checkpoint_manager, self.info.global_step
        wanted = self.arguments.checkpoint.save_at_end or not reason.finished
        if wanted:
            host.phase("save")
            self._save(state)
        if reason.finished and (self._last_evaluation is None or self._last_evaluation[0] != step):
            host.phase("evaluate")
            state = self._evaluate_and_publish(state)
        host.phase("finish")
        manager.wait()
        if wanted and not agree.every_host("saved at the end", manager.last_saved_step == step):
            raise SaveFailedError(f"training is over, but the checkpoint of its last step, {step}, could not be saved")
        saved = agree.from_host0("last checkpoint", manager.last_saved_step)
        path = None if saved is None else manager.path(saved)
        metrics = self._final_metrics(state)
        if reason.finished:
            metrics["sample"] = self._sample(state)
        self._state = state
        self.output = TrainerOutput(state, self._mesh, path, None if saved is None else str(saved), reason, metrics)
        self.dataloaders.dataloader_train.close()
        self._dataloaders = None  # made anew if this trainer goes on
        return state

    def _final_metrics(self, state: TrainState) -> dict[str, Any]:
        metrics = describe(state, self.functions.checkpoint_manager.fingerprint(state))
        metrics["train_loss"] = self._latest_metrics.get("loss")
        metrics.update(self.lineage.meta(self.info.batch_index))
        if self._last_evaluation is not None:
            metrics.update({f"eval_{name}": value for name, value in self._last_evaluation[1].items()})
        return metrics

    def _sample(self, state: TrainState) -> str | None:
        """A text that the model generates, if its task can; a look at what was learnt, never a reason to fail."""
        config = self.arguments.sample
        generate = getattr(self.task, "sample", None)
        if generate is None or not config.prompt:
            return None
        return generate(self.model.merge(state.params), config.prompt, config.num_tokens, config.temperature, self.arguments.seed)

    def _save(self, state: TrainState) -> None:
        step, manager = self.info.batch_index, self.functions.checkpoint_manager
        manager.wait()
        if step == manager.last_saved_step:
            return  # `saving` would be told, and never `saved`
        runtime.current().emit("saving", step=step)
        manager.save(step, state, self._meta())

    def _meta(self) -> dict[str, Any]:
        return {
            "batch_index": self.info.batch_index,
            "seed": self.arguments.seed,
            **self.lineage.meta(self.info.batch_index),
            "metrics": self._latest_metrics,
            "arguments": dataclasses.asdict(self.arguments),
        }

    def _evaluate_and_publish(self, state: TrainState) -> TrainState:
        """Returns the state, which a hook may replace."""
        self.callbacks.call(Callback.on_evaluate_begin, self.info)
        state = self.on_evaluation_start(state)
        if not (metrics := self.evaluate(state)):
            return state
        state, metrics = self.on_evaluation_end(state, metrics)
        self._last_evaluation = (self.info.global_step, metrics)
        self.callbacks.call(Callback.on_evaluate, self.info, metrics=metrics)
        if jax.process_index() == 0:
            named = {f"eval_{name}": value for name, value in metrics.items()}
            runtime.current().emit("metrics", step=self.info.global_step, metrics=named, seconds={})
        return state

    def _publish(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        metrics["epoch"] = self.info.epoch
        self._latest_metrics = metrics
        self.callbacks.call(Callback.on_publish, self.info, step=step, metrics=metrics, seconds=seconds)
        if jax.process_index() == 0:
            runtime.current().emit("metrics", step=step, metrics=metrics, seconds=seconds)

    def _eval_batches(self) -> Iterator[Any]:
        self._configure()
        loader = self.dataloaders.dataloader_eval
        if loader is not None:
            limit = self.arguments.evaluation.max_batches
            yield from itertools.islice(loader.epoch(), limit)

    def _current(self, state: TrainState | None) -> TrainState:
        state = state or self._state
        if state is None:
            raise NotConfiguredError("there is no state yet: call train first, or pass a state")
        return state

    def _empty_bag(self) -> Bag:
        return self._zeros(self.step_layout)

    def _no_wishes(self) -> jax.Array:
        return Flags(self._mesh).array()

    def _throughput(self) -> Throughput:
        flops = self.task.flops_per_token(num_parameters(self._model_state.params))
        return Throughput(self.arguments.global_batch_size, flops, self._mesh.devices.size)
