"""The section `data` of the configuration: what the model is trained on, from one source or a mixture of several."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from gangway.config.conversion import CheckedSection
from gangway.config.section import not_paths, too_small

RULES_OF_RECORDS = 2
"""The version of how records become tokens: one more at each change. Checkpoints and the digests of encoders have it."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig(CheckedSection):
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


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """The data: text from files and folders. `dataset` names a function (arguments) -> (train, eval) for another
    source. A task may have a default of its own."""

    dataset: str = "trainers.data.sources.text:text_windows"
    """`package.module:function` (arguments) -> (training data, held-out data)."""
    prepared: str | None = None
    """A folder of `gangway prepare`, which has the tokens of the sources of this section. null: they are made when
    training begins, and kept on each machine."""
    tokenizer: str | None = None
    """A folder of Hugging Face, a file `tokenizer.json`, or `bytes`. null: that of `model.pretrained` if the folder has one, or
    else bytes. The run keeps a copy."""
    template_date: str | None = None
    """The day that a chat template takes for today, as `2026-11-25`. A template that writes the day needs it: without it each day
    would give other tokens."""
    template_fields: Mapping[str, Any] = field(default_factory=dict)
    """What a chat template gets beside the messages, such as `{enable_thinking: false}`, in training and in generations; a column
    of that name counts more. An export's template has them for its defaults."""
    sequence_length: int = 256
    """The tokens of an example."""
    eval_fraction: float = 0.05
    """The fraction of the data that is held out: the tail of a text that is one stream, else a random choice, the same with any
    seed."""
    packing: Literal["concat", "fit"] | None = None
    """How documents share the rows of a batch; a token sees its own document alone. `concat`: rows are cut from the stream of all
    documents. `fit`: rows hold whole documents, or whole examples such as pairs, as many as fit. null: text is one stream without
    borders; each document of a mixture has a row, and so has each example."""
    overlong: Literal["cut", "split", "drop"] = "cut"
    """What becomes of a document that is longer than a row, with packing `fit` and in a mixture: `cut` keeps the part that
    `truncation` says, `split` makes several of it, `drop` leaves it out."""
    mixture: tuple[MixtureSource, ...] = ()
    """Several sources, each row of one of them, in the place of `paths`."""
    shuffle: bool = True
    """Whether the examples of each epoch come in a random order, which `seed` and the epoch say."""
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    """Which part remains of an example that is longer than `build_data_collate_info` allows."""
    retries: int = 3
    """How often an example is read again after an error that may pass, such as one of the network or of the storage."""
    retry_backoff_s: float = 0.5
    """The seconds before the first of these attempts; each further one waits twice as long."""
    on_error: Literal["raise", "skip"] = "raise"
    """What becomes of an example by index that cannot be read. `skip`: its row does not count, and `total_skipped_examples`
    counts it."""
    ignore_columns: tuple[str, ...] = ()
    """Columns of the data that are to be left out. Of records: those that nothing reads, and fields of their messages. Of
    examples: leaves that are no part of a batch; `build_data_transform` still sees them."""
    collator: str | None = None
    """A function from a list of examples to a batch, as `package.module:function` (`build_collator`). null: they are stacked."""
    on_change: Literal["refuse", "continue"] = "refuse"
    """What becomes of a run that goes on, and whose data is not what it has learned from: files that are new, gone, longer or
    others. `continue`: it goes on with what is there, and a note says what has changed. Another tokenizer is always refused."""
    sources: tuple[str, ...] = ()
    """The names of the sources of the examples, if each example has a leaf `source` with an index into this list. Loss and
    tokens are then published for each source."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from not_paths(self, "dataset")
        if self.collator is not None:
            yield from not_paths(self, "collator")
        if needed := {"sample_id", "weight"} & set(self.ignore_columns):
            yield f"ignore_columns = {list(self.ignore_columns)}: {', '.join(sorted(needed))} cannot be left out"
        if self.template_date is not None and not _is_day(self.template_date):
            yield f"template_date = {self.template_date!r}: expected a day, such as 2026-11-25"
        for name, value in self.template_fields.items():
            if not name.isidentifier() or not isinstance(value, bool | int | float | str):
                yield f"template_fields.{name} = {value!r}: expected a name such as enable_thinking, and true, a number or a text"
        if self.tokenizer == "" or self.prepared == "":
            yield "tokenizer or prepared is empty: expected a path, or null"
        yield from too_small(self, 2, "sequence_length")
        yield from too_small(self, 0, "retries", "retry_backoff_s")
        yield from problems(self.mixture)
        if self.mixture and self.sources:
            yield f"sources = {list(self.sources)}: expected none with a mixture, whose sources have names themselves"
        if len(set(self.sources)) < len(self.sources):
            yield f"sources = {list(self.sources)}: expected each name once"
        if not 0 <= self.eval_fraction < 1:
            yield f"eval_fraction = {self.eval_fraction}: expected 0 <= eval_fraction < 1"

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources, in the order of the leaf `source`."""
        return tuple(source.name for source in self.mixture) or self.sources


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
