"""Documents of conversations, and of prompts with their completions: what is a target in each, and what is not.

The targets of a conversation are what the assistant writes: the contents of its messages, its calls of tools, its thoughts, and
what ends its turn, for a model must learn when to stop. A template may mark which of it are the targets (`{% generation %}`).
Those of most models have no marks: there `trainers.text.turns` finds what the assistant writes, from where a generation begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gangway.errors import DataError, UsageError
from trainers.config.data import RULES_OF_RECORDS
from trainers.data.documents import Document, Record, check_all_read
from trainers.data.messages import Chat, chat_of, leave_out, prompt_and_completion
from trainers.text import tokenizers, turns
from trainers.text.tokenizers import NO_TEMPLATE, FolderTokenizer, Tokenizer
from trainers.text.turns import CONTENT, ROLE, TOOL_CALLS, WITH_MARKS, Conversation, shown

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
"""The columns of conversations, and of prompts with their completions."""
SHOWN, SHOWN_OF_RECORD = 40, 200
ANOTHER_DAY = date(2001, 2, 3)


class Placed(NamedTuple):
    """The tokens of a text, and the characters of each."""

    tokens: list[int]
    starts: np.ndarray
    """int64[N]"""
    stops: np.ndarray
    """int64[N]: the one after the last."""


class RecordEncoder:
    """What encoders have in common: a tokenizer, and the columns that nobody needs to read."""

    kind: tuple[str, ...]
    """A name, and columns, that tell its documents from those of other encoders."""

    def __init__(self, tokenizer: Tokenizer, ignored: Collection[str] = ()):
        self.tokenizer, self.ignored = tokenizer, frozenset(ignored)

    def digest(self) -> str:
        name, *columns = self.kind
        about = [name, RULES_OF_RECORDS, self.tokenizer.digest(), *columns, *sorted(self.ignored)]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()


class ChatEncoder(RecordEncoder):
    """Makes a document of the conversation in the column `messages`: [{"role": ..., "content": ...}, ...]. The other columns and
    fields are given to the chat template, but those that are `ignored`."""

    kind = ("chat", MESSAGES)

    def encode(self, records: Sequence[Record]) -> list[Document]:
        tokenizer = with_template(self.tokenizer)
        return [conversation(tokenizer, chat_of(record, [MESSAGES], self.ignored)) for record in records]

    def notes(self, record: Record) -> list[str]:
        return notes(lambda: with_template(self.tokenizer), lambda: chat_of(record, [MESSAGES], self.ignored))


class CompletionEncoder(RecordEncoder):
    """Makes a document of the columns `prompt` and `completion`: two texts, or two lists of messages. The completion is the
    target. Of texts the token that ends a text is one too, if the tokenizer has it. Of messages, the other columns are given to
    the chat template, but those that are `ignored`."""

    kind = ("completion", PROMPT, COMPLETION)

    def encode(self, records: Sequence[Record]) -> list[Document]:
        return [completed(self.tokenizer, record, PROMPT, COMPLETION, self.ignored) for record in records]

    def notes(self, record: Record) -> list[str]:
        asked, answer = record.get(PROMPT), record.get(COMPLETION)
        if isinstance(asked, str):
            return _notes_of_border(self.tokenizer, asked, answer) if isinstance(answer, str) else []
        return notes(lambda: with_template(self.tokenizer), lambda: chat_of(record, [PROMPT, COMPLETION], self.ignored))


def completed(
    tokenizer: Tokenizer,
    record: Record,
    prompt: str,
    completion: str,
    ignored: Collection[str] = (),
) -> Document:
    """Returns the document of two columns. Raises DataError."""
    asked, answer = prompt_and_completion(record, prompt, completion)
    record = {**record, prompt: asked, completion: answer}
    if isinstance(record[prompt], str) and isinstance(record[completion], str):
        check_all_read(record, read=(prompt, completion), ignored=ignored)
        return _of_texts(tokenizer, record[prompt], record[completion])
    chat = chat_of(record, [prompt, completion], ignored)
    return conversation(with_template(tokenizer), chat, num_given=len(record[prompt]))


def _of_texts(tokenizer: Tokenizer, prompt: str, completion: str) -> Document:
    if not completion:
        raise DataError(f"the completion of the prompt {shown(prompt)} is empty: there is no target")
    given, written = _divided(tokenizer, prompt, completion)
    given, written = tokenizers.begun(tokenizer.begin, given), tokenizers.ended(tokenizer, written)
    weight = [0.0] * len(given) + [1.0] * len(written)
    return _document([*given, *written], weight, f"the text {shown(prompt + completion)}")


def _divided(tokenizer: Tokenizer, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Returns the tokens of a text: (those of the prompt, those of the completion and of both)."""
    whole = tokenizer.placed(prompt + completion)
    if whole is None:
        given, written = tokenizer.encode_documents([prompt, completion])
        return given, written
    # Not each by itself: many tokenizers begin each text with a space.
    num_given = sum(stop <= len(prompt) for _, stop in whole.offsets)
    return whole.tokens[:num_given], whole.tokens[num_given:]


def _notes_of_border(tokenizer: Tokenizer, prompt: str, completion: str) -> list[str]:
    """Returns what a user should know of where a completion begins: a token that is of the prompt too."""
    given, written = _divided(tokenizer, prompt, completion)
    if given == tokenizer.encode_documents([prompt])[0]:
        return []
    return [
        f"in the first record the completion begins within a token, and is divided from its prompt before "
        f"{tokenizer.raw(written[:1])!r}: a generation begins after the prompt alone ({shown(prompt[-SHOWN:])}); let prompts "
        "end, or completions begin, with white space"
    ]


def conversation(tokenizer: FolderTokenizer, chat: Chat, *, num_given: int = 0) -> Document:
    """Returns the document of a conversation. Of the first `num_given` messages nothing is a target. Raises DataError if the
    template refuses it, leaves out a part of it, changes what the assistant writes, or leaves no target."""
    messages, answers = chat.conversation.messages, chat.conversation.answers
    name = f"the conversation that begins with {shown(str(messages[0][CONTENT]))}" if messages else "an empty conversation"
    if not any(chat.weights[index] and index >= num_given for index in answers):
        raise DataError(f"{name} has no target: no message of it is the assistant's" + (", and counts" if answers else ""))
    try:
        tokens, places = _tokens(tokenizer, chat.conversation)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    weight = np.zeros(len(tokens), np.float32)
    for index, place in zip(answers, places, strict=True):
        weight[place] = chat.weights[index] if index >= num_given else 0.0
    return _document(tokens, weight, name)


def notes(template: Callable[[], FolderTokenizer], chat: Callable[[], Chat]) -> list[str]:
    """Returns what a user should know of the first conversation: that nothing which ends a turn is a target, or that a generation
    begins otherwise than an answer in training."""
    try:
        tokenizer, conversation = template(), chat().conversation
        tokens, places = _tokens(tokenizer, conversation)
    except (DataError, UsageError):  # reported when it is encoded
        return []
    lines = _notes_of_beginning(tokenizer, conversation, tokens, places)
    endless = [place for place in places if not _ends(tokenizer, tokens[place])]
    if not endless:
        return lines
    text = tokenizer.raw(tokens[: endless[0].stop])
    return [
        *lines,
        f"nothing that ends a turn of the assistant is a target, for the chat template of {tokenizer.source} "
        f"{'marks' if tokenizer.has_marks(conversation.fields) else 'writes'} none: the model does not learn to stop, and a "
        f"generation goes on to its last token; the first record, up to the end of a turn: ...{text[-SHOWN_OF_RECORD:]!r}",
    ]


def _notes_of_beginning(
    tokenizer: FolderTokenizer, chat: Conversation, tokens: Sequence[int], places: Sequence[slice]
) -> list[str]:
    last = chat.answers[-1]
    try:
        text = tokenizer.render(chat.messages[:last], reply=True, fields=chat.fields)
    except Exception:  # it takes no conversation that ends so
        return []
    prompt, before = tokenizer.encode_rendered(text).tokens, list(tokens[: places[-1].start])
    if prompt == before:
        return []
    has_opening = "data.template_fields has the switches of a template, such as {enable_thinking: false}"
    way_out = has_opening if tokenizer.opening else "the template has no add_generation_prompt, which writes it"
    return [
        f"a generation begins otherwise than an answer in training: after ...{text[-SHOWN:]!r}, and in training after "
        f"...{tokenizer.raw(before)[-SHOWN:]!r}; {way_out}"
    ]


def _ends(tokenizer: FolderTokenizer, tokens: Sequence[int]) -> bool:
    end = (tokenizer.end_of_turn or "").strip()
    return bool(tokens) and (tokens[-1] in tokenizer.special_ids or (end != "" and tokenizer.raw(tokens).rstrip().endswith(end)))


def _tokens(tokenizer: FolderTokenizer, chat: Conversation) -> tuple[list[int], list[slice]]:
    """Returns (the tokens of a conversation, those that the assistant writes in each of its messages)."""
    if wrong := sorted(tokenizer.reserved & chat.fields.keys()):
        raise DataError(f"the columns {', '.join(wrong)} have names that no field for a template can have: {leave_out(wrong)}")
    chat = with_arguments(tokenizer, chat)
    text = turns.rendered(tokenizer, chat)
    check_day(tokenizer, chat, text)
    if found := [*dict.fromkeys(turns.left_out(tokenizer, chat, text, tokenizer.template(chat.fields)))]:
        names = [*dict.fromkeys(each.name for each in found if each.name is not None)]
        raise DataError(
            f"the chat template of {tokenizer.source} does not write {', '.join(each.what for each in found)}: give a template "
            "that does, or " + (leave_out(names) if names else "records without it")
        )
    found_tokens, offsets = tokenizer.encode_rendered(text)
    whole = Placed(found_tokens, *np.array(offsets, np.int64).reshape(-1, 2).T)
    has_marks = tokenizer.has_marks(chat.fields)
    pieces = _marked(tokenizer, chat, text) if has_marks else _by_turns(tokenizer, chat, text, whole)
    return whole.tokens, [_inside(tokenizer, whole, *piece)[0] for piece in pieces]


def _document(tokens: Sequence[int], weight: Any, name: str) -> Document:
    document = Document(np.asarray(tokens, np.int32), np.asarray(weight, np.float32))
    # The first token is no target: there is nothing to predict it from.
    if not np.any(document.token_weight[1:] > 0):  # type: ignore[index]
        raise DataError(f"{name} has no target: none of its {len(tokens)} tokens is one that the model is to write")
    return document


def _marked(tokenizer: FolderTokenizer, chat: Conversation, text: str) -> list[tuple[int, int]]:
    """Returns the pieces of the text that the template marks: one for each message of the assistant."""
    _, pieces = turns.refusing(tokenizer, lambda: tokenizer.marked(chat.messages, chat.fields))
    if len(pieces) != len(chat.answers):
        raise DataError(
            f"the chat template of {tokenizer.source} marks {len(pieces)} pieces of text, and {len(chat.answers)} messages are "
            f"the assistant's: expected one for each; {WITH_MARKS} around each of its messages"
        )
    turns.check_written(tokenizer, chat, text)
    others = turns.with_others_sentinels(chat, text)
    try:
        other, marked = tokenizer.marked(others.messages, others.fields)
    except Exception:  # it looks at what they say, and refuses the sentinels
        return pieces
    said = "".join(other[start:stop] for start, stop in marked)
    for index in {*range(len(chat.messages))} - {*chat.answers}:
        if turns.sentinel_of(text, index) in said:
            raise DataError(
                f"the chat template of {tokenizer.source} marks what role {chat.messages[index][ROLE]} says in message {index}: "
                f"{WITH_MARKS} around what the assistant writes alone"
            )
    return pieces


def _by_turns(tokenizer: FolderTokenizer, chat: Conversation, text: str, found: Placed) -> list[tuple[int, int]]:
    """Returns where the text has each turn of the assistant, with what ends it: from where the answer of a generation begins."""
    opening = turns.opening_of(tokenizer, chat.fields) if chat.fields else tokenizer.opening
    places, before = [], 0
    for index, turn in zip(chat.answers, turns.turns(tokenizer, chat, text), strict=True):
        opens = text.rfind(opening, before, turn.start) if opening else -1
        is_last = index + 1 == len(chat.messages)
        stop = turn.stop if turn.with_end else _with_end(tokenizer, text, turn.stop, found, is_last=is_last)
        if turn.with_end and not tokenizer.special_ids & {*_inside(tokenizer, found, turn.start, stop)[1][-1:]}:
            raise DataError(
                f"the chat template of {tokenizer.source} does not tell what ends a turn of the assistant: {WITH_MARKS}"
            )
        places.append((turn.start if opens < 0 else opens + len(opening), stop))
        before = stop
    return places


def _inside(tokenizer: FolderTokenizer, found: Placed, start: int, stop: int) -> tuple[slice, list[int]]:
    """Returns (the place of the tokens of a piece of the text, the tokens)."""
    inside = [
        int(place)
        for place in np.flatnonzero((found.starts < stop) & (found.stops > start))
        # A special token that takes the white space behind it stands before the piece all the same.
        if found.starts[place] >= start or found.tokens[place] not in tokenizer.special_ids
    ]
    place = slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)
    return place, found.tokens[place]


def _with_end(tokenizer: FolderTokenizer, text: str, stop: int, found: Placed, *, is_last: bool) -> int:
    """Returns where a turn with its end stops: after the text that ends each turn, or after the special token that follows what
    was written. It stops at `stop` if there is no end."""
    tokens, starts, stops = found
    end, special_ids = tokenizer.end_of_turn, tokenizer.special_ids
    if end and text.startswith(end, stop):
        return stop + len(end)
    if end == "" and not is_last:  # what follows begins the next message
        return stop
    after = np.flatnonzero((starts >= stop) & (stops > starts)).tolist()
    special = next((place for place in after if tokens[place] in special_ids), None)
    if special is not None and tokens[special] == tokenizer.opening_id:
        return stop  # it begins the next message
    # White space between what was written and the end of the turn is written by the model, too.
    return int(stops[special]) if special is not None and not text[stop : starts[special]].strip() else stop


def check_day(tokenizer: FolderTokenizer, chat: Conversation, text: str) -> None:
    """Raises UsageError if the template writes the day, and the settings do not say which."""
    template = tokenizer.template(chat.fields)
    asks = tokenizer.day is None and any(name in template for name in turns.OF_THE_DAY)
    if asks and tokenizer.render(chat.messages, fields=chat.fields, day=ANOTHER_DAY) != text:
        raise UsageError(
            f"the chat template of {tokenizer.source} writes the day (strftime_now), and each day would give other tokens: set "
            f"the day of this data for good, such as data.template_date={date.today()}"
        )
    if turns.is_random(template):
        raise UsageError(f"the chat template of {tokenizer.source} draws at random: the same record would not be the same tokens")


def with_template(tokenizer: Tokenizer) -> FolderTokenizer:
    """Returns the tokenizer. Raises UsageError if it has no chat template."""
    if not isinstance(tokenizer, FolderTokenizer) or not tokenizer.has_template:
        raise UsageError(
            f"data.tokenizer = {tokenizer.source!r} {NO_TEMPLATE}; records with messages need one, so name the folder of a model "
            "for chat"
        )
    return tokenizer


def with_arguments(tokenizer: FolderTokenizer, chat: Conversation) -> Conversation:
    """Returns the conversation with the arguments of calls as the template writes JSON of them: as mappings, or as texts. Raises
    DataError if it does so of neither."""
    if not any(message.get(TOOL_CALLS) for message in chat.messages):
        return chat
    for form in (dict, partial(json.dumps, ensure_ascii=False)):
        if all(_writes_json(tokenizer, chat, index, form) for index in chat.answers if chat.messages[index].get(TOOL_CALLS)):
            return chat._replace(messages=[_with_form(message, form) for message in chat.messages])
    text = turns.rendered(tokenizer, chat)  # it may refuse the calls for a reason of its own
    without = [{name: value for name, value in message.items() if name != TOOL_CALLS} for message in chat.messages]
    if any(turns.parts_of_calls_left_out(tokenizer, chat, text)) or text == turns.rendered(
        tokenizer, chat._replace(messages=without)
    ):
        return chat  # which is reported with all else that it does not write
    raise DataError(
        f"the chat template of {tokenizer.source} writes the arguments of {TOOL_CALLS} neither as JSON, nor without quotes: give "
        f"a template that does, or {leave_out([TOOL_CALLS])}"
    )


def _with_form(message: Mapping[str, Any], form: Any, given: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Returns a message with the arguments of its calls in a form; `given`: these arguments, in each call."""
    if not message.get(TOOL_CALLS):
        return message
    calls = []
    for call in message[TOOL_CALLS]:
        function = call.get("function", call)
        made = {**function, "arguments": form(function["arguments"] if given is None else given)}
        calls.append({**call, "function": made} if "function" in call else made)
    return {**message, TOOL_CALLS: calls}


def _writes_json(tokenizer: FolderTokenizer, chat: Conversation, index: int, form: Any) -> bool:
    """Whether a template writes arguments in this form with the quotes of JSON, or none: not with those of Python, and not as a
    text in quotes once more."""
    name, said = (turns.sentinel_of(str(index), number) for number in range(2))
    messages = [_with_form(message, form) for message in chat.messages]
    messages[index] = _with_form(chat.messages[index], form, {name: said})
    try:
        text = turns.rendered(tokenizer, chat._replace(messages=messages))
    except DataError:
        return False
    return name in text and said in text and not any(f"{quote}{each}" in text for quote in ("'", '\\"') for each in (name, said))
