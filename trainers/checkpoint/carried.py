"""The small files of a folder of Hugging Face that a run carries along, and every export has again: those of the tokenizer, and
`config.json`, `generation_config.json` and `preprocessor_config.json` as they were."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.checkpoint import assets, hugging_face
from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import BYTES, LABELS_FILE, MODEL_FILES, PREPROCESSOR_FILE, TOKENIZER_FILES

NAME = "hugging_face"
"""The name of the asset."""


class HuggingFaceFiles:
    """Files by their names in a folder of Hugging Face."""

    def __init__(self, files: Mapping[str, Path]):
        self.files = files

    def save_pretrained(self, folder: str) -> None:
        for name, path in self.files.items():
            shutil.copyfile(path, Path(folder, name))


def of(arguments: TrainingArguments, run_folder: str) -> dict[str, HuggingFaceFiles]:
    """Returns the asset by its name, or nothing if the run has no such files. Where the folders that the settings name are gone,
    the files are those that the run has kept."""
    kept = Path(run_folder, assets.FOLDER, NAME)
    files: dict[str, Path] = {}
    if (init_from := arguments.init_from) is not None:
        beginning = Path(os.path.expanduser(init_from.path))
        files |= _in(beginning if hugging_face.is_folder(beginning) else kept, (*MODEL_FILES, PREPROCESSOR_FILE))
    if (tokenizer := arguments.data.tokenizer) not in (None, BYTES):
        path = Path(os.path.expanduser(str(tokenizer)))
        files |= {"tokenizer.json": path} if path.is_file() else _in(path if path.is_dir() else kept, TOKENIZER_FILES)
    return {NAME: HuggingFaceFiles(files)} if files else {}


def labels_of(dataset: Any) -> dict[str, list[str]]:
    """Returns the asset with the names of the classes by its name, or nothing if the data has no `class_names`."""
    names = getattr(dataset, "class_names", ())
    return {LABELS_FILE: list(names)} if names else {}


def folder_of(checkpoint: Path) -> Path | None:
    """Returns the folder with these files of a checkpoint; None if it has none."""
    folder = assets.folder_of(checkpoint)
    return folder / NAME if folder is not None and (folder / NAME).is_dir() else None


def _in(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}
