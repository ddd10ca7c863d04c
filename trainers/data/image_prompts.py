"""Prompts with images: which tokens stand for the images, and what the encoder reads of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gangway.errors import UsageError
from trainers.config.hf_files import CONFIG_FILE, PREPROCESSOR_FILE
from trainers.config.vision import VisionConfig
from trainers.data.images import ImageProcessor, open_image, read_processor
from trainers.text.tokenizers import FolderTokenizer, Tokenizer

MARKS = {"boi_token": 255_999, "eoi_token": 256_000}
"""The tokens before and after an image, by their names in `config.json`, if a file of Gemma 3 leaves them out."""


class Mark(NamedTuple):
    """The text that stands for an image in a prompt, such as `<start_of_image>`, and what the model reads in its place."""

    text: str
    whole: str


@dataclass(frozen=True)
class ImagePrompts:
    """Makes prompts with images for one model."""

    vision: VisionConfig
    processor: ImageProcessor
    mark: Mark | None
    """None: there is no such text, and the tokens of the images come first."""

    def marked(self, text: str, num_images: int) -> str:
        """Returns the text with a mark for each image: at its beginning, if it has none. Raises UsageError if it has another
        number of them."""
        if self.mark is None or (found := text.count(self.mark.text)) == num_images:
            return text
        if found:
            raise UsageError(
                f"the prompt {text!r} has {found} places for images ({self.mark.text}), and gets {num_images} images (--image): "
                "expected as many, or no place at all to have them at its beginning"
            )
        return self.mark.text * num_images + text

    def with_images(self, tokens: Sequence[int], num_images: int) -> list[int]:
        """Returns the tokens of a marked text with those of its images. Raises UsageError if other tokens would be taken for
        them."""
        token, expected = self.vision.image_token, num_images * (self.vision.tokens_per_image or 0)
        assert token is not None
        whole = list(tokens) if self.mark is not None else [token] * expected + list(tokens)
        if num_images and whole.count(token) != expected:
            raise UsageError(
                f"the prompt has {whole.count(token)} tokens {token} (vision.image_token): expected {expected}, those of its "
                f"{num_images} images; leave out the text that has the others"
            )
        return whole

    def read(self, paths: Sequence[str]) -> np.ndarray:
        """Returns the images of one prompt, float32[I, H, W, C]. Raises DataError or DataUnavailableError that names the file."""
        side = self.vision.image_size
        found = [self.processor(open_image(path)) for path in paths]
        for path, image in zip(paths, found, strict=True):
            if image.shape[:2] != (side, side):
                raise UsageError(
                    f"{path} has {image.shape[0]} x {image.shape[1]} pixels after {PREPROCESSOR_FILE}: expected {side} x {side} "
                    "(vision.image_size)"
                )
        return np.stack(found)


def of(vision: VisionConfig, tokenizer: Tokenizer, files: Path | None) -> ImagePrompts:
    """Returns the prompts of a model. `files` is the folder with its files of Hugging Face, if it has some. Without a
    `preprocessor_config.json` there, images are resized to `vision.image_size`, from -1 (black) to 1. Raises DataError if that
    file is not understood."""
    if files is not None and (files / PREPROCESSOR_FILE).is_file():
        processor = read_processor(files)
    else:
        processor = ImageProcessor(vision.image_size, vision.image_size, vision.num_channels)
    return ImagePrompts(vision, processor, None if files is None else _mark(vision, tokenizer, files))


def _mark(vision: VisionConfig, tokenizer: Tokenizer, files: Path) -> Mark | None:
    """Returns the mark of Gemma 3, as its processor writes it out."""
    if not isinstance(tokenizer, FolderTokenizer) or not (files / CONFIG_FILE).is_file():
        return None
    config = json.loads((files / CONFIG_FILE).read_text())
    ids = [config.get(f"{name}_index", config.get(f"{name}_id", default)) for name, default in MARKS.items()]
    begin, end, image = (tokenizer.text_of(each) for each in (*ids, vision.image_token))
    if begin is None or end is None or image is None:
        return None
    return Mark(begin, f"\n\n{begin}{image * (vision.tokens_per_image or 0)}{end}\n\n")
