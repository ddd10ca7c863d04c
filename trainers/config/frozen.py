"""The sections `frozen` and `lora` of the configuration: weights that a run reads, and never changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gangway.config.conversion import CheckedSection
from gangway.config.section import Section, not_positive, require_none, too_small

BASE = "base"
"""The name of the frozen weights that LoRA adapts, among those of `frozen`."""


@dataclass(frozen=True, kw_only=True)
class FrozenConfig(Section):
    """The weights of another model that a loss needs: a reference policy, a teacher. `NAME: PATH` is short for
    `NAME: {path: PATH}`."""

    shorthand: ClassVar = "path"

    path: str
    """What `init_from.path` may be. Every start of a process reads it."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The type in the memory of the devices. null: that of the model that the task builds."""

    def __post_init__(self):
        require_none(not_readable(self, "path"))


@dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedSection):
    """Low-rank adapters (Hu et al., 2021): the model's own weights are frozen, and each adapted weight W [in, out] acts as
    W + alpha / rank * A B, with A [in, rank] and B [rank, out]. Only A and B are trained and saved, and what `whole` names."""

    base: str | None = None
    """The model's own weights: what `init_from.path` may be. Every start of a process reads them. null: the folder of
    `model.pretrained`."""
    rank: int = 8
    """The inner width of an adapter."""
    alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""
    dropout: float = 0.0
    """The share of an adapter's inputs that is set to 0, in training."""
    targets: tuple[str, ...] = ()
    """Which weights are adapted: regular expressions for a whole name, such as `layers.query`, or for its end after a dot, such
    as `query|value`. []: all linear weights of the layers."""
    whole: tuple[str, ...] = ()
    """Which other parameters are trained whole, and saved, beside the adapters: regular expressions as in `targets`, such as
    `embed|unembed`. They begin as those of the base."""
    new_tokens: int = 0
    """How many tokens at the end of `model.vocab_size` the base does not have. Their rows begin as the mean of the others;
    `whole` must name the tables."""
    base_dtype: Literal["float32", "bfloat16"] | None = None
    """The type of the frozen weights in the memory of the devices. null: `param_dtype`."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def matches(self, target: str, name: str) -> bool:
        return re.fullmatch(rf"(?:.*\.)?(?:{target})", name) is not None

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "rank")
        yield from too_small(self, 0, "new_tokens")
        yield from not_readable(self, "base")
        yield from not_positive(self, "alpha")
        if not 0 <= self.dropout < 1:
            yield f"dropout = {self.dropout}: expected 0 <= dropout < 1"
        for key, target in (*(("targets", target) for target in self.targets), *(("whole", name) for name in self.whole)):
            try:
                re.compile(target)
            except re.error as error:
                yield f"{key} = {target!r}: expected a regular expression ({error})"


def not_readable(config: Any, name: str) -> Iterator[str]:
    """Yields the problem of a field that is no path of a file system, and no URL of a bucket (null passes)."""
    value = getattr(config, name)
    if value is not None and (not value or ("://" in value and not re.fullmatch(r"(gs|s3)://[^/?#]+(/[^?#]*)?", value))):
        yield f"{name} = {value!r}: expected a folder or file, local or mounted, or s3://BUCKET/NAME or gs://BUCKET/NAME"
