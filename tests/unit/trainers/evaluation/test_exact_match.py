"""Questions that the model answers in an evaluation: what it generates, what counts as right, and on any devices."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import DataError, UsageError
from gangway.user_modules import load_object
from tests.unit import chat_folders
from tests.unit.records import ListRecords
from tests.unit.training import arguments, of, trainer
from trainers.config import UnitConfig
from trainers.config.evaluation import ExactMatchConfig
from trainers.evaluation.exact_match import ExactMatch, Questions, answer_of, found, questions, same, task_of_unit
from trainers.planning.estimate import plan
from trainers.step.state import abstract_model, initial_parameters
from trainers.text.tokenizers import load

MODEL = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}
QUESTIONS = [f"{'what ' * (number % 4)}is {number}?" for number in range(11)]
NUM_TOKENS = 5
PATTERN = r"([\x20-\x7f])"
SETTINGS = {
    "task": "trainers.tasks.causal_lm:CausalLMTask",
    "model": MODEL,
    "max_num_steps": 1,
    "previews": {"prompts": []},
    "optimizer": {"name": "sgd", "learning_rate": 1e-30, "schedule": {"name": "constant"}},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """What the model of the seed writes after each question, token by token, without a cache."""
    made = arguments(tmp_path_factory.mktemp("texts"), **SETTINGS)
    task = load_object(made.task)(made)
    model = abstract_model(task, 0)[0].merge(jax.jit(lambda: initial_parameters(task, 0))())
    call, written = jax.jit(model.__call__), []
    for question in QUESTIONS:
        tokens = list(f"Q: {question}\n".encode())
        start = len(tokens)
        for _ in range(NUM_TOKENS):
            padded = np.pad(np.array([tokens], np.int32), ((0, 0), (0, 48 - len(tokens))))
            tokens.append(int(jnp.argmax(call(padded)[0, len(tokens) - 1])))
        written.append(load("bytes").decode(tokens[start:]))
    return written


def unit_of(path, records, **changes):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"paths": [str(path)], "prompt": "Q: {question}\n", "num_tokens": NUM_TOKENS, "answer_pattern": PATTERN, **changes}


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}])
@pytest.mark.slow("compiles a decoder and a step")
def test_the_questions_that_are_answered_right_are_counted_on_any_devices(tmp_path, events, texts, mesh):
    answers = [found(text, PATTERN) for text in texts]
    assert len({*answers}) > 2
    # Every third answer of the data is another one.
    right = [answer if number % 3 and answer else "\u00e9" for number, answer in enumerate(answers)]
    records = [{"question": question, "answer": answer} for question, answer in zip(QUESTIONS, right, strict=True)]
    unit = unit_of(tmp_path / "quiz.jsonl", records)
    evaluation = {"units": {"quiz": {"exact_match": unit}}, "score": {"metrics": ["quiz_exact_match"]}}
    made = trainer(tmp_path, mesh=mesh, evaluation=evaluation, **SETTINGS)
    assert plan(made.arguments, 8)[0] == []
    made.train()
    (metrics,) = (event["metrics"] for event in of(events, "metrics") if event.get("kind") == "eval")
    assert metrics["quiz_answered"] == pytest.approx(sum(answer is not None for answer in answers) / 11)
    expected = sum(one == other for one, other in zip(answers, right, strict=True)) / 11
    assert 0 < expected < 1
    assert metrics["quiz_exact_match"] == metrics["score"] == pytest.approx(expected)
    assert metrics["quiz_loss"] > 0


def test_the_columns_and_the_chat_template_are_those_of_the_settings(tmp_path):
    folder = chat_folders.write(tmp_path / "folder")
    unit = unit_of(tmp_path / "a.jsonl", [{"ask": "hi", "reply": "so #### 12"}], question_column="ask", answer_column="reply")
    config = ExactMatchConfig(**{**unit, "chat": True, "answer_pattern": ExactMatchConfig.answer_pattern})
    model = {**MODEL, "vocab_size": chat_folders.NUM_IDS}
    made = arguments(tmp_path, **{**SETTINGS, "model": model}, data={"tokenizer": str(folder), "sequence_length": 80})
    row, tokenizer = questions(config, made)[0], load(str(folder))
    prompt = tokenizer.chat([{"role": "user", "content": "Q: hi\n"}])
    assert row["prompt"][-row["prompt_length"] :].tolist() == prompt
    assert bytes(row["answer"].tolist()) == b"12"
    decoded = tokenizer._tokenizer.decode(row["tokens"][row["token_weight"] > 0])
    assert decoded == "so #### 12<|im_end|>"
    assert row["tokens"][: len(prompt)].tolist() == prompt


def test_an_answer_is_what_the_pattern_finds_and_numbers_are_compared_as_such():
    config = ExactMatchConfig(paths=("x",))
    assert found("so 3 + 4 #### 1,007. And #### 8", config.answer_pattern) == "1,007"
    assert (found("it is 7", config.answer_pattern), answer_of({"answer": " 7 "}, config)) == (None, "7")
    assert answer_of({"answer": "3 + 4 = 7\n#### 7"}, config) == "7"
    assert same("1,007", "1007.0")
    assert same("yes", "yes")
    assert not same("7", "8")
    assert not same("yes", "7")


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("12345678901234567890", "12345678901234567891", False),
        ("0.1", "0.10000000000000000001", False),
        ("1,2", "12", False),
        ("1,00", "100", False),
        ("12,345,678", "12345678.0", True),
        ("18.", "18.00", True),
        (".5", "0.5", True),
        ("-1e3", "-1,000", True),
        ("nan", "nan", True),  # as texts
        ("nan", "NaN", False),
        ("inf", "1e999", False),
        (".", ".", True),
        ("١٢", "12", False),
    ],
)
def test_numbers_are_the_same_to_their_last_digit(one, other, are_same):
    assert same(one, other) == are_same


def test_the_counts_of_all_hosts_are_added_up(tmp_path):
    config = ExactMatchConfig(paths=("x",))
    one, other, total = (ExactMatch(arguments(tmp_path), config) for _ in range(3))
    tokens = np.array([list(b"#### 7 "), list(b"#### 12"), list(b"seven  ")], np.int32)
    answer = np.array([[ord("7"), -1], [ord("1"), ord("2")], [ord("7"), -1]], np.int32)
    # The 2 of the second text comes after its end.
    one.add({"tokens": tokens[:2], "num_tokens": np.array([7, 6])}, {"answer": answer[:2]})
    other.add({"tokens": tokens[2:], "num_tokens": np.array([7])}, {"answer": answer[2:]})
    total.merge([one.state(), other.state()])
    assert total.compute() == {"exact_match": 1 / 3, "answered": 2 / 3}


def test_an_error_says_where_a_record_lacks_something(tmp_path):
    made, config = arguments(tmp_path), ExactMatchConfig(paths=("x",))
    good = {"question": "a", "answer": "b"}
    for record, error in (
        ({"question": "a"}, "line 2: there is no 'answer': it has question"),
        ({**good, "answer": " "}, "is empty"),
    ):
        with pytest.raises(DataError, match=error):
            Questions(ListRecords([good, record]), load("bytes"), config, made)
    learned = arguments(tmp_path, model={**MODEL, "family": "gpt2", "num_kv_heads": MODEL["num_heads"], "num_positions": 200})
    with pytest.raises(UsageError, match=r"has 2 tokens, and exact_match\.num_tokens is 256: expected at most 200 "):
        Questions(ListRecords([good]), load("bytes"), config, learned)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt": "Q"}, r"prompt = 'Q': expected a text with \{question\}"),
        ({"answer_pattern": "a"}, r"answer_pattern = 'a': expected a group"),
        ({"answer_pattern": "("}, r"answer_pattern = '\(': expected a regular expression"),
        ({"num_tokens": 0}, "num_tokens = 0"),
        ({"paths": ()}, r"paths = \[\]"),
    ],
)
def test_settings_are_checked(changes, error):
    with pytest.raises(ValueError, match=error):
        ExactMatchConfig(**{"paths": ("x",), **changes})


def test_the_unit_has_no_other_task_or_data(tmp_path):
    config = ExactMatchConfig(paths=("x",))
    with pytest.raises(ValueError, match="task = 'a:B': exact_match says it; leave it out"):
        UnitConfig(exact_match=config, task="a:B")
    made = arguments(tmp_path, **SETTINGS)
    assert task_of_unit(UnitConfig(exact_match=config), made).config is config
    assert task_of_unit(UnitConfig(), made) is None
