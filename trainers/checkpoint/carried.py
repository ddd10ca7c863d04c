"""The small files of a folder of Hugging Face that a run carries along, and every export has again: those of the tokenizer, and
`config.json`, `generation_config.json` and `preprocessor_config.json` as they were."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangway.errors import TransientError, UsageError
from gangway.storage import durable
from gangway.storage.documents import is_url
from gangway.storage.store import Place
from trainers.checkpoint import assets, hugging_face, model_files, weights
from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import BYTES, LABELS_FILE, MODEL_FILES, MORE_TEMPLATES, PREPROCESSOR_FILE, TOKENIZER_FILES

NAME = "hugging_face"
"""The name of the asset."""
ALONE = "tokenizer.json"
LENGTHS = ("truncation", "padding")
"""Its keys of how long a text may be, and must be."""


class HuggingFaceFiles:
    """Files by their names in a folder of Hugging Face. `gone` is a folder that has some of them and is not there: nothing is
    saved then, but whoever only looks at a run needs none."""

    def __init__(self, files: Mapping[str, Path], gone: Path | None = None):
        self.files, self._gone = files, gone

    def save_pretrained(self, folder: str) -> None:
        """Raises UsageError if a folder of theirs is gone."""
        if self._gone is not None:
            raise UsageError(
                f"{self._gone} is gone, and what a run in a bucket has kept of its files is not read: bring the folder back"
            )
        for name, path in self.files.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, Path(folder, name))


def of(arguments: TrainingArguments, run_folder: str) -> dict[str, HuggingFaceFiles]:
    """Returns the asset by its name, or nothing if the run has no such files. They are those of what the run begins with, or of
    the base of its adapters: a folder of Hugging Face, or a run that carries such files itself. Where the folders that the
    settings name are gone, the files are those that the run has kept; of a run in a bucket these are not read."""
    files: dict[str, Path] = {}
    named = [arguments.data.tokenizer] if arguments.data.tokenizer not in (None, BYTES) else []
    base = None if arguments.lora is None else arguments.lora.base
    for begun in (base, None if arguments.init_from is None else arguments.init_from.path):
        if begun is not None:
            named.append(begun)
            folder = _files_of(begun) or _kept(run_folder, Path(os.path.expanduser(begun)))
            files |= _in(folder, (*MODEL_FILES, PREPROCESSOR_FILE))
    if (tokenizer := arguments.data.tokenizer) not in (None, BYTES):
        path = Path(os.path.expanduser(str(tokenizer)))
        files |= {ALONE: path} if path.is_file() else _of_tokenizer(path if path.is_dir() else _kept(run_folder, path))
    here = (Path(os.path.expanduser(name)) for name in named if not is_url(name))
    gone = [path for path in here if is_url(run_folder) and not path.exists()]
    return {NAME: HuggingFaceFiles(files, next(iter(gone), None))} if files or gone else {}


def _kept(run_folder: str, begun: Path) -> Path:
    """Returns the folder with the files that the run has kept of what it began with; of a run in a bucket `begun`."""
    return begun if is_url(run_folder) else Path(run_folder, assets.FOLDER, NAME)


def _files_of(begun: str) -> Path | None:
    """Returns the folder with the files of Hugging Face of what a run begins with; None if it has none, or is not there."""
    try:
        found = weights.find(begun if is_url(begun) else os.path.expanduser(begun))
        if hugging_face.is_folder(found):
            return model_files.model_here(found)
        return None if found.name.endswith(weights.FILE_SUFFIX) else folder_of(found)
    except (TransientError, UsageError, OSError):  # what is wrong with it, the reader of the weights says
        return None


def _of_tokenizer(folder: Path) -> dict[str, Path]:
    more = sorted(path for path in folder.glob(f"{MORE_TEMPLATES}/*") if path.is_file())
    return _in(folder, TOKENIZER_FILES) | {path.relative_to(folder).as_posix(): path for path in more}


def labels_of(dataset: Any) -> dict[str, list[str]]:
    """Returns the asset with the names of the classes by its name, or nothing if the data has no `class_names`."""
    names = getattr(dataset, "class_names", ())
    return {LABELS_FILE: list(names)} if names else {}


def folder_of(checkpoint: Place) -> Path | None:
    """Returns the folder with these files of a checkpoint; None if it has none."""
    folder = assets.folder_of(checkpoint)
    return folder / NAME if folder is not None and (folder / NAME).is_dir() else None


def reset_tokenizer(folder: Path) -> None:
    """Takes out of the `tokenizer.json` of an export what it kept of an earlier use: a length that texts are cut to, or filled up
    to, and merges that are left out by chance. Neither this program nor `transformers` obeys the lengths, but `tokenizers` does.
    Raises OSError."""
    for path in (folder / ALONE, folder / NAME / ALONE):
        if not path.is_file():
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = found | dict.fromkeys(LENGTHS)
        if isinstance(found.get("model"), dict) and found["model"].get("dropout"):
            whole["model"] = found["model"] | {"dropout": None}
        if whole != found:
            durable.write(path, json.dumps(whole))


def _in(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}
