"""Text from files and folders, as bytes or tokens, cut into windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gangway.errors import DataMissingError, UsageError
from trainers import runtime
from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import BYTES
from trainers.data import preparing
from trainers.data.epoch_order import EpochOrder
from trainers.data.packed_rows import HeldOutRows, TrainingRows
from trainers.data.sources.access import read_text
from trainers.data.sources.files import SourceFile, listing
from trainers.data.sources.packed import packed
from trainers.data.sources.records import tell_left_out
from trainers.text import tokenizers


class Windows:
    """Cuts the text into examples. Example i is {"tokens": int32[T + 1], "sample_id": int32}: T + 1 tokens from token i * T."""

    def __init__(self, text: np.ndarray, sequence_length: int, first_sample_id: int = 0):
        self.text, self.sequence_length, self.first_sample_id = text, sequence_length, first_sample_id

    def __len__(self) -> int:
        # One token less: the last window needs a target after its last input, too.
        return max(0, (len(self.text) - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        start = index * self.sequence_length
        # Windows overlap by one token: the last target of one is the first input of the next.
        tokens = self.text[start : start + self.sequence_length + 1].astype(np.int32)
        return {"tokens": tokens, "sample_id": np.asarray(self.first_sample_id + index, np.int32)}


def text_windows(arguments: TrainingArguments) -> tuple[EpochOrder | TrainingRows, Windows | HeldOutRows]:
    """Returns (training examples, held-out examples) of `arguments.data`: packed rows if it says so, else windows. Raises
    DataUnavailableError, or DataMissingError if there is no text, or too little."""
    config = arguments.data
    if config.packing is not None or config.mixture:
        return packed(arguments)
    text, unit = _text(arguments)
    held_out = int(len(text) * config.eval_fraction)
    train = Windows(text[: len(text) - held_out], config.sequence_length)
    # The held-out samples have ids of their own: in a digest of samples they cannot be taken for training samples.
    held = Windows(text[len(text) - held_out :], config.sequence_length, first_sample_id=len(train))
    for name, windows in (("training", train), ("held-out", held)):
        if len(windows) == 0 and (name == "training" or config.eval_fraction > 0):
            raise DataMissingError(
                f"data.paths {', '.join(config.paths)}: the {name} text has {len(windows.text):,} {unit}; expected at least "
                f"{config.sequence_length + 1}: data.sequence_length = {config.sequence_length} and one {unit[:-1]} more to "
                f"predict; give more text, a smaller sequence_length, or another data.eval_fraction (now {config.eval_fraction})"
            )
    return EpochOrder(train, arguments.seed, shuffle=config.shuffle), held


def _text(arguments: TrainingArguments) -> tuple[np.ndarray, str]:
    """Returns (all of the text, what each number of it is)."""
    config, tokenizer = arguments.data, tokenizers.of(arguments)
    if tokenizer.source == BYTES and config.prepared is None:
        found = listing(config)
        if all(file.format == "text" for file in found.files):
            tokenizers.check(tokenizer, arguments)
            tell_left_out(config, found, 0, runtime.current().note)
            return read(found.files, config.encoding), "bytes"
    documents = preparing.of_source(config, arguments, runtime.current().note)
    tokenizers.check(tokenizer, arguments, documents.num_ids)
    if documents.weights is not None:
        raise UsageError(
            f"data.dataset = {config.dataset!r} trains on each token, and the records (data.examples = {config.examples!r}) say "
            "which tokens count; set data.packing=fit, whose rows have such weights"
        )
    return documents.tokens, "bytes" if tokenizer.source == BYTES else "tokens"


def read(files: Sequence[SourceFile], encoding: str) -> np.ndarray:
    """Returns all text files as the bytes of UTF-8, uint8, each with a newline behind it: as their documents would be."""
    # A view of the bytes, one for each token: only windows become int32.
    texts = (read_text(file.path, encoding).encode() for file in files)
    return np.frombuffer(b"".join(part for text in texts for part in (text, b"\n")), np.uint8)
