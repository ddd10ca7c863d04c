"""What ends a turn is trained, whatever it is made of; or else the start says so. A generation stops by it."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit import chat_folders
from trainers.commands import generate
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.config.evaluation import ExactMatchConfig
from trainers.data.chat import ChatEncoder
from trainers.data.sources.conversations import conversations
from trainers.data.sources.preference import preference_pairs
from trainers.data.sources.text import text_windows
from trainers.evaluation.exact_match import ExactMatch
from trainers.text.tokenizers import FolderTokenizer

ASKED, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}
ALPACA = (
    "{% for m in messages %}{{ ('### Instruction:\n' if m.role == 'user' else '### Response:\n') + m.content + '\n\n' }}"
    "{% endfor %}"
)
LETTERS = chat_folders.CHATML.replace("<|im_end|>", "[/end]")
MARKED_WITHOUT = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)
HEADERS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
LAST = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ '<|end|>' }}"
CASES = {
    "several": (LETTERS, (), ["Hello[/end]"] * 2),
    "plain": (LETTERS, ("[/end]",), ["Hello[/end]"] * 2),
    "alpaca": (ALPACA, (), ["Hello"] * 2),
    "marked": (MARKED_WITHOUT, (), ["Hello"] * 2),
    "headers": (HEADERS, (), ["Hello"] * 2),
    "last": (LAST, (), ["Hello", "Hello\n<|end|>"]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("folders")
    return {name: chat_folders.write(path / name, template, plain=plain) for name, (template, plain, _) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_a_turn_is_a_target(folders, name):
    tokenizer = FolderTokenizer(str(folders[name]))
    encoder, record = ChatEncoder(tokenizer), {"messages": [ASKED, ANSWER, ASKED, ANSWER]}
    (document,) = encoder.encode([record])
    weight = document.token_weight
    edges = np.flatnonzero(np.diff([0, *(weight > 0), 0]))
    runs = zip(edges[::2], edges[1::2], strict=True)
    assert [tokenizer.raw(document.tokens[first:end].tolist()) for first, end in runs] == CASES[name][2]
    begins = [line for line in encoder.notes(record) if "a generation begins otherwise than" in line]
    # All but the first two have no add_generation_prompt.
    assert len(begins) == (name not in ("several", "plain"))
    assert all("the template has no add_generation_prompt, which writes it" in line for line in begins)
    told = [line for line in encoder.notes(record) if line not in begins]
    assert len(told) == (name not in ("several", "plain"))
    if told:
        how = "marks" if name == "marked" else "writes"
        assert f"for the chat template of {tokenizer.source} {how} none: the model does not learn to stop" in told[0]
        assert told[0].endswith("Hello'")


def test_a_generation_stops_by_what_ends_a_turn(folders):
    of = {name: FolderTokenizer(str(folder)) for name, folder in folders.items()}
    end = of["plain"]._tokenizer.convert_tokens_to_ids("[/end]")
    assert (of["plain"].stop_ids(), of["plain"].stop_texts()) == ((of["plain"].separator, end), ())
    assert (of["several"].stop_ids(), of["several"].stop_texts()) == ((of["several"].separator,), ("[/end]",))
    assert (of["alpaca"].stop_ids(), of["alpaca"].stop_texts()) == ((of["alpaca"].separator,), ())


def test_of_two_ends_that_begin_alike_none_is_the_end_of_each_turn_and_both_are_targets(tmp_path):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '<|end|>' if loop.last else '<|eot_id|>' }}{% endfor %}"
    )
    tokenizer = FolderTokenizer(str(chat_folders.write(tmp_path / "folder", template)))
    assert (tokenizer.end_of_turn, tokenizer.stop_texts()) == (None, ())
    (document,) = ChatEncoder(tokenizer).encode([{"messages": [ASKED, ANSWER, ASKED, ANSWER]}])
    assert tokenizer.raw(document.tokens[document.token_weight > 0].tolist()) == "Hello<|eot_id|>Hello<|end|>"


def test_an_end_of_two_special_tokens_is_trained_whole_and_stopped_at_its_last(tmp_path):
    """As <|END_RESPONSE|><|END_OF_TURN_TOKEN|> of Cohere: the header of the next message is no part of it."""
    template = (
        "{% for m in messages %}{{ '<|im_start|><|start_header_id|>' + m.role + '\n' + m.content + '<|im_end|><|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|><|start_header_id|>assistant\n' }}{% endif %}"
    )
    tokenizer = FolderTokenizer(str(chat_folders.write(tmp_path / "folder", template)))
    last = tokenizer.encode_rendered("<|eot_id|>").tokens[0]
    assert tokenizer.end_of_turn == "<|im_end|><|eot_id|>"
    assert (tokenizer.stop_ids(), tokenizer.stop_texts()) == ((tokenizer.separator, last), ())
    (document,) = ChatEncoder(tokenizer).encode([{"messages": [ASKED, ANSWER, ASKED, ANSWER]}])
    assert tokenizer.raw(document.tokens[document.token_weight > 0].tolist()) == "Hello<|im_end|><|eot_id|>" * 2


@pytest.mark.parametrize("chat", [True, False])
def test_the_command_and_the_evaluation_stop_by_a_text_that_ends_a_turn(folders, tmp_path, chat):
    tokenizer = FolderTokenizer(str(folders["several"]))
    options = argparse.Namespace(stop=["\n"], chat=chat)
    assert generate.stop_texts(SimpleNamespace(tokenizer=tokenizer), options) == (("\n", "[/end]") if chat else ("\n",))

    made = from_dict(TrainingArguments, {"name": "run", "max_num_steps": 1, "data": {"tokenizer": tokenizer.source}})
    counted = ExactMatch(made, ExactMatchConfig(paths=("x",), chat=chat))
    tokens = tokenizer.encode("no idea[/end]#### 7 ")
    counted.add(
        {"tokens": np.array([tokens], np.int32), "num_tokens": np.array([len(tokens)])},
        {"answer": np.array([[ord("7")]], np.int32)},
    )
    assert counted.compute()["answered"] == (0 if chat else 1)


def arguments(tmp_path, records, **data):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    model = {
        "vocab_size": chat_folders.NUM_IDS + 1,
        "width": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "mlp_width": 16,
    }
    settings = {"paths": [str(path)], "sequence_length": 96, "eval_fraction": 0.0, "shuffle": False, **data}
    return from_dict(TrainingArguments, {"name": "t", "max_num_steps": 1, "model": model, "data": settings})


def test_the_start_says_that_nothing_ends_a_turn(folders, tmp_path, events, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    chats, tokenizer = [{"messages": [ASKED, ANSWER]}], str(folders["alpaca"])
    pairs = [{"prompt": [ASKED], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No"}]}]
    conversations(arguments(tmp_path, chats, tokenizer=tokenizer))
    for _ in range(2):  # made, and found
        text_windows(arguments(tmp_path, chats, tokenizer=tokenizer, packing="fit"))
    preference_pairs(arguments(tmp_path, pairs, tokenizer=tokenizer))
    told = [event["message"] for event in events if event["ev"] == "note" and "does not learn to stop" in event["message"]]
    assert len(told) == 4
