"""Documents of one source, or of several, packed into rows: what `data.dataset` reads with `data.packing` or `data.mixture`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from gangway.errors import DataError, DataMissingError, TransientError, UsageError
from trainers import runtime
from trainers.config import DataConfig
from trainers.config.arguments import TrainingArguments
from trainers.config.data import MixtureSource, SourceConfig
from trainers.data import preparing
from trainers.data.documents import Documents
from trainers.data.mixture import Mixture, Share
from trainers.data.packed_rows import HeldOutRows, PackedSource, Subset, TrainingRows, split
from trainers.data.packing import Piece, Plan, plan
from trainers.data.padded import cut, kept_places
from trainers.data.prepared import PreparedDocuments
from trainers.data.sources.files import check_apart
from trainers.data.sources.records import open_records
from trainers.text import tokenizers

ALONE = "the data"
"""The name of a source that is no part of a mixture."""


def packed(arguments: TrainingArguments) -> tuple[TrainingRows, HeldOutRows]:
    """Returns (training rows, held-out rows) of `arguments.data`. Raises what reading its sources raises, and DataMissingError
    for a source without a row."""
    config, tokenizer, note = arguments.data, tokenizers.of(arguments), runtime.current().note
    if len(config.mixture) > 1 and config.eval_fraction > 0:
        with suppress(DataMissingError):  # as on a machine that has the tokens alone
            check_apart(config.mixture)
    documents = [preparing.of_source(source, arguments, note) for source in config.mixture or (config,)]
    for each in documents:
        tokenizers.check(tokenizer, arguments, each.num_ids)
    if config.packing != "concat" and config.overlong == "cut":
        for source, each in zip(config.mixture or (config,), documents, strict=True):
            check_cuts(source, each, config)
    return rows_of(documents, arguments)


def check_cuts(source: SourceConfig, documents: PreparedDocuments, config: DataConfig) -> None:
    """Raises DataError for the first document of which a cut leaves no target, as without packing."""
    if documents.weights is None:
        return
    places, lengths = config.sequence_length + 1, documents.lengths
    for index in np.flatnonzero(lengths > places).tolist():
        kept = kept_places(int(lengths[index]), places, config.truncation)
        # Each start comes here with all that are too long: no other part of them is read.
        if documents.has_target(index, kept.start + 1, kept.stop):
            continue
        try:
            cut(documents[index], places, config.truncation)
        except DataError as error:
            raise DataError(f"{_where(source, index)}: {error}; or data.overlong: drop or split") from error


def _where(source: SourceConfig, index: int) -> str:
    try:
        return open_records(source).where(index)
    except (DataError, TransientError, UsageError):  # prepared elsewhere
        return f"document {index} of data.paths {', '.join(source.paths)}"


def rows_of(documents: Sequence[Documents], arguments: TrainingArguments) -> tuple[TrainingRows, HeldOutRows]:
    """Returns (training rows, held-out rows) of the documents of each source."""
    config = arguments.data
    names = [source.name for source in config.mixture] or [ALONE]
    parts = [split(each, config.eval_fraction) for each in documents]
    plans = [_plan(train, arguments, number) for number, (train, _) in enumerate(parts)]
    held_plans = [_plan(held_out, arguments, number, held_out=True) for number, (_, held_out) in enumerate(parts)]
    _check(names, documents, plans, held_plans, arguments)
    ids = [*itertools.accumulate(map(len, [*plans, *held_plans]), initial=0)]
    with_segments = config.packing is not None

    def source(number: int, held_out: bool) -> PackedSource:
        chosen = held_plans if held_out else plans
        first = ids[number + held_out * len(plans)]
        return PackedSource(names[number], number, parts[number][held_out], chosen[number], first, with_segments)

    train = [source(number, held_out=False) for number in range(len(names))]
    held = [source(number, held_out=True) for number in range(len(names))]
    weights = [part.weight_of((arguments.max_num_steps or sys.maxsize) - 1) for part in config.mixture]
    return TrainingRows(train, _mixture(train, arguments), arguments.seed, shuffle=config.shuffle), HeldOutRows(held, weights)


def _plan(documents: Subset, arguments: TrainingArguments, number: int, *, held_out: bool = False) -> Plan:
    config = arguments.data
    return plan(
        documents.lengths,
        config.packing,
        config.sequence_length,
        (arguments.seed, number),
        overlong=config.overlong,
        truncation=config.truncation,
        shuffle=config.shuffle and not held_out,
        teaches=partial(_teaches, documents) if len(documents) and documents[0].token_weight is not None else None,
    )


def _teaches(documents: Subset, piece: Piece) -> bool:
    weight = documents[piece.document].token_weight
    return weight is None or bool(np.any(weight[piece.start + 1 : piece.stop] > 0))


def _mixture(sources: Sequence[PackedSource], arguments: TrainingArguments) -> Mixture:
    size, config = arguments.global_batch_size, arguments.data
    if not config.mixture:
        return Mixture([Share(ALONE, ((0, 1.0),))])
    return Mixture([_share(part, len(source), size) for part, source in zip(config.mixture, sources, strict=True)])


def _share(part: MixtureSource, num_rows: int, global_batch_size: int) -> Share:
    weights = tuple((step * global_batch_size, weight) for step, weight in part.weights())
    return Share(part.name, weights, None if part.epochs is None else max(1, round(part.epochs * num_rows)))


def _check(
    names: Sequence[str],
    documents: Sequence[Documents],
    plans: Sequence[Plan],
    held_plans: Sequence[Plan],
    arguments: TrainingArguments,
) -> None:
    config = arguments.data
    for name, all_documents, train, held_out in zip(names, documents, plans, held_plans, strict=True):
        if len(train) == 0 or (config.eval_fraction > 0 and len(held_out) == 0):
            kind = "training" if len(train) == 0 else "held-out"
            raise DataMissingError(
                f"{name} has no {kind} rows: {len(all_documents):,} documents, data.eval_fraction = {config.eval_fraction}, "
                f"data.sequence_length = {config.sequence_length}, data.overlong = {config.overlong!r}; expected at least one "
                "document of two tokens or more for each; give more documents, or another setting"
            )
