"""Shows the data of a configuration as training will see it, before anything is trained.

    python -m trainers.data CONFIG [--examples N] [--batches N] [--specials] [key=value ...]

It reads the first batches as the trainer does, with its transforms, and shows examples of them as text: each document in a colour
of its own, and dim what is no target of the loss. Then how full the rows are, how long the documents, and the tokens of each
source. Without a terminal, marks stand in the place of colours: ‖ between two documents, ⟦ ⟧ around what is no target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gangway import program
from gangway.errors import TransientError, UsageError
from gangway.first_line import say
from trainers.data import view

if TYPE_CHECKING:  # it imports JAX: the first line is there before that
    from trainers.trainer.base_trainer import BaseTrainer


@program.command(UsageError, TransientError, ValueError, OSError, is_read=True)
def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    say(f"reading {options.config}", stream=sys.stderr)
    show(options)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program.parser("trainers.data", __doc__, example="config.yaml --examples 2")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes a setting of CONFIG")
    parser.add_argument("--examples", type=int, default=4, metavar="N", help="how many to show as text; default: 4")
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="how many to count tokens of; default: 4")
    parser.add_argument("--specials", action="store_true", help="show special tokens, such as the end of a text, too")
    options = parser.parse_intermixed_args(argv)
    for name in ("examples", "batches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    return options


def show(options: argparse.Namespace) -> None:
    """Raises UsageError, TransientError, ValueError or OSError."""
    from rich.console import Console
    from rich.text import Text

    from trainers.settings import read

    arguments = read(options.config, options.overrides)
    trainer = build(arguments)
    screen = Console(highlight=False, soft_wrap=True)
    coloured = screen.color_system is not None and not screen.no_color
    decode = decode_of(trainer, specials=options.specials)
    for line in lines(trainer, options.examples, options.batches, decode, coloured=coloured):
        screen.print(Text.assemble(*line), soft_wrap=True)


def build(arguments: Any) -> BaseTrainer:
    """Returns the trainer of the configuration, with its data. Raises UsageError if it reads its data in a way of its own."""
    from trainers.commands.built import base_trainer

    trainer = base_trainer(arguments, "reads its rows by index")
    if trainer.dataset_train is None:
        raise UsageError(f"data.dataset = {arguments.data.dataset!r} gave no training data: there is nothing to show")
    return trainer


def lines(
    trainer: BaseTrainer, num_examples: int, num_batches: int, decode: view.Decode | None = None, *, coloured: bool
) -> Iterator[view.Line]:
    """Yields all that is shown. `decode` makes text of tokens; default: `decode_of`."""
    from trainers.data.loader import HasNotes
    from trainers.text import tokenizers

    data, arguments = trainer.dataset_train, trainer.arguments
    names, ignore_index = arguments.data.source_names, arguments.loss.ignore_index
    batch = first_rows(trainer, max(num_examples, num_batches * arguments.global_batch_size))
    num_rows, num_shown = len(batch["weight"]), min(num_examples, len(batch["weight"]))
    if not view.is_text(batch):
        yield heading(f"a row, of the first {num_rows:,}")
        yield from view.other(batch)
        return
    decode = decode or decode_of(trainer)
    batch, labels = view.lines_of(batch), arguments.classification.labels
    lines_per_row = len(batch["weight"]) // num_rows
    yield heading(f"the first {num_shown} examples of training")
    for number in range(num_shown * lines_per_row):
        row = {name: leaf[number] for name, leaf in batch.items()}
        yield view.example(row, decode, names, coloured=coloured, ignore_index=ignore_index, labels=labels)
    if isinstance(data, HasNotes):
        yield heading("packing")
        yield from (((line, ""),) for line in data.notes())
    for name, lengths in lengths_of(data, batch).items():
        yield heading(f"tokens of {name}")
        yield from view.histogram(lengths, batch["tokens"].shape[1])
    yield heading("what begins and ends a document")
    yield from (((line, ""),) for line in tokenizers.specials(tokenizers.of(arguments)))
    yield heading(f"the first {num_rows:,} rows")
    yield from view.by_source(batch, names, ignore_index)


def heading(text: str) -> view.Line:
    return ((f"\n{text}", "bold"),)


def first_rows(trainer: BaseTrainer, num_rows: int) -> view.Batch:
    """Returns the first rows of training, as `Batching.rows_of` makes them: with transforms, and before `prepare_batch`."""
    data: Any = trainer.dataset_train
    num_rows = getattr(data, "available", lambda stop: stop)(num_rows)
    if not num_rows:
        raise UsageError("the training data has no examples: give it some")
    return trainer.batching.rows_of(data, range(num_rows))


def decode_of(trainer: BaseTrainer, *, specials: bool = False) -> view.Decode:
    """Returns the function that makes text of tokens: that of the task, else that of the configured tokenizer. With `specials`
    special tokens are shown, too. Raises UsageError for a task that decodes by itself."""
    from trainers.tasks.causal_lm import CausalLMTask
    from trainers.text import tokenizers

    own = getattr(trainer.task, "decode", None)
    if own is None or (specials and getattr(type(trainer.task), "decode", None) is CausalLMTask.decode):
        tokenizer = tokenizers.of(trainer.arguments)
        return tokenizer.raw if specials else tokenizer.decode
    if specials:
        raise UsageError(f"--specials: {type(trainer.task).__name__} decodes tokens by itself; leave it out")
    return own


def lengths_of(data: Any, batch: view.Batch) -> dict[str, np.ndarray]:
    """Returns the lengths of all documents, by source; of data that does not know them, those of the rows."""
    from trainers.data.packed_rows import TrainingRows

    packed = getattr(data, "dataset", data)  # without the transforms around it
    if isinstance(packed, TrainingRows):
        return {f"the documents of {source.name}": source.lengths for source in packed.sources}
    rows = ({name: leaf[number] for name, leaf in batch.items()} for number in range(len(batch["tokens"])))
    return {"these examples": np.array([np.count_nonzero(view.segments_of(row)) for row in rows])}
