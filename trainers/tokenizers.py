"""Tokenizers: bytes, a folder of Hugging Face (by `transformers`), or one file `tokenizer.json` (by `tokenizers`).

Those libraries are imported when a text is first encoded or decoded: `transformers` takes a second, which a recovery must not
wait for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import BYTES, MODEL_FILES, TOKENIZER_FILES, has_tokenizer
from trainers.errors import DataMissingError, UsageError

NUM_BYTES = 256
KEPT = os.path.join("assets", "hugging_face")
"""Where a run's folder has its tokenizer: the folder that it came from may be gone."""
NO_TEMPLATE = "has no chat template: expected chat_template.jinja, or chat_template in tokenizer_config.json"


class Tokenizer(Protocol):
    @property
    def source(self) -> str:
        """What it was made of, as `load` takes it."""

    @property
    def num_ids(self) -> int:
        """One more than the largest id: the least vocabulary that a model must have."""

    @property
    def separator(self) -> int | None:
        """The token after each document of a training text; None: there is none."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of the beginning of a text, with the token that begins texts, if the tokenizer has one."""

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text, and nothing else."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, str]], replaced: tuple[str, str] | None = None) -> list[int]:
        """Returns the tokens of a conversation that the model is to go on with. `replaced`: (a text in what the template makes,
        the text in its place). Raises UsageError if there is no template."""

    def stop_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end a text."""

    def digest(self) -> str:
        """Returns what tells this tokenizer from others."""


class Rendered(NamedTuple):
    tokens: list[int]
    offsets: list[tuple[int, int]]
    """The characters of each token: the first, and the one after the last."""


class ByteTokenizer:
    """A token is a byte."""

    source, num_ids, separator = BYTES, NUM_BYTES, None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        # The vocabulary may be larger than the bytes: such tokens have no text.
        return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]], replaced: tuple[str, str] | None = None) -> list[int]:
        raise UsageError("there is no chat template, for the tokens are bytes: give a model with a tokenizer that has one")

    def stop_ids(self) -> tuple[int, ...]:
        return ()

    def digest(self) -> str:
        return BYTES


class FolderTokenizer:
    """The tokenizer of a folder of Hugging Face, as `transformers` reads it."""

    def __init__(self, folder: str):
        self.source = folder

    @cached_property
    def _tokenizer(self) -> Any:
        # Without torch it says each time that there are no models here.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.source, local_files_only=True)
        except Exception as error:  # whatever its many classes raise, the files are the reason
            raise UsageError(f"the tokenizer in {self.source} cannot be read: {type(error).__name__}: {error}") from error
        if tokenizer.is_fast:
            reset(tokenizer.backend_tokenizer)
        elif (tokenizer.init_kwargs.get("sp_model_kwargs") or {}).get("enable_sampling"):
            raise UsageError(
                f"{self.source}: tokenizer_config.json has sp_model_kwargs.enable_sampling = true: a text would have other "
                "tokens each time; set it to false"
            )
        return tokenizer

    @property
    def num_ids(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def separator(self) -> int | None:
        return self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = self._tokenizer
        if not tokenizer.is_fast:
            # Longer than the model's context is right here: the text is cut afterwards.
            return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        # A call before may have asked `transformers` for it.
        reset(tokenizer.backend_tokenizer)
        # Without what `transformers` makes beside the tokens, which takes as long as they do.
        found = tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self._size]
        return self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def _size(self) -> int:
        return self.num_ids

    def text_of(self, token: int | None) -> str | None:
        """Returns the text of one token; None if there is no such token."""
        return self._tokenizer.convert_ids_to_tokens(token) if token is not None and token < self._size else None

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def chat(self, messages: Sequence[Mapping[str, str]], replaced: tuple[str, str] | None = None) -> list[int]:
        if not self.has_template:
            raise UsageError(f"{self.source} {NO_TEMPLATE}; leave out --chat to continue the text itself")
        text = self.render(messages, reply=True)
        # The template has written the token that begins texts already.
        return self._tokenizer(text if replaced is None else text.replace(*replaced), add_special_tokens=False)["input_ids"]

    def render(self, messages: Sequence[Mapping[str, str]], *, reply: bool = False) -> str:
        """Returns the text that the chat template makes of a conversation. `reply`: with the beginning of the assistant's next
        message. Raises whatever the template raises."""
        return self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply)

    @cached_property
    def has_marks(self) -> bool:
        """Whether the chat template marks what the assistant writes: `{% generation %}`."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._tokenizer.get_chat_template()) is not None

    def marked(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
        """Returns (the tokens of a conversation, 1 for each token that the template marks as the assistant's). Raises whatever
        the template raises."""
        found = self._tokenizer.apply_chat_template(list(messages), return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), list(found["assistant_masks"])

    def encode_rendered(self, text: str) -> Rendered:
        """Returns the tokens of what `render` returned, and where each is in the text."""
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return Rendered(found["input_ids"], found["offset_mapping"])

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are no text, such as those that begin and end a turn."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset({*self._tokenizer.all_special_ids, *(token for token, about in added if about.special)})

    def stop_ids(self) -> tuple[int, ...]:
        """Returns those of `generation_config.json`, or else of `config.json`, and the tokenizer's own."""
        found = () if self.separator is None else (self.separator,)
        for name in reversed(MODEL_FILES):
            if ids := _end_ids(Path(self.source, name)):
                return tuple(dict.fromkeys((*ids, *found)))
        return found

    def digest(self) -> str:
        # Another version of the library may take the same files otherwise.
        digest = hashlib.sha256(version("transformers").encode())
        for name in TOKENIZER_FILES:
            if (path := Path(self.source, name)).is_file():
                digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
        return digest.hexdigest()


class FileTokenizer:
    """A tokenizer in one file, as `tokenizers` writes it."""

    separator = None

    def __init__(self, path: str):
        self.source = path

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer as Read

        try:
            return reset(Read.from_file(self.source))
        except Exception as error:  # the library raises nothing more special
            raise UsageError(f"{self.source} is no tokenizer: {error}") from error

    @cached_property
    def num_ids(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token < self.num_ids])

    def chat(self, messages: Sequence[Mapping[str, str]], replaced: tuple[str, str] | None = None) -> list[int]:
        raise UsageError(f"{self.source} has no chat template: give a folder with tokenizer_config.json or chat_template.jinja")

    def stop_ids(self) -> tuple[int, ...]:
        return ()

    def digest(self) -> str:
        return hashlib.sha256(Path(self.source).read_bytes()).hexdigest()


def reset(tokenizer: Any) -> Any:
    """Returns a tokenizer of `tokenizers` without what its file may keep of an earlier use: a length that texts are cut to, a
    length that they are filled up to, and merges that are left out by chance (`dropout`)."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def of(arguments: TrainingArguments) -> Tokenizer:
    """Returns the tokenizer of a run; whether it fits the model, `check` says. Raises UsageError, or DataMissingError if it is
    not there."""
    source = arguments.data.tokenizer or BYTES
    kept = os.path.join(arguments.storage, arguments.name, KEPT)
    if source != BYTES and not os.path.exists(os.path.expanduser(source)) and has_tokenizer(kept):
        source = kept
    return load(source, "data.tokenizer")


def check(tokenizer: Tokenizer, arguments: TrainingArguments, num_ids: int | None = None) -> None:
    """Raises UsageError if the model has fewer tokens than the tokenizer. `num_ids`: those of the tokenizer, if they are known
    without reading it."""
    num_ids = tokenizer.num_ids if num_ids is None else num_ids
    if num_ids > arguments.model.vocab_size:
        raise UsageError(
            f"model.vocab_size = {arguments.model.vocab_size}: expected at least {num_ids}, for "
            + ("the data are bytes" if tokenizer.source == BYTES else f"the tokenizer {tokenizer.source} has so many tokens")
        )


@cache
def load(source: str, key: str = "tokenizer") -> Tokenizer:
    """Returns the tokenizer that `source` names. `key` names the setting in errors. Raises UsageError if it is none, and
    DataMissingError if it is not there."""
    if source == BYTES:
        return ByteTokenizer()
    path = os.path.expanduser(source)
    if os.path.isfile(path):
        return FileTokenizer(path)
    if not os.path.isdir(path):
        raise DataMissingError(
            f"{key} = {source!r} does not exist; expected a folder of Hugging Face, a tokenizer.json, or bytes"
        )
    if not has_tokenizer(path):
        raise UsageError(f"{key} = {source!r} has no tokenizer: expected a folder with tokenizer.json or tokenizer.model")
    return FolderTokenizer(path)


def _end_ids(path: Path) -> tuple[int, ...]:
    try:
        found = json.loads(path.read_text()).get("eos_token_id")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
