"""Where the records of one source come from, what becomes of them, and how often a mixture reads them. Free of JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gangway.config.section import Section, require_none, too_small

RULES_OF_RECORDS = 2
"""The version of how records become tokens: one more at each change. Checkpoints and the digests of encoders have it."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Section):
    """Records of files: lines of JSON, rows of tables, whole texts (`trainers/data/sources/records.py`)."""

    paths: tuple[str, ...] = ("python-stdlib",)
    """Files, folders (also one that `datasets` has saved), patterns such as `data/*.jsonl`, or URLs; `python-stdlib` stands for
    the sources of the running Python's standard library."""
    pattern: str | None = None
    """Which files of a folder to read, by name, such as `*.txt`. Default: all, but for hidden ones; of `python-stdlib`, `*.py`. A
    file that is named in `paths` is always read."""
    format: Literal["auto", "text", "jsonl", "json", "csv", "parquet", "arrow", "arrayrecord"] = "auto"
    """What the files are. `auto`: by the ending of each; an unknown ending is text, one record for each file."""
    encoding: str = "utf-8"
    """What text, JSON and CSV are encoded in, by a name that Python knows: `latin-1`, `utf-16`. Bytes that are something else
    are an error."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Which column to read in place of another: `{text: content}` for a text in the column `content`; `{prompt: question,
    completion: answer}` for the columns `question` and `answer`."""
    examples: str = "auto"
    """What a record becomes (`trainers/data/encoders.py`): `text`; `chat`, of the column `messages`; `completion`, of `prompt`
    and `completion`. `auto`: by the columns of the first record."""
    on_malformed: Literal["raise", "skip"] = "raise"
    """What becomes of a line of JSON or CSV that cannot be read. `skip`: it is left out and counted."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if not self.paths:
            yield "paths = []: expected at least one file or folder"
        if not _is_text_encoding(self.encoding):
            yield f"encoding = {self.encoding!r}: expected the name of an encoding of texts, such as utf-8, latin-1 or utf-16"
        if any(not name or not column for name, column in self.columns.items()):
            yield f"columns = {dict(self.columns)}: expected names of columns, such as {{prompt: question}}"


def _is_text_encoding(name: str) -> bool:
    try:
        "".encode(name)
    except LookupError:  # also one of bytes, such as `base64`
        return False
    return True


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
