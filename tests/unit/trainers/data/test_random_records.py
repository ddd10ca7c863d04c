"""Records with random fields: each becomes the right document, or is refused by the name of a field that nothing would read."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from gangway.errors import DataError
from tests import fuzz
from tests.unit import chat_folders
from trainers.config.data import SourceConfig
from trainers.data.chat import ChatEncoder
from trainers.data.sources.records import open_records
from trainers.text.tokenizers import FolderTokenizer

TEXTS = st.text("ab\"'\\{} \né😀<|", min_size=1, max_size=6).filter(lambda text: "<|" not in text)
VALUES = st.one_of(TEXTS, st.integers(-3, 3), st.booleans(), st.none(), st.lists(TEXTS, max_size=2))
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=2)
CALLS = st.builds(
    lambda name, arguments, in_text, flat: (
        function := {"name": name, "arguments": json.dumps(arguments) if in_text else arguments},
        function if flat else {"type": "function", "function": function},
    )[1],
    st.sampled_from(["look", "go on"]),
    ARGUMENTS,
    st.booleans(),
    st.booleans(),
)
WEIGHTS = st.one_of(
    st.just({}),
    st.builds(lambda value: {"weight": value}, st.sampled_from([0, 1, 0.5, None])),
    st.builds(lambda value: {"train": value}, st.booleans()),
    st.builds(lambda value: {"loss_mask": value}, st.sampled_from([0, 1])),
)
ODD = st.dictionaries(st.sampled_from(["name", "mask", "score", "id"]), st.sampled_from(["x", 3, None, ""]), max_size=1)


@st.composite
def messages(draw):
    role = draw(st.sampled_from(["user", "assistant", "assistant", "tool", "system"]))
    message = {"role": role, "content": draw(TEXTS), **draw(ODD)}
    if role == "tool":
        return message | draw(st.sampled_from([{}, {"tool_call_id": "c7"}, {"tool_call_id": None}]))
    if role != "assistant":
        return message | draw(st.sampled_from([{}, {"weight": 0}, {"tool_calls": None}]))
    message |= draw(WEIGHTS)
    if draw(st.booleans()):
        message["tool_calls"] = draw(st.lists(CALLS, min_size=1, max_size=2))
        message["content"] = draw(st.one_of(TEXTS, st.sampled_from(["", None])))
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXTS)
    return message


RECORDS = st.builds(
    lambda turns, more: {"messages": turns, **more},
    st.lists(messages(), min_size=1, max_size=5),
    st.fixed_dictionaries(
        {},
        optional={
            "tools": st.sampled_from([[{"name": "look"}], '[{"name": "look"}]', None, []]),
            "id": st.sampled_from([17, None]),
            "documents": st.just([{"title": "a", "text": "b"}]),
        },
    ),
)
WRITTEN = {
    "TOOLS": {"role", "content", "tool_calls", "reasoning_content", "tool_call_id", "tools"},
    "CHATML": {"role", "content"},
}
"""The fields that each template writes."""
OF_WEIGHT = ("weight", "train", "loss_mask")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    path = tmp_path_factory.mktemp("folders")
    return {name: FolderTokenizer(str(chat_folders.write(path / name, getattr(chat_folders, name)))) for name in WRITTEN}


def unread(record, written):
    """The fields that have a value, and that the template does not write."""
    fields = [*record.items(), *(field for message in record["messages"] for field in message.items())]
    return {name for name, value in fields if value not in (None, "", []) and name not in {*written, *OF_WEIGHT, "messages"}}


def expected(record):
    """The pieces of the text of a record, with the weight of each as a target."""
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if tools:
        yield f"<|im_start|>system\n{''.join(map(json.dumps, tools))}<|im_end|>\n", 0.0
    for message in record["messages"]:
        yield f"<|im_start|>{message['role']}\n", 0.0
        thought = f"<think>{message['reasoning_content']}</think>" if message.get("reasoning_content") else ""
        said = thought + (message["content"] or "") + "".join(map(called, message.get("tool_calls") or []))
        said += f" for {message['tool_call_id']}" if message.get("tool_call_id") else ""
        weight = next((float(message[name]) for name in OF_WEIGHT if message.get(name) is not None), 1.0)
        yield f"{said}<|im_end|>", weight if message["role"] == "assistant" else 0.0
        yield "\n", 0.0


def called(call):
    function = call.get("function", call)
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f'<call>{{"name": "{function["name"]}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}</call>'


def check(tokenizer, name, record):
    pieces, odd = [*expected(record)], unread(record, WRITTEN[name])
    if not any(weight for _, weight in pieces):
        with pytest.raises(DataError, match="has no target: no message of it is the assistant's"):
            ChatEncoder(tokenizer).encode([record])
    elif odd:
        with pytest.raises(DataError) as error:
            ChatEncoder(tokenizer).encode([record])
        assert any(f"does not write {field}" in str(error.value) or f", {field}" in str(error.value) for field in odd), str(error)
        # On purpose, it is as if the fields were not there.
        if not odd & {"tool_calls", "reasoning_content"}:
            bare = {each: value for each, value in record.items() if each not in odd}
            bare["messages"] = [{each: value for each, value in of.items() if each not in odd} for of in record["messages"]]
            found, plain = ChatEncoder(tokenizer, ignored=odd).encode([record]), ChatEncoder(tokenizer).encode([bare])
            np.testing.assert_array_equal(found[0].tokens, plain[0].tokens)
            np.testing.assert_array_equal(found[0].token_weight, plain[0].token_weight)
    else:
        (document,) = ChatEncoder(tokenizer).encode([record])
        assert tokenizer.raw(document.tokens.tolist()) == "".join(text for text, _ in pieces)
        lengths = [len(tokenizer.encode_rendered(text).tokens) for text, _ in pieces]
        np.testing.assert_array_equal(document.token_weight, np.repeat([weight for _, weight in pieces], lengths))


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=25)
@given(record=RECORDS)
def test_a_record_is_the_right_document_or_refused_by_name(tokenizers, name, record):
    check(tokenizers[name], name, record)


@pytest.mark.slow("many records; `make fuzz KIND=records` has more")
@pytest.mark.parametrize("name", WRITTEN)
@seed(fuzz.seed(11))
@settings(max_examples=fuzz.count(100))
@given(record=RECORDS)
def test_many_records_are_right_or_refused_by_name(tokenizers, name, record):
    check(tokenizers[name], name, record)


# ---------------------------------------------------------------------- what `datasets` writes of them


def without_none(value):
    """What a table cannot tell from nothing: fields that another record has, and this one has not."""
    if isinstance(value, dict):
        return {name: found for name, each in value.items() if (found := without_none(each)) is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def check_written(records, folder):
    """As Parquet, and as a folder of `save_to_disk`. Returns whether `datasets` can write them at all."""
    import datasets
    import pyarrow

    for stale in folder.iterdir():
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    names = dict.fromkeys(name for record in records for name in record)
    try:
        table = datasets.Dataset.from_dict({name: [record.get(name) for record in records] for name in names})
        table.save_to_disk(str(folder / "saved"))
        table.to_parquet(str(folder / "a.parquet"))
    except (pyarrow.ArrowException, TypeError, ValueError):
        return False
    for path in (folder / "a.parquet", folder / "saved"):
        try:
            found = [dict(record) for record in open_records(SourceConfig(paths=(str(path),)))]
        except DataError as error:
            assert re.search(r"(record|row|column)", str(error)), str(error)  # noqa: PT017
            continue
        assert without_none(found) == without_none(records), path
    return True


@pytest.mark.slow("many files; `make fuzz KIND=tables` has more")
def test_many_records_come_back_from_the_files_of_datasets(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    folder, written = tmp_path / "files", []
    folder.mkdir()

    @seed(fuzz.seed(12))
    @settings(max_examples=fuzz.count(60))
    @given(records=st.lists(RECORDS, min_size=1, max_size=4))
    def each(records):
        written.append(check_written(records, folder))

    each()
    assert sum(written) > len(written) / 4
