"""Images with labels: in folders of one class each, or in files of Parquet.

`data.dataset: trainers.data.sources.images:labelled_images` reads `data.paths`, for
`trainers.tasks.image_classification.ImageClassificationTask`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gangway.errors import DataError, DataMissingError, DataUnavailableError
from trainers import runtime
from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import CONFIG_FILE, PREPROCESSOR_FILE
from trainers.data.epoch_order import held_out
from trainers.data.images import ImageProcessor, open_image, read_processor
from trainers.models.encoder import classifier

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
PARQUET = ".parquet"
KEPT_GROUPS = 8
"""Groups of rows of Parquet that stay in memory: a row is read with those of its group."""
SHOWN = 10


class ImageFiles:
    """The images in folders: `FOLDER/CLASS/...`. They come in the order of a digest of their relative paths, which is a random
    one, and the same on every machine."""

    def __init__(self, found: Sequence[tuple[Path, Path]]):
        """`found`: the path of each image relative to its folder, and as it is."""
        for relative, path in found:
            if len(relative.parts) < 2:
                raise DataError(f"data.paths: {path} is in no folder of a class: expected FOLDER/CLASS/{path.name}")
        self.files = sorted(found, key=lambda file: hashlib.sha256(file[0].as_posix().encode()).digest())
        self.classes = sorted({relative.parts[0] for relative, _ in found})
        """The names of the classes, in the order of their numbers."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        relative, path = self.files[index]
        return open_image(path), self.classes.index(relative.parts[0])


class ParquetImages:
    """The rows of files of Parquet: a column `image` (bytes, or a struct with `bytes`, as `datasets` writes them) and a column
    `label` of integers. A row is read with the others of its group when it is used."""

    def __init__(self, paths: Sequence[Path]):
        import pyarrow.parquet as pq

        self.files = []
        self.classes: list[str] = []
        """The names of the classes, in the order of their numbers, if the files say them, as `datasets` writes them; else []."""
        groups: list[tuple[int, int, int]] = []
        for number, path in enumerate(paths):
            try:
                file = pq.ParquetFile(path)
            except (OSError, ValueError) as error:
                raise DataError(f"data.paths: {path} is no whole file of Parquet: {error}") from error
            if missing := {"image", "label"} - set(names := file.schema_arrow.names):
                raise DataError(f"data.paths: {path} has no column {', '.join(sorted(missing))}: it has {', '.join(names)}")
            self._check_classes(path, _class_names(file.schema_arrow.metadata))
            self.files.append(path)
            groups += [(number, each, file.metadata.row_group(each).num_rows) for each in range(file.num_row_groups)]
        self._groups = groups
        self._ends = list(itertools.accumulate(rows for _, _, rows in groups))
        self._read = lru_cache(KEPT_GROUPS)(self._read_group)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[Any, int]:
        group = bisect.bisect_right(self._ends, index)
        number, _, rows = self._groups[group]
        row = index - (self._ends[group] - rows)
        images, labels = self._read(group)
        where = f"{self.files[number]}, row {index - sum(rows for file, _, rows in self._groups if file < number)}"
        image, label = images[row].as_py(), labels[row].as_py()
        content = image.get("bytes") if isinstance(image, Mapping) else image
        if not isinstance(content, bytes) or not isinstance(label, int) or isinstance(label, bool):
            raise DataError(f"{where}: image is {type(content).__name__}, label is {label!r}: expected bytes and an integer")
        return open_image(where, content), label

    def check_labels(self, num_labels: int) -> None:
        """Raises DataError for the first label that is no integer from 0 on, below `num_labels`."""
        import pyarrow.parquet as pq

        for path in self.files:
            labels = pq.read_table(path, columns=["label"])["label"].to_pylist()
            wrong = (row for row, label in enumerate(labels) if type(label) is not int or not 0 <= label < num_labels)
            if (row := next(wrong, None)) is not None:
                raise DataError(
                    f"data.paths: {path}, row {row} has the label {labels[row]!r}: expected an integer from 0 to "
                    f"{num_labels - 1} (vision.num_labels)"
                )

    def _check_classes(self, path: Path, classes: list[str]) -> None:
        if self.files and classes != self.classes:
            raise DataError(
                f"data.paths: {path} has the classes {classes}, and {self.files[0]} {self.classes}: expected the same"
            )
        self.classes = classes

    def _read_group(self, group: int) -> tuple[Any, Any]:
        import pyarrow.parquet as pq

        number, within, _ = self._groups[group]
        try:
            # Opened anew: several threads read at once, and a file has one position.
            table = pq.ParquetFile(self.files[number]).read_row_group(within, columns=["image", "label"])
        except OSError as error:
            raise DataUnavailableError(f"{self.files[number]} cannot be read: {error}") from error
        return table["image"], table["label"]


class LabelledImages:
    """Examples {"image": float32[height, width, colours], "label": int32} of a part of some images."""

    reads_records = False

    def __init__(self, images: ImageFiles | ParquetImages, part: np.ndarray, processor: ImageProcessor, num_labels: int):
        self.images, self.part, self.processor, self.num_labels = images, part, processor, num_labels
        self.class_names = tuple(images.classes)
        """The names of the classes, in the order of their numbers: an export has them as `id2label`. (): nothing says them."""

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        image, label = self.images[int(self.part[index])]
        if not 0 <= label < self.num_labels:
            raise DataError(
                f"image {self.part[index]} has the label {label}: expected 0 to {self.num_labels - 1} (vision.num_labels)"
            )
        return {"image": self.processor(image), "label": np.asarray(label, np.int32)}


def labelled_images(arguments: TrainingArguments) -> tuple[LabelledImages, LabelledImages]:
    """Returns (training examples, held-out examples) of `data.paths`; a random `data.eval_fraction` of them is held out.

    Classes that are folders have the numbers that the model of `init_from` gives them, if it has the very same ones
    (`id2label`), and else those of the alphabet. Images are prepared as the folder of `init_from` says, if it is one of Hugging
    Face that does; else resized to `vision.image_size`, from -1 (black) to 1. Raises DataError or DataMissingError."""
    config = classifier(arguments.vision)
    num_labels = config.num_labels or 0
    images = _images([Path(path).expanduser() for path in arguments.data.paths])
    if (isinstance(images, ImageFiles) or images.classes) and len(images.classes) != num_labels:
        shown = ", ".join(images.classes[:SHOWN]) + (", ..." if len(images.classes) > SHOWN else "")
        kind = "folders of classes" if isinstance(images, ImageFiles) else "classes"
        raise DataError(f"vision.num_labels = {num_labels}: data.paths has {len(images.classes)} {kind} ({shown})")
    processor = ImageProcessor(config.image_size, config.image_size, config.num_channels)
    begun = arguments.init_from
    names = [] if begun is None else _names_in(Path(begun.path).expanduser() / CONFIG_FILE)
    if isinstance(images, ParquetImages):
        images.check_labels(num_labels)
        _check_numbers(images.classes, names, arguments)
    elif sorted(names) == images.classes:
        images.classes = names
    if begun is not None and (Path(begun.path).expanduser() / PREPROCESSOR_FILE).is_file():
        processor = read_processor(begun.path)
    parts = held_out(len(images), int(len(images) * arguments.data.eval_fraction))
    train, held = (LabelledImages(images, part, processor, num_labels) for part in parts)
    return train, held


def _check_numbers(classes: Sequence[str], names: Sequence[str], arguments: TrainingArguments) -> None:
    """Raises DataError if a model has the classes of the data, with other numbers."""
    if sorted(classes) == sorted(names) and list(classes) != list(names):
        begun = arguments.init_from
        raise DataError(
            f"data.paths numbers the classes {', '.join(classes[:SHOWN])}, and id2label of init_from = {begun and begun.path!r} "
            f"{', '.join(names[:SHOWN])}: give the labels of the data the numbers of the model, or change its id2label"
        )


def _names_in(config: Path) -> list[str]:
    """Returns the names of the classes that a `config.json` has; [] if there is none, or if it has none."""
    try:
        found = json.loads(config.read_text()).get("id2label") or {}
        return [str(found[key]) for key in sorted(found, key=int)]
    except (OSError, ValueError, AttributeError):  # what else is wrong with it, the reader of its weights says
        return []


def _class_names(metadata: Mapping[bytes, bytes] | None) -> list[str]:
    """Returns the names of the classes that `datasets` has written into a file of Parquet; [] if it has not."""
    try:
        about = json.loads((metadata or {}).get(b"huggingface", b"{}"))
        return list(about["info"]["features"]["label"].get("names") or [])
    except (ValueError, KeyError, AttributeError, TypeError):
        return []


def _images(paths: Sequence[Path]) -> ImageFiles | ParquetImages:
    for path in paths:
        if not path.exists():
            raise DataMissingError(f"data.paths: {str(path)!r} does not exist (looked for {os.path.abspath(path)})")
    # Folders of images are large: one look at each.
    listed = [(path, [path] if path.is_file() else sorted(path.rglob("*"))) for path in paths]
    parquet = [file for path, files in listed for file in files if file == path or file.match(f"*{PARQUET}")]
    found = [(file.relative_to(path), file) for path, files in listed for file in files if file.suffix.lower() in SUFFIXES]
    images = ParquetImages(parquet) if parquet else ImageFiles(found)
    read, kind = ({*parquet}, f"are no {PARQUET}") if parquet else ({file for _, file in found}, "are no images")
    for path, files in listed:
        if unread := sum(file not in read and file.is_file() for file in files):
            of = unread + sum(file in read for file in files)
            runtime.current().note(f"data.paths {path}: {unread:,} of {of:,} files {kind} and are left out")
    if len(images) == 0:
        raise DataMissingError(
            f"data.paths: no image in {', '.join(map(str, paths))}; expected FOLDER/CLASS/NAME with the endings "
            f"{', '.join(SUFFIXES)}, or files {PARQUET}"
        )
    return images
