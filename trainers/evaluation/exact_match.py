"""How many questions a model answers right: it generates, and the answers in its texts are compared with those of the data.

The texts are generated inside the compiled step of the evaluation, a batch of questions at a time, divided over the devices of
all hosts like any batch. Each host looks at the texts of its own questions, and the counts of all hosts are added up.

Dimensions: B questions, P tokens of the longest prompt, N generated tokens at most, A bytes of the longest answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gangway.errors import DataError, UsageError
from trainers.config import PreviewConfig, UnitConfig
from trainers.config.arguments import TrainingArguments, load_object
from trainers.config.data import SourceConfig
from trainers.config.evaluation import PLACE, ExactMatchConfig
from trainers.data.chat import COMPLETION, PROMPT, completed, with_template
from trainers.data.documents import Record, Records
from trainers.data.messages import value_of
from trainers.data.padded import padded
from trainers.data.sources.records import open_records
from trainers.models.decoding import begin, go_on
from trainers.protocol import Batch, Task
from trainers.tasks.causal_lm import CausalLMTask
from trainers.text import tokenizers
from trainers.text.tokenizers import Tokenizer

NUMBER = re.compile(r"[+-]?(?=\.?\d)(\d{1,3}(,\d{3})+|\d*)(\.\d*)?([eE][+-]?\d{1,4})?", re.ASCII)
"""A decimal number, perhaps with commas between thousands."""
PADDING = -1
"""After the last byte of an answer."""


class Questions:
    """The rows of questions: {"prompt": int32[P], aligned at the right, "prompt_length": int32, "answer": int32[A], the bytes of
    the answer}, and the leaves of a language model for the loss of the text that the data has as its answer."""

    def __init__(self, records: Records, tokenizer: Tokenizer, config: ExactMatchConfig, arguments: TrainingArguments):
        self._records, self._tokenizer, self._config, self._arguments = records, tokenizer, config, arguments
        self._prompts, self._answers = [], []
        for index in range(len(records)):
            try:
                self._prompts.append(prompt_of(records[index], tokenizer, config))
                self._answers.append(answer_of(records[index], config).encode())
            except DataError as error:
                raise DataError(f"{records.where(index)}: {error}") from error
        self._longest, self._longest_answer = max(map(len, self._prompts)), max(map(len, self._answers))
        room, needed = arguments.model.num_positions, self._longest + config.num_tokens
        if room is not None and needed > room:
            raise UsageError(
                f"the longest prompt has {self._longest} tokens, and exact_match.num_tokens is {config.num_tokens}: expected at "
                f"most {room} together, for the model has no more positions"
            )

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        prompt, answer = self._prompts[index], self._answers[index]
        return {
            PROMPT: np.pad(np.array(prompt, np.int32), (self._longest - len(prompt), 0)),
            "prompt_length": np.int32(len(prompt)),
            "answer": np.pad(
                np.frombuffer(answer, np.uint8).astype(np.int32),
                (0, self._longest_answer - len(answer)),
                constant_values=PADDING,
            ),
            **self._row(self._records[index]),
        }

    def _row(self, record: Record) -> dict[str, Any]:
        config, data = self._config, self._arguments.data
        question, answer = asked(record, config), str(record[config.answer_column])
        pair: dict[str, Any] = {PROMPT: question, COMPLETION: answer}
        if config.chat:
            pair = {PROMPT: [_message("user", question)], COMPLETION: [_message("assistant", answer)]}
        document = completed(self._tokenizer, pair, PROMPT, COMPLETION)
        # The end: what is cut off is the beginning of the question, and never the answer alone.
        row = padded(document, data.sequence_length + 1, "keep_end")
        return {name: row[name] for name in ("tokens", "token_weight")}


def questions(config: ExactMatchConfig, arguments: TrainingArguments) -> Questions:
    """Returns the questions of a unit. Raises DataError that says where, for a record that has none."""
    tokenizer = tokenizers.of(arguments)
    tokenizers.check(tokenizer, arguments)
    return Questions(open_records(SourceConfig(paths=config.paths)), tokenizer, config, arguments)


class AnswerTask(CausalLMTask):
    """A language model that answers: its predictions are the generated tokens."""

    reads = CausalLMTask.reads | {PROMPT, "prompt_length", "answer"}

    def __init__(self, arguments: TrainingArguments, config: ExactMatchConfig):
        super().__init__(arguments)
        self.config = config

    def predictions(self, model: Any, batch: Batch) -> dict[str, jax.Array]:
        """Returns {"tokens": int32[B, N], "num_tokens": int32[B]}: the tokens after each prompt, up to its stop token."""
        prompts_BP, lengths_B = batch[PROMPT], batch["prompt_length"]
        num_tokens, prompt = self.config.num_tokens, prompts_BP.shape[1]
        window = prompt + num_tokens
        settings: dict[str, Any] = {
            "prompt": prompt,
            "config": PreviewConfig(num_tokens=num_tokens, greedy=True),
            "stop_ids": self.tokenizer.stop_ids(),
            "window": window,
        }
        # Greedy: nothing is drawn by them.
        keys_B = jnp.broadcast_to(jax.random.key(0), lengths_B.shape)
        begun = begin(model, prompts_BP, lengths_B, num_tokens=num_tokens, window=window)
        ended = go_on(model, begun, lengths_B, keys_B, jnp.int32(num_tokens), **settings)
        return {"tokens": ended.tokens_BN, "num_tokens": ended.num_B}


class ExactMatch:
    """The metrics `exact_match`, the part of the questions whose generated answer is the right one, and `answered`, the part of
    those with an answer at all (`trainers.protocol.EvaluationMetrics`)."""

    names: Sequence[str] = ("exact_match", "answered")

    def __init__(self, arguments: TrainingArguments, config: ExactMatchConfig):
        self._arguments, self._config = arguments, config
        self._counts = np.zeros(3, np.int64)
        """Of questions, of right answers, of answers."""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizers.of(self._arguments)

    def add(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        for tokens, num_tokens, answer in zip(outputs["tokens"], outputs["num_tokens"], batch["answer"], strict=True):
            given = found(self._turn(tokens[:num_tokens].tolist()), self._config.answer_pattern)
            right = bytes(answer[answer != PADDING].astype(np.uint8)).decode()
            self._counts += [1, given is not None and same(given, right), given is not None]

    def _turn(self, tokens: Sequence[int]) -> str:
        """Returns the text up to what ends a turn, where that is no token by which the generation stops."""
        text, ends = self._tokenizer.decode(tokens), self._tokenizer.stop_texts() if self._config.chat else ()
        return text[: min((text.find(end) for end in ends if end in text), default=len(text))]

    def state(self) -> list[int]:
        return self._counts.tolist()

    def merge(self, states: Sequence[list[int]]) -> None:
        self._counts = np.sum(np.array(states, np.int64), axis=0)

    def compute(self) -> dict[str, float]:
        num_questions, right, answered = self._counts
        return dict(zip(self.names, (right / num_questions, answered / num_questions), strict=True))


def task_of_unit(unit: UnitConfig, arguments: TrainingArguments) -> Task | None:
    """Returns the task that measures a validation unit; None: the one that is trained. Raises ValueError, or UsageError."""
    if unit.exact_match is not None:
        return AnswerTask(arguments, unit.exact_match)
    return None if unit.task is None else load_object(unit.task)(arguments)


def asked(record: Record, config: ExactMatchConfig) -> str:
    """Returns the text with the question. Raises DataError."""
    return config.prompt.replace(PLACE, str(value_of(record, config.question_column)))


def prompt_of(record: Record, tokenizer: Tokenizer, config: ExactMatchConfig) -> list[int]:
    """Returns the tokens that the model continues. Raises DataError."""
    text = asked(record, config)
    return with_template(tokenizer).chat([_message("user", text)]) if config.chat else tokenizer.encode(text)


def answer_of(record: Record, config: ExactMatchConfig) -> str:
    """Returns the right answer: what the pattern finds, or else the whole text. Raises DataError if there is none."""
    text = str(value_of(record, config.answer_column)).strip()
    answer = found(text, config.answer_pattern)
    if not (text if answer is None else answer):
        raise DataError(f"column {config.answer_column!r} is empty: expected the answer")
    return text if answer is None else answer


def found(text: str, pattern: str) -> str | None:
    """Returns the first group of the pattern where it first matches; None if it does not."""
    match = re.search(pattern, text)
    return None if match is None else (match.group(1) or "").strip()


def same(one: str, other: str) -> bool:
    """Whether two answers are the same: as numbers to their last digit, with commas between thousands, or else as texts."""
    numbers = [_number(each) for each in (one, other)]
    return numbers[0] == numbers[1] if None not in numbers else one == other


def _number(text: str) -> Decimal | None:
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text.strip()) else None


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
