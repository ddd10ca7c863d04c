"""What the assistant writes in the text that a chat template makes of a conversation: its turns, and what ends them.

A template is asked, and not read. A turn is found by rendering the conversation once more with a plain message in its place,
whose content is a text that occurs nowhere else. What differs is what the assistant has written: its content, its tool calls, its
thoughts. What a template leaves out is found by rendering without it: a text that stays the same does not have it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from gangway.errors import DataError
from gangway.text import shortened

ROLE, CONTENT, TOOL_CALLS = "role", "content", "tool_calls"
USER, ASSISTANT = "user", "assistant"
TEXTS = (CONTENT, "reasoning_content", "reasoning", "thinking")
"""Fields of a message that are texts of the assistant."""
WITH_MARKS = (
    "give the tokenizer's folder a chat_template.jinja that marks what the assistant writes: {% generation %} ... "
    "{% endgeneration %}"
)

Message = Mapping[str, Any]
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
OF_THE_DAY = ("strftime_now",)
"""What a template asks for the day."""
OF_THE_HEADER = frozenset({"name"})
"""Fields of a message that the assistant does not write: they stand before its turn."""


class Turn(NamedTuple):
    """What the assistant writes in one message: characters of a text."""

    start: int
    stop: int
    """The one after the last."""
    with_end: bool = False
    """Whether what ends the turn is part of it."""


class Conversation(NamedTuple):
    messages: Sequence[Message]
    fields: Mapping[str, Any]
    """What else the template gets, by its name, such as `tools`."""

    @property
    def answers(self) -> list[int]:
        """The messages of the assistant."""
        return [index for index, message in enumerate(self.messages) if message[ROLE] == ASSISTANT]

    def with_message(self, index: int, message: Message | None) -> Conversation:
        """Returns the conversation with another message at `index`; None: with none."""
        messages = [*self.messages[:index], *([] if message is None else [message]), *self.messages[index + 1 :]]
        return self._replace(messages=messages)


class Template(Protocol):
    """A chat template, such as `trainers.text.tokenizers.FolderTokenizer` has one."""

    source: str

    @property
    def opening(self) -> str:
        """What it writes before the answer of a generation."""

    def render(self, messages: Sequence[Message], *, reply: bool = False, fields: Mapping[str, Any]) -> str:
        """Returns the text of a conversation. Raises whatever the template raises."""


def rendered(template: Template, conversation: Conversation) -> str:
    """Raises DataError if the template refuses the conversation."""
    return refusing(template, lambda: template.render(conversation.messages, fields=conversation.fields))


def refusing(template: Template, render: Callable[[], Any]) -> Any:
    """Returns what `render` returns. Raises DataError for whatever it raises."""
    try:
        return render()
    except DataError:
        raise
    except Exception as error:  # a template may raise anything, and does so for a conversation that it does not take
        raise DataError(f"the chat template of {template.source} refuses it: {type(error).__name__}: {error}") from error


def turns(template: Template, conversation: Conversation, text: str) -> list[Turn]:
    """Returns what the assistant has written in the text of a conversation, for each of its messages, without what ends its turn.
    Raises DataError if the template does not write it as it is, up to white space around it."""
    if all(is_plain(conversation.messages[index]) for index in conversation.answers):
        return _contents(template, conversation, text)
    found = [_written(template, conversation, index, text) for index in conversation.answers]
    check_written(template, conversation, text)
    for one, other in pairwise(found):
        if one.stop > other.start:
            raise DataError(
                f"the chat template of {template.source} does not tell the turns of the assistant apart: {WITH_MARKS}"
            )
    return found


def check_written(template: Template, conversation: Conversation, text: str) -> None:
    """Raises DataError if a text of the assistant is not in that of the conversation as it is, up to white space around it."""
    # The places of the texts tell little where a text changes what is around it.
    for index, name, said in _not_in_place(template, conversation, text) or _too_rare(conversation, text):
        raise DataError(
            f"the chat template of {template.source} does not write the {name} of message {index} as it is: {shown(said)}; give "
            "a template that does, or records without it"
        )


def _too_rare(conversation: Conversation, text: str) -> list[tuple[int, str, str]]:
    """Returns (message, field, text) of the texts of the assistant that are in that of the conversation fewer times than they are
    said: somebody else may say the same."""
    texts = [each.strip() for message in conversation.messages for _, each in texts_of(message)]
    there = [each for each in texts if each in text]
    said = [(index, *each) for index in conversation.answers for each in texts_of(conversation.messages[index])]
    return [
        (index, name, each)
        for index, name, each in said
        if each.strip() and text.count(each.strip()) < max(1, sum(other.count(each.strip()) for other in there))
    ]


def _not_in_place(template: Template, conversation: Conversation, text: str) -> list[tuple[int, str, str]]:
    """Returns (message, field, text) of the first text of the assistant that is not in its place, if what is around them tells
    their places."""
    messages, texts = [*conversation.messages], dict[str, tuple[int, str, str]]()
    for index in conversation.answers:
        for name in (each for each in TEXTS if isinstance(messages[index].get(each), str) and messages[index][each].strip()):
            sentinel = sentinel_of(text, len(texts))
            texts[sentinel] = (index, name, messages[index][name])
            messages[index] = {**messages[index], name: sentinel}
    try:
        around = rendered(template, conversation._replace(messages=messages))
    except DataError:
        return []
    for sentinel, found in texts.items():
        if around.count(sentinel) != 1:
            return [] if sentinel in around else [found]
    first, *rest = re.split(f"({'|'.join(texts)})", around) if texts else [around]
    place = len(first)
    for number, (sentinel, after) in enumerate(zip(rest[::2], rest[1::2], strict=True), 1):
        is_last, said = number == len(texts), texts[sentinel][2]
        follows = text[place:].__eq__ if is_last else text[place:].startswith
        written = next((each for each in (said, said.strip()) if follows(each + after)), None)
        if written is None:
            is_there = text.endswith(after) if is_last else after in text[place:]
            return [texts[sentinel]] if is_there and text.startswith(first) else []
        place += len(written) + len(after)
    return []


def is_plain(message: Message) -> bool:
    """Whether a message is a role and a text."""
    return message.keys() == {ROLE, CONTENT} and isinstance(message[CONTENT], str)


def sentinel_of(text: str, number: int) -> str:
    """Returns a text that occurs nowhere in `text`."""
    return f"x{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:24]}x{number}x"


def _contents(template: Template, conversation: Conversation, text: str) -> list[Turn]:
    """Returns where the contents of the assistant are, if its messages have nothing else."""
    answers = conversation.answers
    parts = _template_around(template, conversation, text)
    if not text.startswith(parts[0]):
        raise changed(template, f"what it writes before message {answers[0]} changes with the contents", parts[0], text)
    place, found = len(parts[0]), []
    for index, (_, after) in zip(answers, pairwise(parts), strict=True):
        content = conversation.messages[index][CONTENT]
        # The last part goes to the end of the text.
        follows = text[place:].__eq__ if index == answers[-1] else text[place:].startswith
        written = next((each for each in (content, content.strip()) if follows(each + after)), None)
        if written is None:
            what = f"it changes the content of message {index}, or what follows that"
            raise changed(template, what, content + after, text[place:])
        found.append(Turn(place, place + len(written)))
        place += len(written) + len(after)
    return found


def _template_around(template: Template, conversation: Conversation, text: str) -> list[str]:
    """Returns what the template writes before, between and after the contents of the assistant."""
    sentinels = {index: sentinel_of(text, index) for index in conversation.answers}
    messages = [{**each, CONTENT: sentinels.get(index, each[CONTENT])} for index, each in enumerate(conversation.messages)]
    rest, parts = rendered(template, conversation._replace(messages=messages)), []
    for index, sentinel in sentinels.items():
        before, rest = _around(template, rest, sentinel, index)
        parts.append(before)
    return [*parts, rest]


def _around(template: Template, text: str, sentinel: str, index: int) -> tuple[str, str]:
    if text.count(sentinel) != 1:
        how = "leaves out the content" if sentinel not in text else "repeats the content"
        raise DataError(f"the chat template of {template.source} {how} of message {index}: {WITH_MARKS}")
    before, _, after = text.partition(sentinel)
    return before, after


def _written(template: Template, conversation: Conversation, index: int, text: str) -> Turn:
    """Returns what the assistant has written in message `index`, whatever that has."""
    found, stop = None, index + 1
    # A template may refuse a plain message before the result of a tool, or write other things before the last message: then the
    # conversation up to the message tells.
    for end in (len(conversation.messages), stop):
        part = conversation._replace(messages=conversation.messages[:end])
        try:
            whole = text if end == len(conversation.messages) else rendered(template, part)
            found = found or _differing(template, part, index, whole, text)
        except DataError:
            if end == stop:
                raise
    if found is None:
        raise DataError(
            f"the chat template of {template.source} writes other things around message {index} than around a plain one, and so "
            f"does not tell what of it the assistant writes: {WITH_MARKS}"
        )
    written = text[found.start : found.stop]
    for name, each in texts_of(conversation.messages[index]):
        if each.strip() not in written:
            raise changed(template, f"it changes the {name} of message {index}, or what follows that", each, written)
    return found


def _differing(template: Template, part: Conversation, index: int, whole: str, text: str) -> Turn | None:
    """Returns where `whole`, the text of `part`, differs from that of the same messages with a plain one at `index`; None if it
    does not tell where that is in `text`."""
    sentinel, message = sentinel_of(text, index), part.messages[index]
    plain = {name: message[name] for name in OF_THE_HEADER & message.keys()} | {ROLE: ASSISTANT, CONTENT: sentinel}
    before, after = _around(template, rendered(template, part.with_message(index, plain)), sentinel, index)
    num_same = num_common(whole[::-1], after[::-1])
    start, stop, is_last = _start(template, whole, before), len(whole) - num_same, index + 1 == len(part.messages)
    if start is None or stop < start or not text.startswith(whole[:stop]) or (num_same < len(after) and not is_last):
        return None
    # Of the last message, a call may end with another token than a content does.
    return Turn(start, stop, with_end=num_same < len(after))


def _start(template: Template, whole: str, before: str) -> int | None:
    """Returns where a turn begins in `whole`. `before` is what the template writes before a plain content: the beginning of the
    turn, and perhaps a place for thoughts."""
    # Of a call, white space before a content may be missing.
    for each in (before, before.rstrip()):
        if whole.startswith(each):
            return len(each)
    opening = template.opening
    start = before.rfind(opening) + len(opening)
    is_there = bool(opening) and opening in before and whole.startswith(before[:start])
    return start if is_there else None


def opening_of(template: Template, fields: Mapping[str, Any] = NO_FIELDS) -> str:
    """Returns what a template writes before the answer of a generation; "" if it writes nothing."""
    asked = [{ROLE: USER, CONTENT: "a"}]
    try:
        without, opened = (template.render(asked, reply=reply, fields=fields) for reply in (False, True))
    except Exception:  # it takes no such conversation
        return ""
    return opened.removeprefix(without) if opened.startswith(without) else ""


def texts_of(message: Message) -> Iterator[tuple[str, str]]:
    """Yields the texts of a message that a template writes as they are, with the name of their field."""
    content = message.get(CONTENT)
    for part in [{"text": content}] if isinstance(content, str) else content or []:
        yield CONTENT, part["text"]
    for name in TEXTS[1:]:
        if isinstance(message.get(name), str):
            yield name, message[name]
    for call in message.get(TOOL_CALLS) or []:
        yield TOOL_CALLS, call.get("function", call)["name"]


def after_a_turn(template: Template) -> tuple[str, str] | None:
    """Returns (what follows the last turn of the assistant, what follows one before a message of the user); None if the template
    takes no such conversation, or changes it."""
    ask, answer, more = (sentinel_of("", number) for number in range(3))
    messages = [{ROLE: USER, CONTENT: ask}, {ROLE: ASSISTANT, CONTENT: answer}, {ROLE: USER, CONTENT: more}]
    try:
        texts = [template.render(messages[:number], fields={}) for number in (2, 3)]
    except Exception:
        return None
    if any(answer not in text for text in texts):  # it changes what is said
        return None
    last, between = (text.partition(answer)[2] for text in texts)
    return last, between.partition(more)[0]


def with_day(text: str, day: date) -> str:
    """Returns the text of a chat template for which `day` is today, on whichever day it is rendered."""
    formats = re.findall(r"strftime_now\s*\(\s*(['\"])(.*?)\1\s*\)", text)
    if not any(name in text for name in OF_THE_DAY):
        return text
    days = json.dumps({each: day.strftime(each) for _, each in formats})
    other = "{{ raise_exception('strftime_now gets no text between quotes') }}"
    # On a line of its own: the new line after a block is left out, and what follows begins a line as before.
    return (
        f"{{% macro strftime_now(format) %}}{{% set days = {days} %}}{{% if format in days %}}{{{{ days[format] }}}}{{% else %}}"
        f"{other}{{% endif %}}{{% endmacro %}}\n{text}"
    )


def with_fields(text: str, fields: Mapping[str, Any]) -> str:
    """Returns the text of a chat template that has these fields by default."""
    # `json.dumps` writes what Jinja reads: true, 1.5, "a".
    set_all = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {json.dumps(value)} %}}{{% endif %}}" for name, value in fields.items()
    )
    return f"{set_all}\n{text}" if set_all else text


def is_random(text: str) -> bool:
    """Whether a chat template draws at random."""
    return re.search(r"\|\s*random\b|\blipsum\s*\(", text) is not None


def changed(template: Template, what: str, expected: str, found: str) -> DataError:
    same = num_common(expected, found)
    start = max(0, same - 10)
    return DataError(
        f"the chat template of {template.source} does not write the conversation as it is: {what}: expected "
        f"{shown(expected[start:])}, and it writes {shown(found[start:])}; {WITH_MARKS}"
    )


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns how many items two sequences begin with in common."""
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def shown(text: str) -> str:
    return repr(shortened(text))


class LeftOut(NamedTuple):
    what: str
    name: str | None
    """Of the field that has it; None: no field of its own."""


def left_out(template: Template, conversation: Conversation, text: str, source: str) -> Iterator[LeftOut]:
    """Yields what the record has and the template does not write. `text` is what it writes, `source` the template itself."""
    for name, value in conversation.fields.items():
        fewer = {other: each for other, each in conversation.fields.items() if other != name}
        # A switch may stand as the template has it anyhow.
        is_switch = isinstance(value, bool) and re.search(rf"\b{re.escape(name)}\b", source)
        if _says_something(value) and not is_switch and not _matters(template, conversation._replace(fields=fewer), text):
            yield LeftOut(name, name)
    for index, message in enumerate(conversation.messages):
        for name in (each for each in message if each not in (ROLE, CONTENT)):
            less = {other: each for other, each in message.items() if other != name}
            if _says_something(message[name]) and not _matters(template, conversation.with_message(index, less), text):
                yield LeftOut(name, name)
    yield from _contents_left_out(template, conversation, text)
    yield from parts_of_calls_left_out(template, conversation, text)


def _says_something(value: Any) -> bool:
    return isinstance(value, bool | int | float) or bool(value)


def _matters(template: Template, other: Conversation, text: str) -> bool:
    try:
        return rendered(template, other) != text
    except DataError:  # it cannot do without
        return True


def _contents_left_out(template: Template, conversation: Conversation, text: str) -> Iterator[LeftOut]:
    """Yields the contents of those who are not the assistant, whose turns tell theirs."""
    try:
        found = rendered(template, with_others_sentinels(conversation, text))
    except DataError:  # it looks at what they say: each by itself
        found = ""
    for message in conversation.messages:
        if not isinstance(message[CONTENT], str) and message[CONTENT] and str(message[CONTENT]) in text:
            yield LeftOut(f"the {CONTENT} of role {message[ROLE]}, a list of parts, as their text", None)
    for index, message in enumerate(conversation.messages):
        if _is_said_to_it(message) and sentinel_of(text, index) not in found:
            empty = {**message, CONTENT: _with_text(message[CONTENT], "")}
            if not _matters(template, conversation.with_message(index, empty), text):
                yield LeftOut(f"the {CONTENT} of role {message[ROLE]}", None)


def with_others_sentinels(conversation: Conversation, text: str) -> Conversation:
    """Returns the conversation with a sentinel in place of what each of those says who are not the assistant."""
    messages = [
        {**each, CONTENT: _with_text(each[CONTENT], sentinel_of(text, index))} if _is_said_to_it(each) else each
        for index, each in enumerate(conversation.messages)
    ]
    return conversation._replace(messages=messages)


def _is_said_to_it(message: Message) -> bool:
    return message[ROLE] != ASSISTANT and _says_something(message[CONTENT])


def _with_text(content: Any, text: str) -> Any:
    return text if isinstance(content, str) else [{**part, "text": text} for part in content]


def parts_of_calls_left_out(template: Template, conversation: Conversation, text: str) -> Iterator[LeftOut]:
    """Yields the calls of tools that it does not write, and those without their arguments."""
    for index in conversation.answers:
        message = conversation.messages[index]
        calls = message.get(TOOL_CALLS) or []
        for number, call in enumerate(calls):
            fewer = [*calls[:number], *calls[number + 1 :]]
            if fewer and not _matters(template, conversation.with_message(index, {**message, TOOL_CALLS: fewer}), text):
                yield LeftOut(TOOL_CALLS, TOOL_CALLS)
                continue
            function = call.get("function", call)
            if function.get("arguments") not in (None, {}, "{}"):
                bare = {**function, "arguments": {} if isinstance(function["arguments"], Mapping) else "{}"}
                whole = [*calls[:number], {**call, "function": bare} if "function" in call else bare, *calls[number + 1 :]]
                if not _matters(template, conversation.with_message(index, {**message, TOOL_CALLS: whole}), text):
                    yield LeftOut(f"the arguments of {TOOL_CALLS}", TOOL_CALLS)
