"""What begins and ends a document: one rule for each kind, the same in training and generation, and each token once."""

from __future__ import annotations

import pytest

from gangway.errors import UsageError
from tests.unit import chat_folders
from trainers.data.chat import CompletionEncoder
from trainers.data.encoders import TextEncoder
from trainers.data.sources.classification import LabelledEncoder
from trainers.text import tokenizers

BEGIN, END = "<|begin_of_text|>", "<|end|>"
AROUND = {"begin": f"{BEGIN} $A", "end": f"$A {END}", "both": f"{BEGIN} $A {END}", "none": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("folders")
    return {name: chat_folders.write(path / name, around=around) for name, around in AROUND.items()}


def shown(tokenizer, tokens):
    return "".join(tokenizer.text_of(token) for token in map(int, tokens)).replace("Ġ", " ")


@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.parametrize("file", ["", "tokenizer.json"])
def test_a_text_a_prompt_and_a_completion(folders, kind, file):
    tokenizer = tokenizers.load(str(folders[kind] / file))
    begin = BEGIN if kind in ("begin", "both") else ""
    end = END if kind in ("end", "both") or not file else ""
    assert shown(tokenizer, tokenizer.encode("ab")) == f"{begin}ab"  # a prompt of a generation
    (text,) = TextEncoder(tokenizer).encode([{"text": "ab"}])
    (pair,) = CompletionEncoder(tokenizer).encode([{"prompt": "ab", "completion": "cd"}])
    (labelled,) = LabelledEncoder(tokenizer).encode([{"text": "ab", "label": 0}])
    assert shown(tokenizer, text.tokens) == shown(tokenizer, labelled.tokens) == f"{begin}ab{end}"
    assert shown(tokenizer, pair.tokens) == f"{begin}abcd{end}"
    assert shown(tokenizer, pair.tokens[pair.token_weight > 0]) == f"cd{end}"
    assert tokenizer.stop_ids()[:1] == ((tokenizer.separator,) if end else ())
    assert tokenizers.specials(tokenizer)[:2] == [
        f"a text: {begin}...{end}",
        f"a prompt: {begin}..., and then its completion: ...{end}",
    ]


def test_what_a_text_has_already_is_not_added_once_more(folders):
    tokenizer = tokenizers.load(str(folders["both"]))
    assert shown(tokenizer, tokenizer.encode(f"{BEGIN}ab")) == f"{BEGIN}ab"
    (text,) = TextEncoder(tokenizer).encode([{"text": f"{BEGIN}ab{END}"}])
    (pair,) = CompletionEncoder(tokenizer).encode([{"prompt": f"{BEGIN}ab", "completion": f"cd{END}"}])
    assert shown(tokenizer, text.tokens) == f"{BEGIN}ab{END}"
    assert shown(tokenizer, pair.tokens) == f"{BEGIN}abcd{END}"
    assert shown(tokenizer, pair.tokens[pair.token_weight > 0]) == f"cd{END}"


def test_a_conversation_is_what_its_template_writes(folders):
    tokenizer = tokenizers.load(str(folders["both"]))
    asked = [{"role": "user", "content": "ab"}]
    assert shown(tokenizer, tokenizer.chat(asked)).startswith("<|im_start|>user")
    assert tokenizers.specials(tokenizer)[2] == (
        "a conversation: what its chat template writes, and nothing else; '<|im_end|>' ends a turn of the assistant"
    )


def test_a_tokenizer_that_puts_more_after_a_text_is_refused(tmp_path):
    path = chat_folders.write(tmp_path / "folder", around=f"$A {END} {END}")
    with pytest.raises(UsageError, match="expected at most one after them"):
        tokenizers.load(str(path)).encode("ab")
