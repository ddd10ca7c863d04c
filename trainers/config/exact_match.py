"""The section `evaluation.units.NAME.exact_match` of the configuration. Free of JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gangway.config.section import Section, require_none, too_small

PLACE = "{question}"


@dataclass(frozen=True, kw_only=True)
class ExactMatchConfig(Section):
    """Questions whose answers the model generates, greedily (`trainers/evaluation/exact_match.py`)."""

    paths: tuple[str, ...]
    """Files of records, as in `data.paths`."""
    question_column: str = "question"
    """The column of the question."""
    answer_column: str = "answer"
    """The column of the right answer."""
    prompt: str = PLACE + "\n"
    """The text that the model continues, with the question in the place of `{question}`."""
    chat: bool = False
    """Whether this text is the user's message of a conversation, in the chat template of the tokenizer."""
    answer_pattern: str = r"####\s*(-?[0-9.,]*[0-9])"
    """A regular expression for the answer in a text: its first group, where it first matches. In the data, a text in which it
    does not match is the answer itself. The default is the form of GSM8K (Cobbe et al., 2021): the number after `####`."""
    num_tokens: int = 256
    """The tokens of a generated text at most."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if not self.paths:
            yield "paths = []: expected at least one file or folder"
        if PLACE not in self.prompt:
            yield f"prompt = {self.prompt!r}: expected a text with {PLACE} in it"
        yield from too_small(self, 1, "num_tokens")
        try:
            groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            yield f"answer_pattern = {self.answer_pattern!r}: expected a regular expression ({error})"
        else:
            if groups < 1:
                yield f"answer_pattern = {self.answer_pattern!r}: expected a group, (...), which is the answer"
