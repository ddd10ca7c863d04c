"""The arguments of calls of tools, in the form of which a chat template writes JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gangway.errors import DataError
from trainers.data.messages import leave_out
from trainers.text import turns
from trainers.text.tokenizers import FolderTokenizer
from trainers.text.turns import TOOL_CALLS, Conversation


def with_arguments(tokenizer: FolderTokenizer, chat: Conversation) -> Conversation:
    """Returns the conversation with the arguments of calls as the template writes JSON of them: as mappings, or as texts. Raises
    DataError if it does so of neither."""
    if not any(message.get(TOOL_CALLS) for message in chat.messages):
        return chat
    for form in (dict, json_of):
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


def json_of(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


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
