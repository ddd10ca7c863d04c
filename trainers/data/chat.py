"""Documents of conversations, and of prompts with their completions: what is a target in each, and what is not.

The targets of a conversation are what the assistant writes: the contents of its messages, and the token that ends its turn, for a
model must learn when to stop. Where the chat template has marks (`{% generation %}`), the marked tokens are the targets, and no
others. The templates of most models have none, and what they make of the first messages may change with the later ones, so that
the beginnings of a conversation do not tell. There each content is replaced by a text that occurs nowhere else: where these texts
are, the contents belong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trainers.data.documents import Document, Record
from trainers.errors import DataError, UsageError
from trainers.tokenizers import NO_TEMPLATE, FolderTokenizer, Tokenizer

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
"""The columns of conversations, and of prompts with their completions."""
ASSISTANT = "assistant"
WITH_MARKS = (
    "give the tokenizer's folder a chat_template.jinja that marks what the assistant writes: {% generation %} ... "
    "{% endgeneration %}"
)
SHOWN = 60
"""Characters of a text that errors show."""

Span = tuple[int, int]


class ChatEncoder:
    """Makes a document of the conversation in the column `messages`: [{"role": ..., "content": ...}, ...]."""

    def __init__(self, tokenizer: Tokenizer, column: str = MESSAGES):
        self.tokenizer, self.column = tokenizer, column

    def encode(self, records: Sequence[Record]) -> list[Document]:
        tokenizer = with_template(self.tokenizer)
        return [conversation(tokenizer, messages_of(record, self.column)) for record in records]

    def digest(self) -> str:
        return digest_of("chat", self.tokenizer, self.column)


class CompletionEncoder:
    """Makes a document of the columns `prompt` and `completion`: two texts, or two lists of messages. The completion is the
    target. Of texts the token that ends a text is one too, if the tokenizer has it."""

    def __init__(self, tokenizer: Tokenizer, prompt: str = PROMPT, completion: str = COMPLETION):
        self.tokenizer, self.prompt, self.completion = tokenizer, prompt, completion

    def encode(self, records: Sequence[Record]) -> list[Document]:
        return [completed(self.tokenizer, record, self.prompt, self.completion) for record in records]

    def digest(self) -> str:
        return digest_of("completion", self.tokenizer, self.prompt, self.completion)


def completed(tokenizer: Tokenizer, record: Record, prompt: str, completion: str) -> Document:
    """Returns the document of two columns. Raises DataError."""
    if isinstance(value_of(record, prompt), str) and isinstance(value_of(record, completion), str):
        return _of_texts(tokenizer, record[prompt], record[completion])
    before, after = messages_of(record, prompt), messages_of(record, completion)
    return conversation(with_template(tokenizer), [*before, *after], num_given=len(before))


def _of_texts(tokenizer: Tokenizer, prompt: str, completion: str) -> Document:
    if not completion:
        raise DataError(f"the completion of the prompt {shown(prompt)} is empty: there is no target")
    # Each by itself, as in a generation: no token reaches from the prompt into the completion.
    given, (written,) = tokenizer.encode(prompt), tokenizer.encode_documents([completion])
    end = [] if tokenizer.separator is None else [tokenizer.separator]
    weight = [0.0] * len(given) + [1.0] * len(written) + [1.0] * len(end)
    return _document([*given, *written, *end], weight, f"the text {shown(prompt + completion)}")


def conversation(tokenizer: FolderTokenizer, messages: Sequence[Mapping[str, Any]], *, num_given: int = 0) -> Document:
    """Returns the document of a conversation. Of the first `num_given` messages nothing is a target. Raises DataError if the
    template refuses it, changes what the assistant writes, or leaves no target."""
    name = f"the conversation that begins with {shown(str(messages[0]['content']))}" if messages else "an empty conversation"
    answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    num_skipped = sum(index < num_given for index in answers)
    if num_skipped == len(answers):
        raise DataError(f"{name} has no target: no message of it is the assistant's")
    try:
        tokens, turns = (_by_marks if tokenizer.has_marks else _by_sentinels)(tokenizer, messages, answers)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    weight = np.zeros(len(tokens), np.float32)
    for turn in turns[num_skipped:]:
        weight[turn] = 1.0
    return _document(tokens, weight, name)


def _document(tokens: Sequence[int], weight: Any, name: str) -> Document:
    document = Document(np.asarray(tokens, np.int32), np.asarray(weight, np.float32))
    # The first token is no target: there is nothing to predict it from.
    if not np.any(document.token_weight[1:] > 0):  # type: ignore[index]
        raise DataError(f"{name} has no target: none of its {len(tokens)} tokens is one that the model is to write")
    return document


def _by_marks(
    tokenizer: FolderTokenizer, messages: Sequence[Mapping[str, Any]], answers: Sequence[int]
) -> tuple[list[int], list[slice]]:
    """Returns (the tokens, those that the template marks, one slice for each message of the assistant)."""
    tokens, mask = _rendered(tokenizer, lambda: tokenizer.marked(messages))
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    turns = [slice(first, end) for first, end in zip(edges[::2], edges[1::2], strict=True)]
    if len(turns) != len(answers):
        raise DataError(
            f"the chat template of {tokenizer.source} marks {len(turns)} pieces of text, and {len(answers)} messages are the "
            f"assistant's: expected one for each; {WITH_MARKS} around each of its messages"
        )
    return tokens, turns


def _by_sentinels(
    tokenizer: FolderTokenizer, messages: Sequence[Mapping[str, Any]], answers: Sequence[int]
) -> tuple[list[int], list[slice]]:
    """Returns (the tokens, those of each content of the assistant with the token that ends its turn)."""
    if thinking := [index for index in answers if messages[index].get("reasoning_content")]:
        raise DataError(
            f"message {thinking[0]} has a reasoning_content, and the chat template of {tokenizer.source} does not mark where it "
            f"is: {WITH_MARKS}"
        )
    text = _rendered(tokenizer, lambda: tokenizer.render(messages))
    tokens, offsets = tokenizer.encode_rendered(text)
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    turns = []
    for first, last in _contents(tokenizer, messages, answers, text):
        inside = np.flatnonzero((starts < last) & (ends > first))
        after = np.flatnonzero((starts >= last) & (ends > starts))
        begin = int(inside[0]) if len(inside) else int(after[0]) if len(after) else len(tokens)
        end = int(inside[-1]) + 1 if len(inside) else begin
        special = next((int(place) for place in after if tokens[place] in tokenizer.special_ids), None)
        # White space between a content and the end of the turn is written by the model, too.
        if special is not None and not text[last : starts[special]].strip():
            end = special + 1
        turns.append(slice(begin, end))
    return tokens, turns


def _contents(tokenizer: FolderTokenizer, messages: Sequence[Mapping[str, Any]], answers: Sequence[int], text: str) -> list[Span]:
    """Returns where the contents of the assistant are in what the template has made of the messages. Raises DataError if it does
    not write them as they are, up to white space around them."""
    parts = _template_around(tokenizer, messages, answers, text)
    if not text.startswith(parts[0]):
        raise _changed(tokenizer, f"what it writes before message {answers[0]} changes with the contents", parts[0], text)
    place, spans = len(parts[0]), []
    for index, (_, after) in zip(answers, pairwise(parts), strict=True):
        content = messages[index]["content"]
        # The last part goes to the end of the text.
        follows = text[place:].__eq__ if index == answers[-1] else text[place:].startswith
        found = next((each for each in (content, content.strip()) if follows(each + after)), None)
        if found is None:
            what = f"it changes the content of message {index}, or what follows that"
            raise _changed(tokenizer, what, content + after, text[place:])
        spans.append((place, place + len(found)))
        place += len(found) + len(after)
    return spans


def _template_around(
    tokenizer: FolderTokenizer, messages: Sequence[Mapping[str, Any]], answers: Sequence[int], text: str
) -> list[str]:
    """Returns what the template writes before, between and after the contents of the assistant."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    sentinels = {index: f"x{digest}x{index}x" for index in answers}
    replaced = [{**each, "content": sentinels.get(index, each["content"])} for index, each in enumerate(messages)]
    rest, parts = _rendered(tokenizer, lambda: tokenizer.render(replaced)), []
    for index, sentinel in sentinels.items():
        if rest.count(sentinel) != 1:
            how = "leaves out the content" if sentinel not in rest else "repeats the content"
            raise DataError(f"the chat template of {tokenizer.source} {how} of message {index}: {WITH_MARKS}")
        before, _, rest = rest.partition(sentinel)
        parts.append(before)
    return [*parts, rest]


def _changed(tokenizer: FolderTokenizer, what: str, expected: str, found: str) -> DataError:
    same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found)))
    start = max(0, same - 10)
    return DataError(
        f"the chat template of {tokenizer.source} does not write the conversation as it is: {what}: expected "
        f"{shown(expected[start:])}, and it writes {shown(found[start:])}; {WITH_MARKS}"
    )


def _rendered(tokenizer: FolderTokenizer, render: Any) -> Any:
    try:
        return render()
    except Exception as error:  # a template may raise anything, and does so for a conversation that it does not take
        raise DataError(f"the chat template of {tokenizer.source} refuses it: {type(error).__name__}: {error}") from error


def with_template(tokenizer: Tokenizer) -> FolderTokenizer:
    """Returns the tokenizer. Raises UsageError if it has no chat template."""
    if not isinstance(tokenizer, FolderTokenizer) or not tokenizer.has_template:
        raise UsageError(
            f"data.tokenizer = {tokenizer.source!r} {NO_TEMPLATE}; records with messages need one, so name the folder of a model "
            "for chat"
        )
    return tokenizer


def messages_of(record: Record, column: str) -> list[Mapping[str, Any]]:
    """Returns the messages in a column. Raises DataError if they are none."""
    value = value_of(record, column)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"column {column!r} is a {type(value).__name__}: expected a list of messages with role and content")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise DataError(
                f"column {column!r}: message {index} is {shown(json.dumps(message, default=str))}: expected a mapping with the "
                "texts role and content"
            )
    return list(value)


def value_of(record: Record, column: str) -> Any:
    """Returns the value in a column. Raises DataError that names the columns that there are."""
    if record.get(column) is None:
        raise DataError(f"there is no {column!r}: it has {', '.join(name for name in record if record[name] is not None)}")
    return record[column]


def digest_of(kind: str, tokenizer: Tokenizer, *settings: str) -> str:
    return hashlib.sha256(json.dumps([kind, tokenizer.digest(), *settings]).encode()).hexdigest()


def shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
