"""Runs the evaluations: measures the validation units, publishes their metrics, scores them, and shows previews."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from gangway.errors import UsageError
from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.evaluation.previews import Previews
from trainers.evaluation.score import ScoreKeeper
from trainers.evaluation.validation import DEFAULT_UNIT
from trainers.loop.hooks import HAS_DEFAULTS, Hooks
from trainers.runtime.multihost import StageError
from trainers.step.state import TrainState

IS_OBSERVED = "_is_observed"


@dataclass(frozen=True)
class LastEvaluation:
    step: int
    metrics: dict[str, float]
    """The metrics as they were published."""


@dataclass
class Observed:
    """Calls the hooks and the callbacks of evaluations, in training and outside of it. All hosts must call its methods alike."""

    hooks: Hooks
    callbacks: CallbackList
    info: RunInfo
    active: bool = False
    """Whether they are called already: an evaluation inside another one (in a hook, or in a user's `evaluate`) calls none."""

    def evaluate(
        self, state: TrainState, unit: str, measure: Callable[[TrainState], dict[str, float]]
    ) -> tuple[TrainState, dict[str, float]]:
        """Returns the state and the metrics, both of which a hook may replace."""
        state = self.begin(state, unit)
        with self._inside():
            metrics = measure(state)
        return self.end(state, unit, metrics) if metrics else (state, metrics)

    def begin(self, state: TrainState, unit: str) -> TrainState:
        with self._inside():
            self.callbacks.call(Callback.on_evaluate_begin, self.info, unit=unit)
            return self.hooks.on_evaluation_start(state)

    def end(self, state: TrainState, unit: str, metrics: dict[str, float]) -> tuple[TrainState, dict[str, float]]:
        with self._inside():
            state, metrics = self.hooks.on_evaluation_end(state, metrics)
            with self.info.showing(state):
                self.callbacks.call(Callback.on_evaluate, self.info, unit=unit, metrics=metrics)
        return state, metrics

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before


def observe_own(cls: type) -> None:
    """Makes a user's method `evaluate` call the hooks and callbacks of an evaluation."""
    owner = next(base for base in cls.__mro__ if "evaluate" in vars(base))
    if HAS_DEFAULTS not in vars(owner) and not hasattr(cls.evaluate, IS_OBSERVED):  # type: ignore[attr-defined]
        cls.evaluate = observed(cls.evaluate)  # type: ignore[attr-defined]


def observed(method: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Returns a user's method `evaluate` that calls the hooks and callbacks of an evaluation outside of training too. Inside of
    one, where they are called already, it is the method itself."""

    @functools.wraps(method)
    def evaluate(self: Any, state: TrainState | None = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.evaluations.observed.active:
            return method(self, state, *args, **kwargs)
        return self.evaluations.around(state, kwargs.get("unit"), lambda state: method(self, state, *args, **kwargs))

    vars(evaluate)[IS_OBSERVED] = True
    return evaluate


def means(found: Any) -> dict[str, float]:
    """Returns the means of what a user's `eval` yields: metrics by name for each batch, all of which count alike. Raises
    UsageError."""
    rows = [found] if isinstance(found, Mapping) else list(found)
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise UsageError(f"eval yields {type(wrong[0]).__name__}: expected metrics, a dict of numbers by name")
    names = dict.fromkeys(name for row in rows for name in row)
    by_name = {name: [row[name] for row in rows if name in row] for name in names}
    try:
        return {name: sum(map(float, values)) / len(values) for name, values in by_name.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(f"eval yields what is no number ({error}): expected a dict of numbers by name") from error


@dataclass
class Evaluator:
    """All hosts must call its methods alike."""

    measure: Callable[..., dict[str, float]]
    """The trainer's `evaluate`: (state, unit=NAME) -> means over the held-out data of that unit."""
    units: Sequence[str]
    """The names of the validation units. `measure(state)`, without a unit, measures the first."""
    observed: Observed
    score: ScoreKeeper
    rates_of: Callable[[str], Mapping[str, float]] = lambda unit: {}
    """How long the last evaluation of a unit took, and its rates."""
    last: LastEvaluation | None = None
    """The last evaluation before the present state, also if a checkpoint restored it."""
    evaluated_step: int | None = None
    """The step of the last call of `evaluate`, even if that call measured nothing."""

    @property
    def wants_stop(self) -> bool:
        """Whether the score asks for an early stop; the same on all hosts."""
        return self.score.wants_stop

    def evaluate(self, state: TrainState) -> TrainState:
        """Measures all units, publishes the results and scores them. Returns the state, which a hook may replace."""
        step, metrics, rates = self.observed.info.global_step, {}, {}
        # Before anything is measured: an evaluation that measures nothing must not be due again at once.
        self.evaluated_step = step
        for name in tuple(self.units) or (DEFAULT_UNIT,):  # a trainer that overrides `evaluate` may have no units
            state, unit_metrics = self._evaluate_unit(state, name)
            metrics.update({f"{name}_{metric}": value for metric, value in unit_metrics.items()})
            rates.update({f"{name}_{rate}": value for rate, value in self.rates_of(name).items()})
        if not metrics:
            return state
        metrics.update(self.score.add(step, metrics))
        self.last = LastEvaluation(step, metrics)
        if jax.process_index() == 0:
            # The rates are published only: neither a score nor a checkpoint may depend on a clock.
            runtime.current().emit({"ev": "metrics", "step": step, "metrics": metrics | rates, "seconds": {}, "kind": "eval"})
        return state

    def meta(self) -> dict[str, Any]:
        """Returns what a checkpoint records about the evaluations up to its step."""
        return {
            "evaluation": None if self.last is None else dataclasses.asdict(self.last),
            "scores": self.score.meta(),
        }

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Restores what `meta` returned; resets everything if it is empty."""
        self.last = LastEvaluation(**meta["evaluation"]) if meta.get("evaluation") else None
        # The checkpoint has the evaluation of its step: it is not measured a second time.
        self.evaluated_step = None if self.last is None else self.last.step
        self.score.go_back(meta.get("scores"))

    def final_metrics(self) -> dict[str, Any]:
        """Returns the metrics of the last evaluation, and the best score with its step."""
        metrics: dict[str, Any] = {} if self.last is None else dict(self.last.metrics)
        if self.score.scores.best is not None:
            metrics.update({"best_score": self.score.scores.best, "best_score_step": self.score.scores.best_step})
        return metrics

    def _evaluate_unit(self, state: TrainState, name: str) -> tuple[TrainState, dict[str, float]]:
        is_first = name == next(iter(self.units), name)
        # The first unit is measured without its name: a user's override `evaluate(self, state)` need not take a unit.
        measure = self.measure if is_first else functools.partial(self.measure, unit=name)
        return self.observed.evaluate(state, name, measure)


@dataclass
class Previewer:
    """All hosts must call its methods alike."""

    previews: Previews | None
    """None: there are no prompts, or the task generates nothing."""
    parameters_of: Callable[[TrainState], Any]
    """Returns the parameters to generate with: those that are evaluated and exported."""
    info: RunInfo

    def show(self, state: TrainState) -> None:
        """Generates the texts; host 0 sends them as an event."""
        # On all hosts, for generating is a collective; host 0 alone reports.
        previews = self.generate(state)
        if previews and jax.process_index() == 0:
            runtime.current().emit({"ev": "preview", "step": self.info.global_step, "previews": previews})

    def generate(self, state: TrainState) -> list[dict[str, str]]:
        """Returns `prompt` and `text` of each preview. Empty if there is nothing to show, or if generation failed."""
        host = runtime.current()
        if self.previews is None:
            return []
        # A phase of its own: the watchdog must not take a long generation for a step that hangs.
        host.phase("preview")
        try:
            return self.previews(self.parameters_of(state), self.info.global_step, state.model_state)
        except StageError as error:  # raised on all hosts alike
            if jax.process_index() == 0:
                host.note(f"no previews at step {self.info.global_step}: {error}")
            return []
