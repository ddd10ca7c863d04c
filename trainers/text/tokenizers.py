"""Tokenizers: bytes, a folder of Hugging Face (by `transformers`), or one file `tokenizer.json` (by `tokenizers`).

Those libraries are imported when a text is first encoded or decoded: `transformers` takes a second, which a recovery must not
wait for.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from gangway.errors import DataMissingError, UsageError
from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import BYTES, MODEL_FILES, MORE_TEMPLATES, TOKENIZER_FILES, has_tokenizer
from trainers.text import turns
from trainers.text.turns import NO_FIELDS

NUM_BYTES = 256
KEPT = os.path.join("assets", "hugging_face")
"""Where a run's folder has its tokenizer: the folder that it came from may be gone."""
PROBE = "a"
"""A text that tells what a tokenizer puts around one."""
NO_TEMPLATE = "has no chat template: expected chat_template.jinja, or chat_template in tokenizer_config.json"


class Tokenizer(ABC):
    source: str
    """What it was made of, as `load` takes it."""

    @property
    @abstractmethod
    def num_ids(self) -> int:
        """One more than the largest id: the least vocabulary that a model must have."""

    @property
    @abstractmethod
    def separator(self) -> int | None:
        """The token after each document of a training text; None: there is none."""

    @property
    @abstractmethod
    def begin(self) -> tuple[int, ...]:
        """The tokens before each text."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of the beginning of a text, such as a prompt: `begin` is before it, once, and nothing after it."""
        return begun(self.begin, self.encode_documents([text])[0])

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text, and nothing else."""

    @abstractmethod
    def placed(self, text: str) -> Rendered | None:
        """Returns the tokens of a text, and where each is in it; None if this tokenizer does not tell."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str: ...

    @abstractmethod
    def raw(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens with those that are special, such as the end of a text."""

    @abstractmethod
    def chat(self, messages: Sequence[Mapping[str, str]], replaced: tuple[str, str] | None = None) -> list[int]:
        """Returns the tokens of a conversation that the model is to go on with. `replaced`: (a text in what the template makes,
        the text in its place). Raises UsageError if there is no template."""

    @abstractmethod
    def text_of(self, token: int | None) -> str | None:
        """Returns the text of one token; None if there is no such token."""

    @abstractmethod
    def stop_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end a text, or a turn of the assistant."""

    def stop_texts(self) -> tuple[str, ...]:
        """Returns the texts that end a turn of the assistant, where that is no token of its own."""
        return ()

    @abstractmethod
    def content(self) -> str:
        """Returns the digest of its files."""

    @abstractmethod
    def digest(self) -> str:
        """Returns what tells this tokenizer from others, and from that of another version of the library that reads its files."""


class Rendered(NamedTuple):
    tokens: list[int]
    offsets: list[tuple[int, int]]
    """The characters of each token: the first, and the one after the last."""


class Around(NamedTuple):
    """What a tokenizer puts around a text."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def last(self) -> int | None:
        return self.end[-1] if self.end else None


def around(whole: Sequence[int], bare: Sequence[int], source: str) -> Around:
    """Returns what is around `bare`, the tokens of a text, in `whole`. Raises UsageError if it is not there, or ends with several
    tokens."""
    bare, whole = [*bare], [*whole]
    start = next((place for place in range(len(whole)) if whole[place : place + len(bare)] == bare), None)
    if start is None or len(whole) - start - len(bare) > 1:
        raise UsageError(
            f"the tokenizer {source} makes {whole} of a text whose tokens are {bare}: expected at most one after them"
        )
    return Around(tuple(whole[:start]), tuple(whole[start + len(bare) :]))


def begun(begin: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Returns the tokens of a text with what begins texts, once: the text may have it already."""
    return [*tokens] if [*tokens[: len(begin)]] == [*begin] else [*begin, *tokens]


def ended(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Returns the tokens of a text with the token that ends texts, once, if the tokenizer has one."""
    end = tokenizer.separator
    return [*tokens] if end is None or [*tokens[-1:]] == [end] else [*tokens, end]


def specials(tokenizer: Tokenizer) -> list[str]:
    """Returns what begins and ends each kind of document, a line for each, as training and generation have it."""
    if tokenizer.source == BYTES:
        return ["a text ends with a new line; a prompt and its completion have nothing around them"]
    begin = "".join(tokenizer.text_of(token) or "" for token in tokenizer.begin)
    end = tokenizer.text_of(tokenizer.separator) or ""
    lines = [f"a text: {begin}...{end}", f"a prompt: {begin}..., and then its completion: ...{end}"]
    if isinstance(tokenizer, FolderTokenizer) and tokenizer.has_template:
        ending = tokenizer.end_of_turn
        how = f"{ending.strip()!r} ends a turn of the assistant" if ending else "no text ends each turn of the assistant"
        lines.append(f"a conversation: what its chat template writes, and nothing else; {how}")
    return lines


class ByteTokenizer(Tokenizer):
    """A token is a byte."""

    source, num_ids, separator, begin = BYTES, NUM_BYTES, None, ()

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def placed(self, text: str) -> Rendered | None:
        places = [(place, place + 1) for place, each in enumerate(text) for _ in each.encode()]
        return Rendered(self.encode(text), places)

    def decode(self, tokens: Sequence[int]) -> str:
        # The vocabulary may be larger than the bytes: such tokens have no text.
        return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")

    raw = decode

    def text_of(self, token: int | None) -> str | None:
        return None if token is None else self.decode([token])

    def chat(self, messages: Sequence[Mapping[str, str]], replaced: tuple[str, str] | None = None) -> list[int]:
        raise UsageError("there is no chat template, for the tokens are bytes: give a model with a tokenizer that has one")

    def stop_ids(self) -> tuple[int, ...]:
        return ()

    def content(self) -> str:
        return BYTES

    def digest(self) -> str:
        return BYTES


class _OfLibrary(Tokenizer):
    """A tokenizer of a library: `_tokenizer` is its object, `_around` what that puts around a text."""

    _tokenizer: Any
    _around: Any

    @cached_property
    def num_ids(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def begin(self) -> tuple[int, ...]:
        return self._around.begin


class FolderTokenizer(_OfLibrary):
    """The tokenizer of a folder of Hugging Face, as `transformers` reads it. `day`: what a chat template takes for today.
    `defaults`: fields that it gets where a conversation has none of that name."""

    def __init__(self, folder: str, day: date | None = None, defaults: Mapping[str, Any] = NO_FIELDS):
        self.source, self.day, self.defaults = folder, day, defaults

    @cached_property
    def _tokenizer(self) -> Any:
        # Without torch it says each time that there are no models here.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        try:
            # False, and not left out: the library would ask on the terminal, and run the code of the folder at a `y`.
            tokenizer = AutoTokenizer.from_pretrained(self.source, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever its many classes raise, the files are the reason
            why = f"{type(error).__name__}: {error}"
            if "trust_remote_code" in why:
                why = "it is code of the folder (auto_map), which is not run here: give a folder whose tokenizer.json says all"
            raise UsageError(f"the tokenizer in {self.source} cannot be read: {why}") from error
        if tokenizer.is_fast:
            reset(tokenizer.backend_tokenizer)
        elif (tokenizer.init_kwargs.get("sp_model_kwargs") or {}).get("enable_sampling"):
            raise UsageError(
                f"{self.source}: tokenizer_config.json has sp_model_kwargs.enable_sampling = true: a text would have other "
                "tokens each time; set it to false"
            )
        return tokenizer

    @property
    def separator(self) -> int | None:
        end = self._tokenizer.eos_token_id
        return self._around.last if end is None else end

    @cached_property
    def _around(self) -> Around:
        whole, bare = (self._tokenizer(PROBE, add_special_tokens=each)["input_ids"] for each in (True, False))
        return around(whole, bare, self.source)

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

    def placed(self, text: str) -> Rendered | None:
        return self.encode_rendered(text) if self._tokenizer.is_fast else None

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self.num_ids]
        return self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def raw(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self.num_ids]
        return self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text_of(self, token: int | None) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token) if token is not None and token < self.num_ids else None

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def chat(self, messages: Sequence[Mapping[str, str]], replaced: tuple[str, str] | None = None) -> list[int]:
        if not self.has_template:
            raise UsageError(f"{self.source} {NO_TEMPLATE}; leave out --chat to continue the text itself")
        text = self.render(messages, reply=True)
        # The template has written the token that begins texts already.
        return self._tokenizer(text if replaced is None else text.replace(*replaced), add_special_tokens=False)["input_ids"]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply: bool = False,
        fields: Mapping[str, Any] = NO_FIELDS,
        day: date | None = None,
    ) -> str:
        """Returns the text that the chat template makes of a conversation. `reply`: with the beginning of the assistant's next
        message. `fields`: what else the template gets, such as `tools`. `day`: another one than the tokenizer's. Raises whatever
        the template raises."""
        return self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.template(fields, day),
            tokenize=False,
            add_generation_prompt=reply,
            **fields,
        )

    def template(self, fields: Mapping[str, Any] = NO_FIELDS, day: date | None = None) -> str:
        """Returns the chat template for conversations with such fields. It has `day` for today, else that of the tokenizer, else
        that of the calendar."""
        text = self.own_template(fields)
        if unread := [name for name in self.defaults if name in self.reserved or not re.search(rf"\b{re.escape(name)}\b", text)]:
            raise UsageError(
                f"data.template_fields: the chat template of {self.source} reads no {', '.join(unread)}: leave it out"
            )
        return turns.with_day(turns.with_fields(text, self.defaults), day or self.day or date.today())

    def own_template(self, fields: Mapping[str, Any] = NO_FIELDS) -> str:
        """Returns the chat template for conversations with such fields, as the folder has it."""
        return self._tokenizer.get_chat_template(tools=fields.get("tools"))

    @cached_property
    def reserved(self) -> frozenset[str]:
        """The names that a field for the template cannot have: the library has them for itself."""
        names = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() | {"messages", *turns.OF_THE_DAY}
        return frozenset(names - {"tools", "documents", "kwargs"})

    def has_marks(self, fields: Mapping[str, Any] = NO_FIELDS) -> bool:
        """Whether the chat template marks what the assistant writes: `{% generation %}`."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.template(fields)) is not None

    def marked(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Returns (what `render` returns, the pieces of it that the template marks: (the first character, the one after the last)
        of each). Raises whatever the template raises."""
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        # By characters. The tokens that `apply_chat_template` marks go to the end of the text, where a piece is the first token
        # or ends within none.
        (text,), (pieces,) = render(
            [list(messages)],
            chat_template=self.template(fields),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **fields},
        )
        return text, pieces

    @cached_property
    def opening(self) -> str:
        """What the template writes before the answer of a generation, if nothing but the messages is given to it."""
        return turns.opening_of(self)

    @cached_property
    def opening_id(self) -> int | None:
        """The first token of `opening`; None if there is none."""
        return next(iter(self.encode_rendered(self.opening).tokens), None)

    @cached_property
    def end_of_turn(self) -> str | None:
        """The text that ends each turn of the assistant, through its first special tokens, as <|END_RESPONSE|> and
        <|END_OF_TURN_TOKEN|>; "" if the template writes none, and None if it does not tell."""
        after = turns.after_a_turn(self) if self.has_template else None
        if after is None:
            return None
        last, between = map(self.encode_rendered, after)
        # By tokens: those of two ends, such as <|return|> and <|end|>, may begin alike.
        common = turns.num_common(last.tokens, between.tokens)
        is_special = [*(token in self.special_ids for token in last.tokens[:common]), False]
        # The last of those that follow each other.
        special = next((place for place in range(common) if is_special[place] and not is_special[place + 1]), None)
        end = after[0][: last.offsets[common - 1 if special is None else special][1]] if common else ""
        if end.strip():
            return end.rstrip() if special is None else end
        return None if {*last.tokens[common : common + 1]} <= self.special_ids and last.tokens[common:] else ""

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
        """Returns those of `generation_config.json`, or else of `config.json`, the tokenizer's own, and the last token of what
        ends a turn of the assistant, if that is special tokens alone. Else `stop_texts` has it."""
        found: tuple[int, ...] = () if self.separator is None else (self.separator,)
        tokens = self.encode_rendered((self.end_of_turn or "").strip()).tokens
        if tokens and {*tokens} <= self._tokenizer.added_tokens_decoder.keys():
            found += (tokens[-1],)
        for name in reversed(MODEL_FILES):
            if ids := _end_ids(Path(self.source, name)):
                return tuple(dict.fromkeys((*ids, *found)))
        return found

    def stop_texts(self) -> tuple[str, ...]:
        """Returns the text that ends a turn of the assistant, if it is no token of its own."""
        end = (self.end_of_turn or "").strip()
        tokens = self.encode_rendered(end).tokens
        return () if not end or {*tokens[-1:]} <= {*self.stop_ids()} else (end,)

    def content(self) -> str:
        digest, folder = hashlib.sha256(), Path(self.source)
        for path in (*map(folder.joinpath, TOKENIZER_FILES), *sorted(folder.glob(f"{MORE_TEMPLATES}/*"))):
            if path.is_file():
                digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
        return digest.hexdigest()

    def digest(self) -> str:
        # Another version of the libraries may take the same files otherwise.
        about = [version("transformers"), version("tokenizers"), str(self.day), dict(self.defaults), self.content()]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()


class FileTokenizer(_OfLibrary):
    """A tokenizer in one file, as `tokenizers` writes it."""

    def __init__(self, path: str):
        self.source = path

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer as Read

        try:
            return reset(Read.from_file(self.source))
        except Exception as error:  # the library raises nothing more special
            raise UsageError(f"{self.source} is no tokenizer: {error}") from error

    @property
    def separator(self) -> int | None:
        return self._around.last

    @cached_property
    def _around(self) -> Around:
        whole, bare = (self._tokenizer.encode(PROBE, add_special_tokens=each).ids for each in (True, False))
        return around(whole, bare, self.source)

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def placed(self, text: str) -> Rendered | None:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return Rendered(found.ids, found.offsets)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token < self.num_ids])

    def raw(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token < self.num_ids], skip_special_tokens=False)

    def text_of(self, token: int | None) -> str | None:
        return None if token is None else self._tokenizer.id_to_token(token)

    def chat(self, messages: Sequence[Mapping[str, str]], replaced: tuple[str, str] | None = None) -> list[int]:
        raise UsageError(f"{self.source} has no chat template: give a folder with tokenizer_config.json or chat_template.jinja")

    def stop_ids(self) -> tuple[int, ...]:
        return () if self.separator is None else (self.separator,)

    def content(self) -> str:
        return hashlib.sha256(Path(self.source).read_bytes()).hexdigest()

    def digest(self) -> str:
        return hashlib.sha256(f"{version('tokenizers')} {self.content()}".encode()).hexdigest()


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
    kept = os.path.join(arguments.run_folder, KEPT)
    if source != BYTES and not os.path.exists(os.path.expanduser(source)) and has_tokenizer(kept):
        source = kept
    day = arguments.data.template_date
    fields = tuple(sorted(arguments.data.template_fields.items()))
    return load(source, "data.tokenizer", None if day is None else date.fromisoformat(day), fields)


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
def load(source: str, key: str = "tokenizer", day: date | None = None, fields: tuple[tuple[str, Any], ...] = ()) -> Tokenizer:
    """Returns the tokenizer that `source` names. `key` names the setting in errors; `day` is today for its template, and `fields`
    are what that has by default. Raises UsageError if it is none, and DataMissingError if it is not there."""
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
    return FolderTokenizer(path, day, dict(fields))


def _end_ids(path: Path) -> tuple[int, ...]:
    try:
        found = json.loads(path.read_text()).get("eos_token_id")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
