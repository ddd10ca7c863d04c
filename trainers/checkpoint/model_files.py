"""The files of a saved model, on a disk or in a bucket: read whole, in parts, or copied here for a library that takes a path.

What is copied lies in a temporary folder until this process ends. Those are small files, such as a tokenizer: weights are read in
parts (`trainers.checkpoint.tensor_files`).
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from gangway.errors import CheckpointError
from gangway.storage import ours
from gangway.storage.store import Entry, Place
from trainers.config.hf_files import MODEL_FILES, MORE_TEMPLATES, PREPROCESSOR_FILE, TOKENIZER_FILES

BESIDE_WEIGHTS = frozenset((*MODEL_FILES, *TOKENIZER_FILES, PREPROCESSOR_FILE))
MAX_COPIED_BYTES = 1 << 30
"""Of the small files of one folder, together."""


def here(folder: Place, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """Returns the folder on this machine: of a bucket a copy of its `wanted` files, by their names in it, which is deleted when
    this process ends. Raises CheckpointError if they are larger than small files are, and OSError."""
    if folder.store.is_local:
        return folder.path
    entries = [entry for entry in folder.list() if wanted(entry.name)]
    if (total := sum(entry.size for entry in entries)) > MAX_COPIED_BYTES:
        raise CheckpointError(
            f"the files beside the weights in {folder} have {total} bytes: expected at most {MAX_COPIED_BYTES}; copy the folder "
            "to this machine, and give that"
        )
    made = Path(tempfile.mkdtemp(prefix="gw-"))
    atexit.register(partial(_delete, made))
    _download(folder, entries, made)
    return made


def model_here(folder: Place) -> Path:
    """Like `here`, for a folder of Hugging Face: the files that describe the model, and the tokenizer."""
    return here(folder, lambda name: name in BESIDE_WEIGHTS or name.startswith(f"{MORE_TEMPLATES}/"))


def _download(folder: Place, entries: Iterable[Entry], target: Path) -> None:
    for entry in entries:
        path = target / entry.name
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.store.download((folder / entry.name).key, path)


def _delete(made: Path) -> None:
    with suppress(OSError):
        ours.delete(made, ours.TEMPORARY_FOLDER)
