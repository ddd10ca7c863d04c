"""One source of a mixture: where its records come from, and how often they are read. Free of JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gangway.config.section import too_small
from trainers.config.source import SourceConfig


@dataclass(frozen=True, kw_only=True)
class MixtureSource(SourceConfig):
    """A source of `data.mixture`."""

    name: str
    """The name in the metrics of the source: `loss/NAME`, `total_tokens/NAME`, `epoch/NAME`."""
    weight: float = 1.0
    """How many rows of the source there are for those of the others, in the proportions of all weights. 0: none."""
    weight_at: tuple[tuple[float, ...], ...] = ()
    """Later weights, as [step, weight]: from the batch of this step on, until the next one."""
    epochs: float | None = None
    """How often the source is read: after that it leaves, and the others share its rows. null: again and again."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            yield f"name = {self.name!r}: expected letters, digits, '.', '_' and '-', starting with a letter or digit"
        yield from too_small(self, 0, "weight")
        if self.epochs is not None and self.epochs <= 0:
            yield f"epochs = {self.epochs}: expected more than 0, or null"
        steps = [pair[0] for pair in self.weight_at if len(pair) == 2]
        if len(steps) < len(self.weight_at) or any(step < 1 or step % 1 for step in steps) or steps != sorted(set(steps)):
            yield (
                f"weight_at = {[list(pair) for pair in self.weight_at]}: expected pairs [step, weight], whose steps are integers "
                "from 1 on, each larger than the one before"
            )
        elif any(weight < 0 for _, weight in self.weight_at):
            yield f"weight_at = {[list(pair) for pair in self.weight_at]}: expected weights of at least 0"

    def weights(self) -> tuple[tuple[int, float], ...]:
        """Returns (step, weight from there on), from step 0 on."""
        return ((0, self.weight), *((int(step), weight) for step, weight in self.weight_at))

    def weight_of(self, step: int) -> float:
        return [weight for start, weight in self.weights() if start <= step][-1]


def problems(sources: tuple[MixtureSource, ...]) -> Iterator[str]:
    """Yields what is wrong with the sources together."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        yield f"mixture has the names {', '.join(names)}: expected each once"
    for step in sorted({step for source in sources for step, _ in source.weights()}):
        if not any(source.weight_of(step) for source in sources):
            yield f"mixture: all weights are 0 from step {step} on: give one source a weight"
