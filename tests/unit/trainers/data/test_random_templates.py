"""Chat templates made of random parts: what the assistant says is in the targets, or the record is refused."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from gangway.errors import DataError
from tests import fuzz
from tests.unit import chat_folders
from trainers.data.chat import ChatEncoder

HEADERS = ("<|im_start|>{}\n", "[{}] ", "<|start_header_id|>{}<|end_header_id|>\n\n")
CONTENTS = {
    "as it is": ("m.content", lambda text: text),
    "trimmed": ("m.content | trim", lambda text: text.strip()),
    "without thoughts": ("m.content.split('</think>')[-1]", lambda text: text.rpartition("</think>")[2]),
    "cut": ("m.content[:4]", lambda text: text[:4]),
    "changed": ("m.content | replace('a', 'b')", lambda text: text.replace("a", "b")),
    "beside no call": ("m.content if not m.tool_calls else ''", None),
}
"""How the assistant's content is written: in the template, and here."""
CALLS = {
    "written": "{% for c in m.tool_calls or [] %}{{ '<call>' + c.name + ' ' }}{{ c.arguments | tojson }}{% endfor %}",
    "the first": "{% for c in (m.tool_calls or [])[:1] %}{{ '<call>' + c.name + ' ' }}{{ c.arguments | tojson }}{% endfor %}",
    "by name": "{% for c in m.tool_calls or [] %}{{ '<call>' + c.name + ' ' }}{% endfor %}",
    "dropped": "",
}
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


class Parts(NamedTuple):
    header: str
    content: str
    thoughts: bool
    """Whether `reasoning_content` is written."""
    place: bool
    """Whether an answer begins with an empty thought, which the prompt of a generation has not."""
    calls: str
    marks: str
    """`none`, or what is marked: what the assistant `says`, its whole `turn` with the end, `everything` (each message)."""
    end: str
    default: str
    """What stands in front of a conversation without a message of the system."""

    def template(self) -> str:
        def written(text: str) -> str:
            return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""

        says = (
            "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}" if self.thoughts else ""
        )
        says += "{{ " + CONTENTS[self.content][0] + " }}" + CALLS[self.calls]
        begin, stop = ("{% generation %}", "{% endgeneration %}") if self.marks != "none" else ("", "")
        place, end, header = written(EMPTY_THOUGHT if self.place else ""), written(self.end), self.header.split("{}")
        turn = {
            "none": place + says + end,
            "says": place + begin + says + stop + end,
            "turn": begin + place + says + end + stop,
            "everything": begin + place + says + end + stop,
        }[self.marks]
        other = "{{ m.content }}" + end
        other = begin + other + stop if self.marks == "everything" else other
        return (
            f"{{% if messages[0].role != 'system' %}}{written(self.default)}{{% endif %}}"
            f"{{% for m in messages %}}{written(header[0])}{{{{ m.role }}}}{written(header[1])}"
            f"{{% if m.role == 'assistant' %}}{turn}{{% else %}}{other}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{written(self.header.format('assistant'))}{{% endif %}}"
        )

    def says(self, message: dict) -> str:
        thought = message.get("reasoning_content") if self.thoughts else None
        called = (
            f"<call>{c['name']} " + ("" if self.calls == "by name" else json.dumps(c["arguments"])) for c in self.called(message)
        )
        return (f"<think>{thought}</think>" if thought else "") + self.contents(message) + "".join(called)

    def contents(self, message: dict) -> str:
        change = CONTENTS[self.content][1]
        return change(message["content"]) if change else "" if message.get("tool_calls") else message["content"]

    def called(self, message: dict) -> list[dict]:
        calls = message.get("tool_calls") or []
        return {"written": calls, "the first": calls[:1], "by name": calls, "dropped": []}[self.calls]

    def loses(self, message: dict) -> bool:
        """Whether something that a message says is not what is written of it, but for white space around it."""
        calls = message.get("tool_calls") or []
        of_calls = self.called(message) != calls or (self.calls == "by name" and calls)
        of_thoughts = message.get("reasoning_content") and not self.thoughts
        return bool(of_calls or of_thoughts) or self.contents(message).strip() != message["content"].strip()


class Piece(NamedTuple):
    text: str
    is_target: bool


def pieces(parts: Parts, messages: list[dict]) -> list[Piece]:
    """The text of a conversation, and what of it a model learns to write."""
    found = [Piece(parts.default if messages[0]["role"] != "system" else "", False)]
    for message in messages:
        found.append(Piece(parts.header.format(message["role"]), False))
        if message["role"] != "assistant":
            found.append(Piece(message["content"] + parts.end, False))
            continue
        # An answer begins where a generation does.
        found.append(Piece(EMPTY_THOUGHT if parts.place else "", parts.marks != "says"))
        found.append(Piece(parts.says(message), True))
        end = parts.end.rstrip() if parts.marks == "none" else parts.end
        found.append(Piece(end, parts.marks != "says"))
        found.append(Piece(parts.end[len(end) :], False))
    return [piece for piece in found if piece.text]


WORDS = st.text("ab cd\n", min_size=1, max_size=8)
CALL = st.builds(
    lambda name, value: {"name": name, "arguments": {"n": value}}, st.sampled_from(["look", "go"]), st.integers(0, 9)
)


@st.composite
def answers(draw):
    content = draw(st.one_of(WORDS, WORDS, st.builds(lambda a, b: f"<think>{a}</think>{b}", WORDS, WORDS), st.just("")))
    message = {"role": "assistant", "content": content}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(st.text("tuv", min_size=1, max_size=4))
    if draw(st.booleans()):
        message["tool_calls"] = draw(st.lists(CALL, min_size=1, max_size=2))
    return message


@st.composite
def conversations(draw):
    messages = draw(st.sampled_from([[], [{"role": "system", "content": "sys"}]]))
    for _ in range(draw(st.integers(1, 2))):
        messages = [*messages, {"role": "user", "content": draw(WORDS)}, draw(answers())]
    return messages


PARTS = st.builds(
    Parts,
    header=st.sampled_from(HEADERS),
    content=st.sampled_from([*CONTENTS, "as it is", "as it is", "trimmed"]),
    thoughts=st.sampled_from([True, True, False]),
    place=st.booleans(),
    calls=st.sampled_from([*CALLS, "written", "written"]),
    marks=st.sampled_from(["none", "none", "says", "turn", "everything"]),
    end=st.sampled_from(["<|im_end|>\n", "<|im_end|>", "<|end|>", "\n", ""]),
    default=st.sampled_from(["", "<|begin_of_text|>", "<|im_start|>system\nbe good<|im_end|>\n"]),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_folders.by_template(lambda: tmp_path_factory.mktemp("folders"))


def encoded(tokenizer, messages):
    """(The document, why there is none)."""
    try:
        return ChatEncoder(tokenizer).encode([{"messages": messages}])[0], ""
    except DataError as error:
        return None, str(error)


def check(tokenizer, parts, messages):
    made, expected = tokenizer(parts.template()), pieces(parts, messages)
    says = [parts.says(message) for message in messages if message["role"] == "assistant"]
    document, refused = encoded(made, messages)
    if document is None:
        may_refuse = (
            parts.marks == "everything"
            or parts.content in ("cut", "changed")  # of another record
            or any(parts.loses(message) for message in messages if message["role"] == "assistant")
            or not any(says)  # there is no target
        )
        assert may_refuse, f"refused, though all is written: {refused}"
        return
    assert parts.marks != "everything", "what the user says is a target"
    lost = [message for message in messages if message["role"] == "assistant" and parts.loses(message)]
    assert not lost, f"it does not write {lost}, and that is not told"
    tokens = document.tokens.tolist()
    assert made.raw(tokens) == "".join(piece.text for piece in expected)
    learnt = "".join(made.raw([token]) if weight else "|" for token, weight in zip(tokens, document.token_weight, strict=True))
    wanted = "".join(piece.text if piece.is_target else "|" * len(made.encode_rendered(piece.text).tokens) for piece in expected)
    assert learnt == wanted


@settings(max_examples=60)
@given(parts=PARTS, messages=conversations())
def test_what_a_template_does_not_write_is_refused_and_the_rest_is_the_target(tokenizer, parts, messages):
    check(tokenizer, parts, messages)


@pytest.mark.slow("many templates; `make fuzz KIND=templates` has more")
@seed(fuzz.seed(5))
@settings(max_examples=fuzz.count(200))
@given(parts=PARTS, messages=conversations())
def test_many_templates_are_right_or_refused(tokenizer, parts, messages):
    check(tokenizer, parts, messages)
