"""Models with images of which the decoder alone is read, as a model of texts: Mistral Small 3.1 and those after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.models.hf import config as text
from trainers.models.hf import keys

MISTRAL3 = "mistral3"
ENCODER = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""The beginnings of the names of what is left out of the weights."""


def is_one(found: Any) -> bool:
    """Whether a `config.json` is of such a model."""
    return isinstance(found, Mapping) and found.get("model_type") == MISTRAL3


def left_out(found: Any) -> tuple[str, ...]:
    """Returns the beginnings of the names of tensors that belong to no part that is read; () if all parts are."""
    return ENCODER if is_one(found) else ()


def read(found: keys.Json) -> ModelConfig:
    """Returns the configuration of the decoder. Raises UsageError that names what is not understood."""
    if lines := list(_problems(found)):
        raise UsageError("\n".join(lines))
    of_text = found["text_config"]
    # Beside the sections, as transformers reads it. A file that says nothing has a table of its own for the logits: without
    # that, the tensor that is missing is named.
    tied = found.get("tie_word_embeddings", of_text.get("tie_word_embeddings", False))
    try:
        return text.read({**of_text, "model_type": "mistral", "tie_word_embeddings": tied})
    except UsageError as error:
        raise UsageError("\n".join(f"text_config: {line}" for line in str(error).splitlines())) from error


def _problems(found: keys.Json) -> Iterator[str]:
    of_text = found.get("text_config")
    if not isinstance(of_text, Mapping):
        yield f"text_config is missing: a configuration of model_type {MISTRAL3} has it"
        return
    yield from keys.problems(found, keys.TEXT_PART, f"model_type {MISTRAL3}")
    if (kind := of_text.get("model_type", "mistral")) != "mistral":
        yield f"text_config.model_type = {kind!r}: expected mistral"
