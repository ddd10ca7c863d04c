"""Conversations in records: their messages as a chat template takes them, and how much each of them counts."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gangway.errors import DataError
from trainers.data.documents import Record
from trainers.data.sources import json_records
from trainers.text.turns import ASSISTANT, CONTENT, ROLE, TOOL_CALLS, USER, Conversation, shown

WEIGHTS = ("weight", "train", "loss_mask")
"""Fields of a message, one of which says how much its tokens count as targets: a number, or whether they do at all."""
TOOLS = "tools"
OLD_CALL, CALL = "function_call", "{type: function, function: {name, arguments}}"


ROLES_OF_OTHERS = frozenset(
    {
        *("system", "developer", "user", "tool", "tool_call", "tool_response", "tool_result", "function", "ipython"),
        *("environment", "observation", "context", "document", "documents", "control"),
    }
)
"""Roles of those who are not the assistant. Any other one may be a name for the assistant that no template knows, such as
`Assistant`, `model` or `bot`: what it says would be no target, in silence."""


class Chat(NamedTuple):
    conversation: Conversation
    weights: dict[int, float]
    """How much each message of the assistant counts as a target."""


def chat_of(record: Record, columns: Sequence[str], ignored: Collection[str], *, unread: Collection[str] = ()) -> Chat:
    """Returns the conversation of the messages in `columns`, one after the other. Every other column of the record is a field for
    the template, but those of `unread` and of `ignored` (`data.ignore_columns`). Raises DataError."""
    messages = [message for column in columns for message in messages_of(record, column)]
    left_out = {*columns, *ignored, *unread}
    fields = {name: value for name, value in record.items() if name not in left_out and value is not None}
    if isinstance(fields.get(TOOLS), str):
        fields[TOOLS] = _json(fields[TOOLS], f"column {TOOLS!r}", list)
    weights = [_weight(each, index, ignored) for index, each in enumerate(messages)]
    conversation = Conversation([_message(each, index, ignored) for index, each in enumerate(messages)], fields)
    return Chat(conversation, {index: weights[index] for index in conversation.answers})


def messages_of(record: Record, column: str) -> list[Mapping[str, Any]]:
    """Returns the messages in a column, as they are. Raises DataError if they are none."""
    value = value_of(record, column)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"column {column!r} is a {type(value).__name__}: expected a list of messages with role and content")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get(ROLE), str) or not _has_content(message):
            raise DataError(
                f"column {column!r}: message {index} is {shown(json.dumps(message, default=str))}: expected a mapping with the "
                "texts role and content"
            )
        if message[ROLE] != ASSISTANT and message[ROLE] not in ROLES_OF_OTHERS:
            raise DataError(
                f"column {column!r}: message {index} is of role {message[ROLE]!r}: expected {ASSISTANT}, whose messages are the "
                f"targets, or one of {', '.join(sorted(ROLES_OF_OTHERS))}; rename it in the data"
            )
    return list(value)


def prompt_and_completion(record: Record, prompt: str, completion: str) -> tuple[Any, Any]:
    """Returns (the prompt in a column, the completion in another one without the prompt, if it begins with its messages). Raises
    DataError for a text that begins with its prompt, which would be a target."""
    asked, answer = value_of(record, prompt), value_of(record, completion)
    if isinstance(answer, str):
        # One word may well begin its own answer.
        if isinstance(asked, str) and len(asked.split()) > 1 and answer.startswith(asked):
            raise DataError(
                f"the text in column {completion!r} begins with that in {prompt!r} ({shown(asked)}), which would be a target: "
                f"leave the prompt out of {completion!r}"
            )
        return asked, answer
    given = [{ROLE: USER, CONTENT: asked}] if isinstance(asked, str) else asked
    num_given, whole = len(given) if isinstance(given, Sequence) else 0, isinstance(answer, Sequence)
    if num_given and whole and [*map(_of_value, answer[:num_given])] == [*map(_of_value, given)]:
        return given, answer[num_given:]
    return asked, answer


def _of_value(message: Any) -> Any:
    """Returns a message without fields that have no value."""
    return {name: each for name, each in message.items() if each is not None} if isinstance(message, Mapping) else message


def value_of(record: Record, column: str) -> Any:
    """Returns the value in a column. Raises DataError that names the columns that there are."""
    if record.get(column) is None:
        raise DataError(f"there is no {column!r}: it has {', '.join(name for name in record if record[name] is not None)}")
    return record[column]


def leave_out(names: Sequence[str]) -> str:
    """Returns the way out of an error about fields that nothing reads."""
    return f"leave out what is not to be read: data.ignore_columns=[{', '.join(names)}]"


def _has_content(message: Mapping[str, Any]) -> bool:
    content = message.get(CONTENT)
    if content is None:  # a call may stand alone
        return message[ROLE] == ASSISTANT and any(value is not None for name, value in message.items() if name != ROLE)
    return isinstance(content, str | Sequence) and not isinstance(content, bytes)


def _message(message: Mapping[str, Any], index: int, ignored: Collection[str]) -> dict[str, Any]:
    """Returns a message as templates take it: without weights, and without fields that have no value."""
    kept = {name: value for name, value in message.items() if name in (ROLE, CONTENT) or name not in ignored}
    found = {name: value for name, value in kept.items() if name not in WEIGHTS and value is not None}
    if OLD_CALL in found:
        raise DataError(f"message {index} has a {OLD_CALL}: expected {TOOL_CALLS}, a list of {CALL}")
    found.setdefault(CONTENT, "")
    if not isinstance(found[CONTENT], str):
        found[CONTENT] = [_part(part, index) for part in found[CONTENT]]
    if TOOL_CALLS in found:
        found[TOOL_CALLS] = _calls(found[TOOL_CALLS], index)
    return found


def _part(part: Any, index: int) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    if kind != "text" or not isinstance(given.get("text"), str) or len(given) != 2:
        raise DataError(
            f"message {index} has a part {kind!r} in its content ({shown(json.dumps(part, default=str))}): expected "
            "{type: text, text: ...}, for this data is text alone"
        )
    return given


def _calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Returns calls of tools with arguments that are mappings: a template which writes JSON would write a text of JSON as a text
    in quotes."""
    where = f"message {index}: {TOOL_CALLS}"
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"{where} is a {type(calls).__name__}: expected a list of {CALL}")
    return [_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} is {shown(json.dumps(call, default=str))}: expected {CALL}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}: arguments", dict)
    if arguments is not None and not isinstance(arguments, Mapping):
        raise DataError(f"{where}: arguments is {shown(repr(arguments))}: expected a mapping, or a text of JSON that is one")
    made = {**function, "arguments": {} if arguments is None else dict(arguments)}
    return {**call, "function": made} if "function" in call else made


def _json(text: str, name: str, kind: type) -> Any:
    try:
        found = json_records.value_of(text)
    except ValueError as error:
        raise DataError(f"{name} is the text {shown(text)}, which is no JSON: {error}") from error
    if not isinstance(found, kind):
        raise DataError(f"{name} is the text {shown(text)}: expected JSON of a {kind.__name__}")
    return found


def _weight(message: Mapping[str, Any], index: int, ignored: Collection[str]) -> float:
    """Returns how much a message counts as a target, if it is the assistant's: 1 unless it says otherwise."""
    given = {name: message[name] for name in WEIGHTS if name not in ignored and message.get(name) is not None}
    if len(given) > 1:
        raise DataError(f"message {index} has {' and '.join(given)}: expected one of them, which says how much it counts")
    for name, value in given.items():
        if not isinstance(value, bool | int | float) or not math.isfinite(value) or value < 0:
            raise DataError(
                f"message {index}: {name} is {value!r}: expected a number from 0 on, or whether the message is a target"
            )
        if value and message[ROLE] != ASSISTANT:
            raise DataError(
                f"message {index} is of role {message[ROLE]}, and its {name} is {value!r}: only what the {ASSISTANT} writes is a "
                f"target; set 0, or leave out {name}"
            )
        return float(value)
    return 1.0
