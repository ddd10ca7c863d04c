"""The evaluations of a trainer, in training and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gangway.errors import NotConfiguredError, UsageError
from trainers.evaluation.validation import DEFAULT_UNIT, NO_DATA, ValidationUnit
from trainers.loop.evaluator import Observed, means
from trainers.loop.hooks import overrides
from trainers.step.state import TrainState
from trainers.trainer.assembly import assemble

Metrics = dict[str, float]


class Evaluations:
    """Measures validation units, and calls the hooks and callbacks of an evaluation around it."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.observed = Observed(trainer, trainer.callbacks, trainer.info)
        self.in_training = False
        """Whether `train` is running: then it is known at which step the state is, which may still be computed."""

    @property
    def are_own(self) -> bool:
        """Whether a subclass measures by itself, and so needs no held-out data."""
        return overrides(self._trainer, "evaluate") or overrides(self._trainer, "eval")

    def evaluate(
        self, state: TrainState | None, unit: str | None, metric_calculator: Callable[[Metrics], Metrics] | None
    ) -> Metrics:
        """Does what `BaseTrainer.evaluate` does."""

        def measure(state: TrainState) -> Metrics:
            metrics = self._means(chosen, state, unit)
            metrics = self._trainer.calculate_metrics(metrics, name) if metrics else {}
            return metrics if metric_calculator is None else {**metrics, **metric_calculator(metrics)}

        name, chosen = self._unit(unit)
        given = self.current(state)
        # In training the evaluator calls the hooks, whatever a subclass makes of this method.
        return measure(given) if self.observed.active else self._observe(given, name, measure)

    def around(self, state: TrainState | None, unit: str | None, measure: Callable[[TrainState], Metrics]) -> Metrics:
        """Returns what `measure`, a subclass's own `evaluate`, returns, with the hooks and callbacks around it."""
        name = unit or next(iter(assemble(self._trainer).units), DEFAULT_UNIT)
        return self._observe(self.current(state), name, measure)

    def batches(self, state: TrainState | None, unit: str | None) -> Iterator[Metrics]:
        """Does what `BaseTrainer.eval` does."""
        name, chosen = self._unit(unit)
        given = self.current(state)

        def batches() -> Iterator[Metrics]:
            if chosen is None:
                return
            if self.observed.active:  # a subclass's own `eval` calls this one in an evaluation
                yield from chosen.eval(given)
                return
            self._at(given)
            state = self.observed.begin(given, name)
            metrics = yield from chosen.eval(state)
            state, _ = self.observed.end(state, name, self._trainer.calculate_metrics(metrics, name))
            self._keep(given, state)

        return batches()

    def current(self, state: TrainState | None) -> TrainState:
        """Returns the state; that of the last training for None. Raises NotConfiguredError if there is none."""
        state = state or self._trainer.state
        if state is None:
            raise NotConfiguredError("there is no state yet: call train first, or pass a state")
        return state

    def _keep(self, given: TrainState, returned: TrainState) -> None:
        """Keeps the current state, if that was evaluated, as the hooks returned it."""
        if given is self._trainer.state:
            self._trainer.state = returned

    def _observe(self, given: TrainState, name: str, measure: Callable[[TrainState], Metrics]) -> Metrics:
        self._at(given)
        returned, metrics = self.observed.evaluate(given, name, measure)
        self._keep(given, returned)
        return metrics

    def _means(self, chosen: ValidationUnit | None, state: TrainState, unit: str | None) -> Metrics:
        """Returns the means of a unit, by a subclass's own `eval` if there is one."""
        if overrides(self._trainer, "eval"):
            found = means(self._trainer.eval(state) if unit is None else self._trainer.eval(state, unit=unit))
            return {name: value for name, value in found.items() if name not in getattr(chosen, "rates", {})}
        return {} if chosen is None else chosen.evaluate(state)

    def _unit(self, name: str | None) -> tuple[str, ValidationUnit | None]:
        """Returns a unit and its name; None in a training without held-out data."""
        units = assemble(self._trainer).units
        if name is not None and name not in units:
            raise UsageError(f"unit = {name!r}: expected one of {', '.join(units) or 'no unit, for there is no held-out data'}")
        # A training may do without: its evaluations measure nothing.
        if not units and not self.observed.active and not self.are_own:
            raise UsageError(f"evaluation: {NO_DATA}, or give dataset_eval")
        chosen = name or next(iter(units), DEFAULT_UNIT)
        return chosen, units.get(chosen)

    def _at(self, state: TrainState) -> None:
        """Tells hooks and callbacks at which step the state is that is evaluated."""
        if not self.in_training:
            info = self._trainer.info
            info.global_step = int(state.batch_index)
            info.epoch = self._trainer.assembly.epochs.at(info.global_step)
