"""Images on the host: opened by Pillow, and made the numbers that an encoder reads, as `preprocessor_config.json` says."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gangway.errors import DataError, DataMissingError, DataUnavailableError
from trainers.config.hf_files import PREPROCESSOR_FILE

BILINEAR, BICUBIC = 2, 3
RESAMPLE_OF = {"ViT": BILINEAR, "Siglip": BICUBIC, "Gemma3": BILINEAR}
"""How images are resized, in Pillow's numbers, if a file does not say it, by the beginning of its `image_processor_type`."""
MODES = {1: "L", 3: "RGB"}
"""Pillow's names of images with so many colours."""
DONE = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
"""The steps of a preparation that are done here, by their settings."""
FULL_16_BITS = 65535


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
        """`image` is one of Pillow, or an array uint8[height, width, colours] or [height, width]. Raises DataError for one whose
        numbers are not from 0 to 255, or to 65535."""
        from PIL import Image

        try:
            image = plain(image if isinstance(image, Image.Image) else _of_array(np.asarray(image)))
        except ValueError as error:
            raise DataError(f"an image cannot be read: {error}") from error
        image = image.convert(MODES[self.num_channels])
        if self.height is not None and self.width is not None:
            image = image.resize((self.width, self.height), Image.Resampling(self.resample))
        pixels = np.asarray(image, np.float32).reshape(image.height, image.width, self.num_channels)
        mean, deviation = (np.asarray(each[: self.num_channels], np.float32) for each in (self.mean, self.deviation))
        return (pixels * np.float32(self.scale) - mean) / deviation


def plain(image: Any) -> Any:
    """Returns an image of Pillow as one of 8 bits for each colour, without transparency and upright: turned as its EXIF says, 16
    bits scaled to 8, and what is transparent over white. Raises ValueError for numbers whose range nothing says."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        return Image.fromarray(np.round(np.asarray(image, np.float64) * (255 / FULL_16_BITS)).astype(np.uint8))
    if image.mode in ("I", "F"):
        numbers = "whole numbers of 32 bits" if image.mode == "I" else "floating-point numbers"
        raise ValueError(f"its shades are {numbers}, and nothing says which one is white: save it with 8 or 16 bits")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode in MODES.values() else image.convert("RGB")


def _of_array(array: np.ndarray) -> Any:
    from PIL import Image

    array = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    if array.dtype not in (np.uint8, np.uint16, np.bool_):
        raise ValueError(f"it is an array of {array.dtype}: expected uint8, from 0 to 255")
    try:
        return Image.fromarray(array)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is an array {array.dtype}{list(array.shape)}: expected [height, width, colours]") from error


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
    return ImageProcessor(
        height,
        width,
        # 0 is a way to resize, too.
        resample=_given(found, "resample", next(value for name, value in RESAMPLE_OF.items() if _kind(found).startswith(name))),
        scale=_given(found, "rescale_factor", 1 / 255) if scaled else 1.0,
        mean=_of_colours(found, "image_mean") if normed else (0.0,) * 3,
        deviation=_of_colours(found, "image_std") if normed else (1.0,) * 3,
    )


def _kind(found: Mapping[str, Any]) -> str:
    return found.get("image_processor_type") or found.get("feature_extractor_type") or ""


def _given(found: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns a setting; the default if it is left out, or null."""
    value = found.get(name)
    return default if value is None else value


def _of_colours(found: Mapping[str, Any], name: str) -> tuple[float, ...]:
    value = _given(found, name, 0.5)
    return tuple(value) if isinstance(value, list) else (value,) * 3


def _problems(found: Any) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"it is {type(found).__name__}: expected an object, {{...}}"
        return
    if not _kind(found).startswith(tuple(RESAMPLE_OF)):
        yield f"image_processor_type = {_kind(found)!r}: expected one that begins with {', '.join(RESAMPLE_OF)}"
    for name in found:
        if name.startswith("do_") and name not in DONE and found[name]:
            yield f"{name} = true: expected false or null"
    if found.get("do_resize", True) and not all(_is_number(each, 1, int) for each in _size(found)):
        yield f"size = {found.get('size')!r}: expected a number of pixels, or height and width"
    if _given(found, "resample", BILINEAR) not in range(6):
        yield f"resample = {found['resample']!r}: expected one of Pillow's numbers, 0 to 5"
    if not _is_number(_given(found, "rescale_factor", 1.0), 0):
        yield f"rescale_factor = {found['rescale_factor']!r}: expected a number from 0 on"
    for name in ("image_mean", "image_std"):
        numbers = _of_colours(found, name)
        if len(numbers) != 3 or not all(_is_number(each) for each in numbers) or (name == "image_std" and 0 in numbers):
            yield f"{name} = {found[name]!r}: expected three numbers{', none of them 0' if name == 'image_std' else ''}"


def _is_number(value: Any, least: float = -math.inf, kind: Any = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value < math.inf


def _size(found: Mapping[str, Any]) -> tuple[int | None, int | None]:
    size = _given(found, "size", 224)
    return (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)


def open_image(path: str | os.PathLike[str], content: bytes | None = None) -> Any:
    """Returns an image of Pillow, read to its end and made `plain`; of several in a file, the first. With `content` those are its
    bytes, and `path` is its name in errors. Raises DataMissingError or DataUnavailableError if the file cannot be read, and
    DataError if it is no whole image."""
    from PIL import Image, UnidentifiedImageError

    try:
        content = Path(path).read_bytes() if content is None else content
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            made, looks_at_no_checksum = plain(image), image.format == "PNG"
        if looks_at_no_checksum:
            # Opened anew: an image that was read cannot be verified.
            with Image.open(io.BytesIO(content)) as image:
                image.verify()
        return made
    except UnidentifiedImageError as error:
        raise DataError(f"{path} is no image that Pillow knows: leave it out, or bring it into another format") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} is too large an image: {error}") from error
    except OSError as error:
        # What Pillow finds wrong in the content has no number of the system.
        if error.errno is None:
            raise DataError(f"{path} is damaged: {error}") from error
        raise _unreadable(str(path), error) from error
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # what its decoders stumble over: the content is the reason
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _unreadable(path: str, error: OSError) -> DataUnavailableError:
    kind = DataMissingError if isinstance(error, FileNotFoundError | PermissionError) else DataUnavailableError
    return kind(f"{path} cannot be read: {error.strerror}; is it there, and yours to read?")
