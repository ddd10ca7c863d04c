"""Trains a tokenizer: byte-level byte pair encoding, as GPT-2 has it (Sennrich et al. 2016), by the library `tokenizers`."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gangway.errors import DataError, UsageError
from gangway.storage import json_text
from trainers.config.data import SourceConfig
from trainers.data import kept
from trainers.data.documents import TEXT
from trainers.data.sources.files import files_of, stamps
from trainers.data.sources.records import open_records

END = "<|endoftext|>"
SMALLEST = 257
"""A token for each byte, and the one that ends a text."""
MADE_OF = "trained.json"


def train(sources: Sequence[SourceConfig], vocab_size: int, folder: Path) -> bool:
    """Writes a folder of Hugging Face with a tokenizer of at most `vocab_size` tokens, trained on the texts of the sources, all
    or nothing. If the folder has just this one, nothing is done, and False returned. Raises UsageError, or DataError if it has
    another one."""
    if vocab_size < SMALLEST:
        raise UsageError(f"--train-bpe {vocab_size}: expected at least {SMALLEST}: each byte, and the end of a text")
    made_of = _digest(sources, vocab_size)
    if folder.is_dir():
        _check(folder, made_of)
        return False
    mine = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    mine.mkdir(parents=True)
    with kept.whole(mine, folder):
        _write(_trained(sources, vocab_size), made_of, mine)
    return True


def _digest(sources: Sequence[SourceConfig], vocab_size: int) -> str:
    about = [vocab_size, [source.columns for source in sources], [stamps(files_of(source)) for source in sources]]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _check(folder: Path, made_of: str) -> None:
    try:
        if json_text.unseal((folder / MADE_OF).read_text())["made_of"] == made_of:
            return
    except (OSError, ValueError, KeyError):  # it was not made here
        pass
    raise DataError(
        f"{folder} has a tokenizer of other files or another size: give a new --output, or set data.tokenizer={folder}"
    )


def _trained(sources: Sequence[SourceConfig], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for source in sources for text in texts(source)), trainer)
    return tokenizer


def _write(tokenizer: Any, made_of: str, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n")
    (folder / MADE_OF).write_text(json_text.seal({"made_of": made_of, "vocab_size": tokenizer.get_vocab_size()}))


def texts(source: SourceConfig) -> Iterator[str]:
    """Yields the texts of all records: those of the column `text`, or, in records that have none, all that there are."""
    for record in open_records(source):
        yield from _strings(record.get(TEXT, record))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _of_all(value.values())
    elif isinstance(value, list | tuple):
        yield from _of_all(value)


def _of_all(values: Iterable[Any]) -> Iterator[str]:
    return (text for value in values for text in _strings(value))
