"""The tokens of a text, kept on this machine: a process that starts again reads them, and needs no tokenizer for that."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from trainers.storage import durable
from trainers.tokenizers import Tokenizer

FOLDER = "~/.cache/gangway/tokens"
FORMAT = b"1"
KEPT_BYTES = 20 << 30
"""How much is kept on a machine: the files that were used last."""
AT_ONCE_BYTES = 4 << 20
"""How much text the tokenizer gets at once."""


def tokens_of(documents: Sequence[bytes], tokenizer: Tokenizer, folder: str = FOLDER) -> tuple[np.ndarray, int]:
    """Returns (the tokens of all documents, with the tokenizer's separator after each, as uint16 or uint32[N]; how many tokens
    the tokenizer knows). Where they are kept, the tokenizer is not read."""
    place, digest = Path(os.path.expanduser(folder)), _digest(documents, tokenizer)
    for path in place.glob(f"{digest}-*.npy"):
        try:
            kept = np.load(path, mmap_mode="r")
            os.utime(path)
            return kept, int(path.stem.rpartition("-")[2])
        except (OSError, ValueError):  # it is damaged, or was deleted just now: made again
            continue
    tokens = np.concatenate(list(_parts(documents, tokenizer)))
    _keep(place / f"{digest}-{tokenizer.num_ids}.npy", tokens)
    return tokens, tokenizer.num_ids


def _digest(documents: Sequence[bytes], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(FORMAT + tokenizer.digest().encode())
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    return digest.hexdigest()


def _parts(documents: Sequence[bytes], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    dtype = np.uint16 if tokenizer.num_ids <= 1 << 16 else np.uint32
    end = [] if tokenizer.separator is None else [tokenizer.separator]
    for texts in _batches(documents):
        for tokens in tokenizer.encode_documents(texts):
            yield np.array([*tokens, *end], dtype)


def _batches(documents: Sequence[bytes]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document.decode(errors="replace"))
        size += len(document)
        if size >= AT_ONCE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _keep(path: Path, tokens: np.ndarray) -> None:
    """Keeps the tokens for the next process, if there is room: without them it only takes longer."""
    contents = io.BytesIO()
    np.save(contents, tokens)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_shared(path, contents.getvalue(), 0o600)
        _tidy(path.parent)
    except OSError:
        return


def _tidy(folder: Path) -> None:
    """Deletes the files that were used least recently, until the others are no more than `KEPT_BYTES`."""
    files = sorted(((file.stat(), file) for file in folder.iterdir()), key=lambda found: -found[0].st_mtime)
    kept = 0
    for about, file in files:
        kept += about.st_size
        if kept > KEPT_BYTES:
            file.unlink(missing_ok=True)
