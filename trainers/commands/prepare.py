"""Makes the tokens of a configuration's data once, before training, for all hosts.

    python -m trainers.prepare CONFIG [--output FOLDER] [--workers N] [--train-bpe N] [key=value ...]

FOLDER is on storage that every host sees; by default it is `data.prepared` of CONFIG, or else STORAGE/NAME.prepared. Set
`data.prepared` to it, and a run reads the tokens from there. A command that was killed goes on where it stopped when it is
called again. The folder knows the files, the tokenizer and the settings that it was made of, and a run that has others says so.
`--train-bpe N` first trains a tokenizer of N tokens on the data, and writes it to FOLDER/tokenizer. The command ends with the
settings that a run needs to train on its result.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

from gangway import program
from gangway.errors import TransientError, UsageError
from gangway.first_line import say
from gangway.storage.documents import is_url
from trainers.config.arguments import TrainingArguments
from trainers.config.data import SourceConfig
from trainers.console.progress import progress_on
from trainers.data.prepared import PREPARED, PreparedDocuments

TOKENIZER = "tokenizer"
"""The folder of a tokenizer that was trained here."""


@program.command(
    *(UsageError, TransientError, ValueError, OSError),
    interrupted="interrupted: what is finished stays, and the same command goes on from there",
)
def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    say(f"reading {options.config}")
    prepare(options)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program.parser("trainers.prepare", __doc__, example="config.yaml --output prepared")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes a setting of CONFIG")
    parser.add_argument("--output", metavar="FOLDER", help="default: data.prepared, or STORAGE/NAME.prepared")
    parser.add_argument("--workers", type=int, default=num_cpus(), metavar="N", help="processes; 0: this one; default: the CPUs")
    parser.add_argument("--train-bpe", type=int, metavar="N", help="train a tokenizer of N tokens first")
    options = parser.parse_intermixed_args(argv)
    if options.workers < 0:
        parser.error(f"--workers {options.workers}: expected 0 or more")
    return options


def num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(options: argparse.Namespace) -> None:
    """Raises UsageError, TransientError, ValueError or OSError."""
    from trainers.settings import read
    from trainers.text import tokenizers

    arguments = read(options.config, options.overrides)
    output = output_of(options, arguments)
    # By the name of their folder.
    sources: dict[str, SourceConfig] = {source.name: source for source in arguments.data.mixture} or {"data": arguments.data}
    if options.train_bpe is not None:
        if TOKENIZER in sources:
            raise UsageError(
                f"data.mixture has a source {TOKENIZER!r}, the name of the folder for --train-bpe: rename the source"
            )
        arguments = with_tokenizer(arguments, list(sources.values()), options.train_bpe, output / TOKENIZER)
        arguments = with_room(arguments, tokenizers.of(arguments).num_ids)
    tokenizers.check(tokenizers.of(arguments), arguments)
    for name, config in sources.items():
        report(name, prepare_source(name, config, arguments, output / name, options.workers))
    print(how_to_use(output, arguments, trained=options.train_bpe is not None))


def output_of(options: argparse.Namespace, arguments: TrainingArguments) -> Path:
    """Returns the folder to write. Raises UsageError if it is none."""
    given = options.output or arguments.data.prepared or os.path.join(arguments.storage, f"{arguments.name}.prepared")
    if is_url(given):
        raise UsageError(
            f"{given} is no folder: tokens are mapped from files; give --output FOLDER, on a mount that all hosts have"
        )
    return Path(os.path.expanduser(given))


def with_tokenizer(arguments: TrainingArguments, sources: list[SourceConfig], vocab_size: int, folder: Path) -> TrainingArguments:
    """Returns the arguments with a tokenizer that is trained on the sources, or was so before."""
    from trainers.data import bpe

    print(f"training a tokenizer of {vocab_size:,} tokens", flush=True)
    begun_s = time.monotonic()
    is_new = bpe.train(sources, vocab_size, folder)
    print(f"{folder}: trained in {time.monotonic() - begun_s:.1f} s" if is_new else f"{folder}: it is there already")
    return dataclasses.replace(arguments, data=dataclasses.replace(arguments.data, tokenizer=str(folder)))


def with_room(arguments: TrainingArguments, num_tokens: int) -> TrainingArguments:
    """Returns the arguments with a model that has so many tokens at least."""
    vocab_size = max(num_tokens, arguments.model.vocab_size)
    return dataclasses.replace(arguments, model=dataclasses.replace(arguments.model, vocab_size=vocab_size))


def prepare_source(
    name: str, config: SourceConfig, arguments: TrainingArguments, folder: Path, num_workers: int
) -> PreparedDocuments:
    """Returns the documents of a source in `folder`: made now, or found there and checked, each byte of them."""
    from trainers.data.encoders import encoder_of
    from trainers.data.preparing import Source, check, make
    from trainers.data.sources.records import open_told

    records = open_told(config, lambda line: print(f"{name}: {line}"))
    source = Source(config, arguments, encoder_of(config, arguments, records.columns))
    if (folder / PREPARED).is_file():
        found = PreparedDocuments(folder)
        check(found, source, print)
        found.check()
        print(f"{name}: {folder} is there already, and whole")
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with progress_on(sys.stdout, name, len(records), "tokens") as progress:
        make(source, folder, num_workers=num_workers, with_checksums=True, progress=progress)
    return PreparedDocuments(folder)


def report(name: str, documents: PreparedDocuments) -> None:
    about, lengths = documents.about, documents.lengths
    for line in about["notes"]:
        print(f"{name}: {line}")
    print(
        f"{name}: {len(documents):,} documents, {about['num_tokens']:,} tokens, in the mean {float(lengths.mean()):,.1f} each, "
        f"{int(lengths.max(initial=0)):,} in the longest"
    )


def how_to_use(folder: Path, arguments: TrainingArguments, *, trained: bool) -> str:
    settings = [f"data.prepared={folder.absolute()}"]
    if trained:
        settings += [f"data.tokenizer={(folder / TOKENIZER).absolute()}", f"model.vocab_size={arguments.model.vocab_size}"]
    return "\n".join(["to train on it, give the run these settings, or write them into the configuration:", *settings])
