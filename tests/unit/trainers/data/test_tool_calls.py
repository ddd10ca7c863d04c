"""What the assistant writes beside texts: calls of tools, thoughts; and the further fields of records for the template."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gangway.errors import DataError
from tests.unit import chat_folders
from trainers.config.data import SourceConfig
from trainers.data.chat import ChatEncoder, CompletionEncoder
from trainers.data.sources.preference import PairEncoder
from trainers.data.sources.records import open_records

TOOLS = [{"type": "function", "function": {"name": "temperature", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "temperature", "arguments": {"city": "Rome", "days": 2}}}
WRITTEN = '<call>{"name": "temperature", "arguments": {"city": "Rome", "days": 2}}</call>'
ASKED = {"role": "user", "content": "How warm is it?"}
RESULT = {"role": "tool", "content": "22"}
ANSWER = {"role": "assistant", "content": "22 degrees."}
IN_JSON = {**CALL, "function": {"name": "temperature", "arguments": '{"city":"Rome","days":2}'}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_folders.by_template(lambda: tmp_path_factory.mktemp("chat"))


def calling(call=CALL, **message):
    return {"role": "assistant", "content": "", "tool_calls": [call], **message}


def encoded(tokenizer, messages, ignored=(), **fields):
    """The text of the conversation, and that of each run of targets."""
    (document,) = ChatEncoder(tokenizer, ignored=ignored).encode([{**fields, "messages": messages}])
    return of(tokenizer, document)


def of(tokenizer, document):
    tokens, weight = document.tokens.tolist(), document.token_weight
    edges = np.flatnonzero(np.diff([0, *(weight > 0), 0]))
    show = tokenizer._tokenizer.decode
    return show(tokens), [show(tokens[first:end]) for first, end in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("call", [CALL, IN_JSON, CALL["function"]])
@pytest.mark.parametrize("content", ["I look it up.", "", None])
def test_a_call_and_the_end_of_its_turn_are_targets(tokenizer, call, content):
    made = tokenizer(chat_folders.TOOLS)
    text, targets = encoded(made, [ASKED, calling(call, content=content), RESULT, ANSWER], tools=TOOLS)
    assert targets == [f"{content or ''}{WRITTEN}<|im_end|>", "22 degrees.<|im_end|>"]
    assert text.startswith('<|im_start|>system\n{"type": "function", "function": {"name": "temperature"')


def test_thoughts_are_targets(tokenizer):
    made = tokenizer(chat_folders.TOOLS)
    messages = [ASKED, calling(reasoning_content="hm"), RESULT, {**ANSWER, "reasoning_content": "so"}]
    assert encoded(made, messages)[1] == [f"<think>hm</think>{WRITTEN}<|im_end|>", "<think>so</think>22 degrees.<|im_end|>"]


def test_a_call_may_end_with_another_token_than_a_content(tokenizer):
    messages = [ASKED, calling(), RESULT, ANSWER, ASKED, ANSWER]
    call = '{"name": "temperature", "parameters": {"city": "Rome", "days": 2}}<|end|>'
    assert encoded(tokenizer(chat_folders.LLAMA_TOOLS), messages)[1] == [call, *["22 degrees.<|eot_id|>"] * 2]


def test_a_template_that_refuses_a_plain_message_before_the_result_of_a_tool(tokenizer):
    found = encoded(tokenizer(chat_folders.ALTERNATING), [ASKED, calling(), RESULT, ANSWER, ASKED, ANSWER])[1]
    call = '[CALLS][{"name": "temperature", "arguments": {"city": "Rome", "days": 2}}]<|end|>'
    assert found == [call, "22 degrees.<|end|>", "22 degrees.<|end|>"]


def test_arguments_are_written_as_json_also_by_a_template_that_wants_a_text(tokenizer):
    of_texts = chat_folders.TOOLS.replace("{{ f.arguments | tojson }}", "{{ '' + f.arguments }}")
    for call in (CALL, IN_JSON):
        assert encoded(tokenizer(of_texts), [ASKED, calling(call)])[1] == [f"{WRITTEN}<|im_end|>"]
    of_python = chat_folders.TOOLS.replace("{{ f.arguments | tojson }}", "{{ f.arguments | string | upper }}")
    with pytest.raises(
        DataError, match=r"writes the arguments of tool_calls neither as JSON.*data\.ignore_columns=\[tool_calls\]"
    ):
        encoded(tokenizer(of_python), [ASKED, calling()])


@pytest.mark.parametrize(
    ("template", "messages", "fields", "names"),
    [
        ("CHATML", [ASKED, ANSWER], {"tools": TOOLS}, "tools"),
        ("CHATML", [ASKED, ANSWER], {"documents": [{"title": "a", "text": "b"}], "id": 3}, "documents, id"),
        ("CHATML", [ASKED, calling(content="Wait.")], {}, None),
        ("CHATML", [ASKED, {**ANSWER, "mask": 0, "reasoning_content": "hm"}], {}, "mask, reasoning_content"),
        ("TOOLS", [{**ASKED, "name": "ann"}, ANSWER], {}, "name"),
        ("TOOLS", [ASKED, ANSWER], {"parallel_tool_calls": False}, "parallel_tool_calls"),
        ("LLAMA_TOOLS", [ASKED, calling(content="I look."), RESULT, ANSWER], {}, None),
        ("LLAMA_TOOLS", [ASKED, {**calling(), "tool_calls": [CALL, {**CALL, "id": "2"}]}], {}, "tool_calls"),
    ],
)
def test_what_a_template_does_not_write_is_refused_by_name(tokenizer, template, messages, fields, names):
    made = tokenizer(getattr(chat_folders, template))
    with pytest.raises(DataError) as error:
        encoded(made, messages, **fields)
    if names is not None:
        assert f"does not write {names}: give a template that does, or leave out" in str(error.value)
        assert f"data.ignore_columns=[{names}]" in str(error.value)
        ignored = names.split(", ")
        rest = [{name: value for name, value in message.items() if name not in ignored} for message in messages]
        if names != "tool_calls":
            assert encoded(made, messages, ignored, **fields) == encoded(made, rest)


def test_roles_and_contents_that_a_template_leaves_out_are_refused(tokenizer):
    only_two = chat_folders.CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    with pytest.raises(DataError, match="does not write the content of role system"):
        encoded(tokenizer(only_two), [{"role": "system", "content": "be brief"}, ASKED, ANSWER])


def test_fields_of_a_template_of_ones_own_reach_it(tokenizer):
    own = (
        "{{ topic }}{% for m in messages %}{{ '<|im_start|>' + m.role + ('=' + m.name if m.name else '') + '\n' + m.content "
        "+ '<|im_end|>\n' }}{% endfor %}{{ style | tojson }}"
    )
    text, targets = encoded(
        tokenizer(own), [{**ASKED, "name": "ann"}, {**ANSWER, "name": "bob"}], topic="weather", style={"a": 1}
    )
    assert text == (
        'weather<|im_start|>user=ann\nHow warm is it?<|im_end|>\n<|im_start|>assistant=bob\n22 degrees.<|im_end|>\n{"a": 1}'
    )
    assert targets == ["22 degrees.<|im_end|>"]


def test_the_fields_of_pairs_and_completions_reach_the_template(tokenizer):
    made = tokenizer(chat_folders.TOOLS)
    (document,) = CompletionEncoder(made).encode([{"prompt": [ASKED], "completion": [calling()], "tools": TOOLS}])
    assert of(made, document)[1] == [f"{WRITTEN}<|im_end|>"]
    pair = PairEncoder(made).encode([{"chosen": [ASKED, calling()], "rejected": [ASKED, ANSWER], "tools": TOOLS}])
    assert [of(made, each)[1] for each in pair] == [[f"{WRITTEN}<|im_end|>"], ["22 degrees.<|im_end|>"]]
    assert all(of(made, each)[0].startswith("<|im_start|>system\n{") for each in pair)
    with pytest.raises(DataError, match=r"does not write id: .*data\.ignore_columns=\[id\]"):
        PairEncoder(made).encode([{"chosen": [ASKED, calling()], "rejected": [ASKED, ANSWER], "id": 7}])


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            {"function_call": {"name": "f", "arguments": "{}"}, "content": ""},
            r"message 1 has a function_call: expected tool_calls",
        ),
        ({"content": None}, "message 1 is .* expected a mapping with the texts role and content"),
        ({"tool_calls": "f()"}, "message 1: tool_calls is a str: expected a list of"),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, r"message 1: tool_calls\[0\] is .* expected {type: function"),
        ({"tool_calls": [{"name": "f", "arguments": "{"}]}, r"tool_calls\[0\]: arguments is the text '{', which is no JSON"),
        ({"tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}, "which is no JSON: the key 'a' is there twice"),
        ({"tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]}, "which is no JSON: NaN is no JSON"),
        ({"tool_calls": [{"name": "f", "arguments": '{"a": 1e999}'}]}, "which is no JSON: 1e999 is more than a number can be"),
        ({"tool_calls": [{"name": "f", "arguments": '{"a": "\\ud83d"}'}]}, "which is no JSON: 'a' has half of a sign of UTF-16"),
        ({"tool_calls": [{"name": "f", "arguments": "[1]"}]}, "arguments is the text .* expected JSON of a dict"),
        ({"tool_calls": [{"name": "f", "arguments": [1]}]}, "arguments is '.1.': expected a mapping"),
        ({"content": [{"type": "image", "image": "a.png"}]}, "message 1 has a part 'image' in its content"),
        (
            {"content": [{"type": "text", "text": "a"}]},
            "does not write the content of role assistant, a list of parts|refuses it",
        ),
    ],
)
def test_messages_that_no_template_takes(tokenizer, message, error):
    with pytest.raises(DataError, match=error):
        encoded(tokenizer(chat_folders.TOOLS), [ASKED, {"role": "assistant", "content": "", **message}])


def test_columns_that_hold_json_or_a_name_of_the_library(tokenizer):
    made = tokenizer(chat_folders.TOOLS)
    assert encoded(made, [ASKED, ANSWER], tools=json.dumps(TOOLS)) == encoded(made, [ASKED, ANSWER], tools=TOOLS)
    with pytest.raises(DataError, match="column 'tools' is the text 'search', which is no JSON"):
        encoded(made, [ASKED, ANSWER], tools="search")
    with pytest.raises(DataError, match="the columns tokenize have names that no field for a template can have"):
        encoded(made, [ASKED, ANSWER], tokenize=True)
    assert encoded(made, [{**ASKED, "tool_calls": None}, ANSWER], tools=None) == encoded(made, [ASKED, ANSWER])


@pytest.mark.parametrize(
    ("given", "weight"), [({"weight": 0}, 0), ({"train": False}, 0), ({"loss_mask": 1}, 1), ({"weight": 0.5}, 0.5)]
)
@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
def test_a_message_says_how_much_it_counts(tokenizer, template, given, weight):
    made = tokenizer(getattr(chat_folders, template))
    plain, weighted = (
        ChatEncoder(made).encode([{"messages": [ASKED, {**ANSWER, **each}, {**ASKED, "weight": 0}, ANSWER]}])[0]
        for each in ({}, given)
    )
    np.testing.assert_array_equal(plain.tokens, weighted.tokens)
    first, last = np.split(np.flatnonzero(plain.token_weight), 2)
    assert set(weighted.token_weight[first]) == {np.float32(weight)}
    assert set(weighted.token_weight[last]) == {1.0}
    for ignored in [("weight", "train", "loss_mask")]:
        (again,) = ChatEncoder(made, ignored=ignored).encode([{"messages": [ASKED, {**ANSWER, **given}, ASKED, ANSWER]}])
        np.testing.assert_array_equal(again.token_weight, plain.token_weight)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([ASKED, {**ANSWER, "weight": 0}], "has no target: no message of it is the assistant's, and counts"),
        ([ASKED, {**ANSWER, "weight": -1}], "message 1: weight is -1: expected a number from 0 on"),
        ([ASKED, {**ANSWER, "train": "no"}], "message 1: train is 'no'"),
        ([ASKED, {**ANSWER, "train": True, "weight": 0}], "message 1 has weight and train: expected one of them"),
        ([{**ASKED, "train": True}, ANSWER], "message 0 is of role user, and its train is True: only what the assistant"),
        ([ASKED, {**ANSWER, "loss_weight": 0}], "does not write loss_weight"),
    ],
)
def test_weights_that_are_none(tokenizer, messages, error):
    with pytest.raises(DataError, match=error):
        encoded(tokenizer(chat_folders.CHATML), messages)


def test_a_pair_has_no_weights_but_0_and_1(tokenizer):
    with pytest.raises(DataError, match=r"a message has a weight of 0\.5: expected 0 or 1 in a pair"):
        PairEncoder(tokenizer(chat_folders.CHATML)).encode(
            [{"prompt": [ASKED], "chosen": [{**ANSWER, "weight": 0.5}], "rejected": [ASKED, ANSWER]}]
        )


def test_fields_that_a_table_gives_to_every_row_are_not_there(tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    other = {"type": "function", "function": {"name": "f", "arguments": {"rest": [{"a": 1}, {"b": None}]}}}
    records = [
        {"messages": [ASKED, calling(), RESULT, ANSWER], "tools": TOOLS},
        {"messages": [ASKED, calling(other)], "tools": None},
    ]
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    encoder = ChatEncoder(tokenizer(chat_folders.TOOLS))
    expected = encoder.encode(records[:1])[0]
    for path in ("a.parquet", "a.arrow"):
        read = open_records(SourceConfig(paths=(str(tmp_path / path),)))
        np.testing.assert_array_equal(encoder.encode([read[0]])[0].tokens, expected.tokens)
        assert read[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"rest": [{"a": 1}, {}]}
