"""The files of a folder of Hugging Face beside its weights. Free of JAX."""

from __future__ import annotations

import os

BYTES = "bytes"
"""The value of `data.tokenizer` for which a token is a byte."""
TEMPLATE_FILE = "chat_template.jinja"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
"""A folder with one of them has a tokenizer."""
TOKENIZER_FILES = (
    *VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    "chat_template.json",
)
MORE_TEMPLATES = "additional_chat_templates"
"""The folder with the other chat templates, such as one for tools."""
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MODEL_FILES = (CONFIG_FILE, GENERATION_FILE)
"""They describe the model, and how it is to generate."""
ADAPTER_FILE = "adapter_config.json"
"""It describes an adapter of the library PEFT."""
PREPROCESSOR_FILE = "preprocessor_config.json"
"""It describes how images are prepared."""
LABELS_FILE = "labels.json"
"""Ours: the names of the classes that a run had, in the order of their numbers."""


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in VOCABULARIES)
