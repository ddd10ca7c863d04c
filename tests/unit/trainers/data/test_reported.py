"""Small inputs, one for each kind of fault that people have reported of other trainers: right here, or refused by name."""

from __future__ import annotations

import json
import re

import datasets
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from gangway.errors import DataError, UsageError
from tests.unit import chat_folders
from trainers import runtime
from trainers.commands.generate import _parse, prompts_of
from trainers.config.arguments import TrainingArguments, dataset_function, from_dict
from trainers.config.data import DataConfig
from trainers.data.chat import ChatEncoder, CompletionEncoder
from trainers.data.sources.preference import PairEncoder
from trainers.data.sources.records import open_records
from trainers.evaluation.exact_match import same
from trainers.text.tokenizers import load

HEADER, END = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' ", "+ '<|im_end|>\n' }}{% endfor %}"
REPLY = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = HEADER + "+ m.content " + END + REPLY
MODEL = {"vocab_size": 400, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}
CASES, MAY, MUST = [], set(), set()
"""What is to be right; of which an error that names the fault is as good, and for which it is the only answer."""


def case(function):
    CASES.append(function)
    return function


def may_be_refused(function):
    MAY.add(function)
    return case(function)


def must_be_refused(function):
    MUST.add(function)
    return case(function)


def u(text):
    return {"role": "user", "content": text}


def a(text):
    return {"role": "assistant", "content": text}


def made(path, template, tokenizer=None, **about):
    folder = chat_folders.write(path / "folder", template, **about)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return load(str(folder))


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def args(path, **changed):
    data = {"eval_fraction": 0.0, "sequence_length": 64, **changed.pop("data")}
    about = {"name": "t", "storage": str(path), "max_num_steps": 1, "model": MODEL, "data": data, **changed}
    return from_dict(TrainingArguments, about)


def show(tokenizer, document):
    """The text, with targets in ⟦ ⟧."""
    out, inside = "", False
    for token, weight in zip(document.tokens, document.token_weight, strict=True):
        if (weight > 0) != inside:
            out, inside = out + ("⟦" if weight > 0 else "⟧"), weight > 0
        out += tokenizer.raw([int(token)])
    return out + ("⟧" if inside else "")


def chat(tokenizer, *messages, **fields):
    return show(tokenizer, ChatEncoder(tokenizer).encode([{"messages": [*messages], **fields}])[0])


@may_be_refused
def what_datasets_writes_as_json_is_json(path):
    rows = [
        {"tools": [{"function": {"name": n, "parameters": {"type": "object", "properties": p}}}], "messages": [u("q"), a("x")]}
        for n, p in (("f", {"a": {"type": "integer"}}), ("g", {"b": {"type": "string", "enum": ["x"]}}))
    ]
    of_rows = {"data_files": str(jsonl(path / "tools.jsonl", rows)), "cache_dir": str(path / "cache")}
    datasets.load_dataset("json", split="train", **of_rows).to_parquet(str(path / "tools.parquet"))
    found = open_records(DataConfig(paths=(str(path / "tools.parquet"),)))[0]["tools"]
    return isinstance(found[0]["function"]["parameters"]["properties"], dict)


@may_be_refused
def thoughts_that_a_marked_template_drops(path):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content.split('</think>')[-1] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '\n' }}{% endfor %}"
    )
    return "why" in chat(made(path, template), u("q"), a("<think>why</think>so"))


@may_be_refused
def marks_that_run_on(path):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
        "{{ '<|im_start|>' + m.content }}{% endif %}{% endfor %}"
    )
    return not re.search("⟦[^⟧]*QUESTION", chat(made(path, template), a("A"), u("QUESTION")))


@may_be_refused
def a_file_that_is_named_twice(path):
    jsonl(path / "a.jsonl", [{"text": f"text {number} end"} for number in range(50)])
    paths = [str(path / "a.jsonl"), str(path / "*.jsonl")]
    given = args(path, data={"paths": paths, "eval_fraction": 0.2, "sequence_length": 32, "packing": "fit"})

    def texts(rows):
        lines = [bytes(int(x) for x in rows[i]["tokens"] if x < 256).decode(errors="ignore") for i in range(len(rows))]
        return {text for line in lines for text in re.findall(r"text \d+ end", line.replace("\0", ""))}

    train, held = dataset_function(given)(given)[:2]
    return not texts(train) & texts(held)


@case
def a_generation_begins_where_an_answer_does(path):
    template = HEADER + "+ ('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') + m.content " + END + REPLY
    tokenizer = made(path, template)
    (document,) = ChatEncoder(tokenizer).encode([{"messages": [u("q"), a("yo")]}])
    return document.tokens[: np.flatnonzero(document.token_weight)[0]].tolist() == tokenizer.chat([u("q")])


@case
def a_space_that_a_tokenizer_puts_before_each_text(path):
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *(chr(c) for c in range(33, 127))]
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    read = made(path, None, tokenizer, eos_token="</s>")
    return read.decode(CompletionEncoder(read).encode([{"prompt": "2+2=", "completion": "4"}])[0].tokens.tolist()) == "2+2=4"


@may_be_refused
def a_prompt_that_the_completion_repeats(path):
    pair = {"prompt": [u("P?")], "chosen": [u("P?"), a("4")], "rejected": [u("P?"), a("5")]}
    tokenizer = made(path, CHATML)
    return show(tokenizer, PairEncoder(tokenizer).pair(pair)[0]).count("P?") == 1


@may_be_refused
def another_name_of_the_assistant(path):
    said = chat(made(path, CHATML), u("q"), {"role": "Assistant", "content": "FIRST"}, u("q"), a("x"))
    return re.search("⟦[^⟧]*FIRST", said) is not None


@may_be_refused
def a_column_that_another_one_hides(path):
    rows = [{"text": "THE TEXT", "content": "the content"}] * 8
    data = {"paths": [str(jsonl(path / "c.jsonl", rows))], "columns": {"text": "content"}, "packing": "fit"}
    given, events = args(path, data=data), []
    runtime.install(runtime.Runtime(events.append))
    dataset_function(given)(given)
    return any("text" in str(event) for event in events)


@may_be_refused
def classes_in_another_order(path):
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["World", "Sports"])}
    rows = {"text": ["cup final", "election"] * 4, "label": [1, 0] * 4}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(str(path / "n.parquet"))
    task, names = "trainers.tasks.classification:ClassificationTask", ["Sports", "World"]
    data = {"paths": [str(path / "n.parquet")], "sequence_length": 32, "shuffle": False}
    given = args(path, task=task, classification={"labels": names}, data=data)
    row = dataset_function(given)(given)[0][0]
    return names[int(row["label"])] == {"c": "Sports", "e": "World"}[chr(int(row["tokens"][0]))]


@case
def a_prompt_that_is_to_be_ignored(path):
    pair = {"prompt": "P?", "chosen": [u("P?"), a("4")], "rejected": [u("P?"), a("5")], "score_chosen": 9.0}
    tokenizer = made(path, CHATML)
    return show(tokenizer, PairEncoder(tokenizer, ("prompt", "score_chosen")).pair(pair)[0]).count("P?") == 1


@must_be_refused
def a_key_that_is_twice_in_json_within_a_text(path):
    chat(made(path, "{{ tools | tojson }}" + CHATML), u("q"), a("x"), tools='[{"name": "f", "name": "g"}]')


@must_be_refused
def a_number_beyond_all(path):
    (path / "j.jsonl").write_text('{"text":"a","n":1e999}\n')
    open_records(DataConfig(paths=(str(path / "j.jsonl"),)))[0]


@case
def numbers_that_are_the_same_only_as_floats(path):
    return not same("12345678901234567890", "12345678901234567891") and not same("1,2", "12") and same("1,000", "1000")


@case
def a_header_that_takes_white_space(path):
    tokens = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = Tokenizer.from_file(str(chat_folders.write(path / "letters") / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False, rstrip=True) for each in tokens])
    template = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    read = made(path, template, tokenizer, eos_token="<|endoftext|>")
    return "<|assistant|>" not in re.findall("⟦[^⟧]*", chat(read, u("q"), a(" 4")))[0]


@case
def a_prompt_with_a_separator_of_lines_that_is_no_new_line(path):
    (path / "p.txt").write_text("one\u2028still one\ntwo\n")
    return len(prompts_of(_parse(["x", "--prompts-file", str(path / "p.txt")]))) == 2


@pytest.fixture(autouse=True)
def own_runtime():
    before = runtime.current()
    yield
    runtime.install(before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_people_have_reported_of_other_trainers_is_right_or_refused_by_name(tmp_path, case):
    try:
        is_right = case(tmp_path)
    except (DataError, UsageError):
        is_right = case in MAY | MUST
    else:
        is_right = is_right and case not in MUST
    assert is_right
