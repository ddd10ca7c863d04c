"""Images on the host: opened by Pillow, and made the numbers that an encoder reads, as `preprocessor_config.json` says."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainers.config.hf_files import PREPROCESSOR_FILE
from trainers.errors import DataError, DataMissingError, DataUnavailableError

BILINEAR, BICUBIC = 2, 3
RESAMPLE_OF = {"ViT": BILINEAR, "Siglip": BICUBIC, "Gemma3": BILINEAR}
"""How images are resized, in Pillow's numbers, if a file does not say it, by the beginning of its `image_processor_type`."""
MODES = {1: "L", 3: "RGB"}
"""Pillow's names of images with so many colours."""
REFUSED = ("do_center_crop", "do_pad", "do_pan_and_scan", "do_convert_grayscale")


@dataclass(frozen=True)
class ImageProcessor:
    """Makes float32[height, width, colours] of an image: resized, times `scale`, minus `mean`, over `deviation`."""

    height: int | None
    """Pixels; None: the image is not resized."""
    width: int | None
    num_channels: int = 3
    resample: int = BILINEAR
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Of each colour."""
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, image: Any) -> np.ndarray:
        """`image` is one of Pillow, or an array uint8[height, width, colours] or [height, width]."""
        from PIL import Image

        if not isinstance(image, Image.Image):
            image = Image.fromarray(np.squeeze(np.asarray(image)))
        image = image.convert(MODES[self.num_channels])
        if self.height is not None and self.width is not None:
            image = image.resize((self.width, self.height), Image.Resampling(self.resample))
        pixels = np.asarray(image, np.float32).reshape(image.height, image.width, self.num_channels)
        mean, deviation = (np.asarray(each[: self.num_channels], np.float32) for each in (self.mean, self.deviation))
        return (pixels * np.float32(self.scale) - mean) / deviation


def read_processor(folder: str | os.PathLike[str]) -> ImageProcessor:
    """Returns what the `preprocessor_config.json` of a folder of Hugging Face describes. Raises DataMissingError if there is
    none, and DataError that names what is not understood."""
    path = Path(folder).expanduser() / PREPROCESSOR_FILE
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise _unreadable(str(path), error) from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    if problems := list(_problems(found)):
        raise DataError("\n".join(f"{path}: {problem}" for problem in problems))
    height, width = _size(found) if found.get("do_resize", True) else (None, None)
    scaled, normed = found.get("do_rescale", True), found.get("do_normalize", True)
    kind = found.get("image_processor_type") or found.get("feature_extractor_type") or ""
    return ImageProcessor(
        height,
        width,
        resample=found.get("resample") or next(value for name, value in RESAMPLE_OF.items() if kind.startswith(name)),
        scale=found.get("rescale_factor", 1 / 255) if scaled else 1.0,
        mean=tuple(found.get("image_mean") or (0.5,) * 3) if normed else (0.0,) * 3,
        deviation=tuple(found.get("image_std") or (0.5,) * 3) if normed else (1.0,) * 3,
    )


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    kind = found.get("image_processor_type") or found.get("feature_extractor_type") or ""
    if not kind.startswith(tuple(RESAMPLE_OF)):
        yield f"image_processor_type = {kind!r}: expected one that begins with {', '.join(RESAMPLE_OF)}"
    for name in REFUSED:
        if found.get(name):
            yield f"{name} = true: expected false or null"
    if found.get("do_resize", True) and None in _size(found):
        yield f"size = {found.get('size')!r}: expected a number of pixels, or height and width"


def _size(found: Mapping[str, Any]) -> tuple[int | None, int | None]:
    size = found.get("size", 224)
    return (size, size) if isinstance(size, int) else (size.get("height"), size.get("width"))


def open_image(path: str | os.PathLike[str], content: bytes | None = None) -> Any:
    """Returns an image of Pillow, read to its end. With `content` those are its bytes, and `path` is its name in errors. Raises
    DataMissingError or DataUnavailableError if the file cannot be read, and DataError if it is no whole image."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content) if content is not None else path) as image:
            image.load()
            return image
    except UnidentifiedImageError as error:
        raise DataError(f"{path} is no image that Pillow knows: leave it out, or bring it into another format") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} is too large an image: {error}") from error
    except OSError as error:
        # What Pillow finds wrong in the content has no number of the system.
        if error.errno is None:
            raise DataError(f"{path} is damaged: {error}") from error
        raise _unreadable(str(path), error) from error


def _unreadable(path: str, error: OSError) -> DataUnavailableError:
    kind = DataMissingError if isinstance(error, FileNotFoundError | PermissionError) else DataUnavailableError
    return kind(f"{path} cannot be read: {error.strerror}; is it there, and yours to read?")
