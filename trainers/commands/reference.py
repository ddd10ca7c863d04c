"""Writes the log-probabilities that a reference gives to the completions of preferences, in this one process.

    python -m trainers.reference CONFIG --output FILE.jsonl [key=value ...]

The reference is `frozen.reference` of the configuration, or else what the run begins with (`init_from`, `model.pretrained`). FILE
(.jsonl or .parquet) gets the records of `data.paths`, in their order, with two columns more: `ref_chosen_logps` and
`ref_rejected_logps`, sums over the tokens of each completion. A run with `preference.reference: columns` and `data.paths: [FILE]`
needs no reference in memory. It must have the same tokenizer, `data.sequence_length` and `data.truncation`. FILE is there when
all of it is: a command that was killed leaves only FILE.tmp, and the same command writes that anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangway import program
from gangway.errors import TransientError, UsageError
from gangway.first_line import say
from gangway.storage.documents import is_url
from gangway.surroundings import allow_for_forced_devices
from trainers.console.progress import Progress, progress_on
from trainers.data.record_files import ENDINGS, schema_of, write

if TYPE_CHECKING:  # they import JAX: the first line is there before that
    from trainers.config.arguments import TrainingArguments
    from trainers.data.documents import Record, Records
    from trainers.data.padded import Rows

AT_ONCE = 16
"""Pairs."""
TASK = "trainers.tasks.preference:PreferenceTask"


@program.command(UsageError, TransientError, ValueError, OSError, interrupted="interrupted: nothing is written")
def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    allow_for_forced_devices(os.environ)
    check_output(options.output)
    say(f"reading {options.config}", stream=sys.stderr)
    from trainers.settings import read

    num_records = run(read(options.config, options.overrides), options.output)
    say(f"wrote {num_records} records to {options.output}", stream=sys.stderr)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program.parser("trainers.reference", __doc__, example="config.yaml --output reference.parquet")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--output", required=True, metavar="FILE", help=f"a new file: {' or '.join(ENDINGS)}")
    return parser.parse_intermixed_args(argv)


def check_output(output: str) -> None:
    """Raises UsageError if this is no new file."""
    if Path(output).suffix not in ENDINGS:
        raise UsageError(f"--output {output}: expected a file that ends with {' or '.join(ENDINGS)}")
    if is_url(output):
        raise UsageError(f"--output {output}: expected a file on a disk or a mount: write it there, and copy it")
    if Path(output).exists():
        raise UsageError(f"--output {output} is there already: give a new file")


def run(arguments: TrainingArguments, output: str) -> int:
    """Writes the file, and returns how many records it has. Raises UsageError, CheckpointError or DataError."""
    from trainers.data.sources.preference import REFERENCE_COLUMNS, pairs
    from trainers.data.sources.records import open_records
    from trainers.tasks.preference import REFERENCE
    from trainers.text import tokenizers

    named = arguments.frozen.get(REFERENCE) or arguments.init_from
    if named is None:
        raise UsageError("nothing names the reference: set frozen.reference, init_from or model.pretrained")
    plain = alone(arguments)
    tokenizer, records = tokenizers.of(plain), open_records(plain.data)
    rows = pairs(records, tokenizer, plain)
    # Before the model is read: what Parquet has no type for is found at once.
    columns = dict.fromkeys(REFERENCE_COLUMNS, 0.0)
    schema = schema_of({**record, **columns} for record in records) if output.endswith(".parquet") else None
    with progress_on(sys.stderr, "reference", len(rows), "pairs") as progress:
        write(Path(output), with_columns(records, log_probabilities(plain, named.path, rows), progress), schema)
    return len(rows)


def with_columns(records: Records, columns: Iterable[dict[str, float]], progress: Progress) -> Iterator[Record]:
    for index, found in enumerate(columns):
        yield {**records[index], **found}
        progress(index + 1, index + 1, 0)


def alone(arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments of the model alone, without what a run compares it with."""
    from trainers.config import EvaluationConfig, PreferenceConfig

    nothing: dict[str, Any] = {"frozen": {}, "lora": None, "init_from": None, "evaluation": EvaluationConfig()}
    return dataclasses.replace(arguments, preference=PreferenceConfig(loss="simpo"), recorders=(), **nothing)


def log_probabilities(arguments: TrainingArguments, source: str, rows: Rows) -> Iterator[dict[str, float]]:
    """Yields the two columns of each row, as the model at `source` gives them."""
    import jax
    import numpy as np

    from trainers import runtime
    from trainers.data.sources.preference import REFERENCE_COLUMNS
    from trainers.step.loss import in_mode
    from trainers.tasks.completions import completions_of_pairs
    from trainers.trainer.base_trainer import BaseTrainer
    from trainers.trainer.beginnings import saved_state

    runtime.install(runtime.Runtime(lambda event: None))
    trainer = BaseTrainer(dataclasses.replace(arguments, task=TASK, global_batch_size=AT_ONCE, accumulation_steps=1), rows)
    _, state, _ = saved_state(trainer, source)

    @jax.jit
    def compute(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        model = in_mode(trainer.model.merge(params), training=False)
        return completions_of_pairs(model, batch).log_p

    for start in range(0, len(rows), AT_ONCE):
        some = [rows[min(start + place, len(rows) - 1)] for place in range(AT_ONCE)]
        found = compute(state.params, {name: np.stack([row[name] for row in some]) for name in ("tokens", "token_weight")})
        for values in np.asarray(found)[: len(rows) - start].tolist():
            yield dict(zip(REFERENCE_COLUMNS, values, strict=True))
