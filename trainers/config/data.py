"""The section `data` of the configuration: the text that the model is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from gangway.config.section import not_paths, too_small
from trainers.config import source as mixtures
from trainers.config.source import MixtureSource, SourceConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """The data: text from files and folders. `dataset` names a function (arguments) -> (train, eval) for another
    source. A task may have a default of its own."""

    dataset: str = "trainers.data.sources.text:text_windows"
    """`package.module:function` (arguments) -> (training data, held-out data)."""
    prepared: str | None = None
    """A folder of `python -m trainers.prepare`, which has the tokens of the sources of this section. null: they are made when
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
        yield from mixtures.problems(self.mixture)
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
