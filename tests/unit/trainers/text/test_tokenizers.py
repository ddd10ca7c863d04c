"""Tokenizers: bytes, folders, files; training on tokens, what a run carries along, and what does not fit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gangway.errors import DataMissingError, UsageError
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from tests.unit.training import of, trainer
from trainers.base import BaseTrainer
from trainers.checkpoint import assets
from trainers.config import DataConfig, LoraConfig, ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.data.sources.text import text_windows
from trainers.export import to_hugging_face
from trainers.models.hf import vision_config
from trainers.models.hf.pretrained import resolved
from trainers.planning.estimate import plan
from trainers.text import tokenizers

LLAMA = ROOT / "tests" / "unit" / "data" / "parity" / "llama3"
SIZE = 280
TEXT = "the hosts of a gang train one model, and the gang restarts from a checkpoint.\n" * 40
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE with a token that ends texts, as a folder of Hugging Face has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    maker = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False, max_token_length=6
    )
    tokenizer.train_from_iterator([TEXT], maker)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Tokens are kept where nobody else keeps some."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".cache" / "gangway" / "tokens"


def write(path, texts):
    path.mkdir()
    for name, text in texts.items():
        (path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def arguments(folder, paths, vocab_size=SIZE, **changes):
    data = DataConfig(paths=(str(paths),), pattern="*", sequence_length=16, tokenizer=str(folder), shuffle=False)
    model = ModelConfig(vocab_size=vocab_size, width=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=16)
    return TrainingArguments(name="t", max_num_steps=1, data=data, model=model, **changes)


def train_windows(train):
    return (train[index] for index in range(len(train)))


@pytest.mark.parametrize("file", ["", "tokenizer.json"])
def test_texts_come_back_from_their_tokens(folder, file):
    tokenizer = tokenizers.load(str(folder / file))
    text = "the gang trains: é \U0001f600 1234"
    tokens = tokenizer.encode(text)
    assert (tokenizer.decode(tokens), tokenizer.num_ids) == (text, SIZE)
    assert len(tokens) < len(text.encode())
    assert tokenizer.encode_documents([text, "a"]) == [tokens, tokenizer.encode("a")]
    assert tokenizer.decode([*tokens, SIZE + 3]) == text  # a model may have more ids than its tokenizer


def test_a_folder_says_what_ends_a_text_and_how_to_chat(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tokenizer = tokenizers.FolderTokenizer(str(copy))
    end = tokenizer.separator
    assert tokenizer.stop_ids() == (end,)
    (copy / "config.json").write_text('{"eos_token_id": 5}')
    assert tokenizer.stop_ids() == (5, end)
    (copy / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert tokenizer.stop_ids() == (7, 8, end)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert tokenizer.chat(messages) == tokenizer.encode("<|system|>be brief<|user|>hi<|assistant|>")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match=r"copy has no chat template: expected chat_template\.jinja"):
        tokenizers.FolderTokenizer(str(copy)).chat(messages)


def test_training_text_has_a_separator_after_each_document_and_is_cut_into_windows(folder, tmp_path, cache):
    texts = {"a": TEXT[:200], "b": TEXT[200:500], "c": TEXT[500:700]}
    train, held = text_windows(arguments(folder, write(tmp_path / "texts", texts)))
    tokenizer = tokenizers.load(str(folder))
    expected = {(*tokenizer.encode(text), tokenizer.separator) for text in texts.values()}
    # Windows overlap by one token, and the held-out text goes on where the other ends.
    whole = [token for window in (*train_windows(train), *(held[i] for i in range(len(held)))) for token in window["tokens"][:-1]]
    ends = [place for place, token in enumerate(whole) if token == tokenizer.separator]
    starts = [0, *(place + 1 for place in ends)]
    found = {tuple(whole[start : end + 1]) for start, end in zip(starts, ends, strict=False)}
    assert len(found & expected) >= 2
    np.testing.assert_array_equal(train[0]["tokens"], whole[:17])
    np.testing.assert_array_equal(train[1]["tokens"], whole[16:33])


def test_what_does_not_fit_is_an_error_before_a_machine_is_taken(folder, tmp_path, cache):
    paths = write(tmp_path / "texts", {"a": TEXT})
    problems, _ = plan(arguments(folder, paths, vocab_size=SIZE - 1), 1)
    assert [text for text in problems if "tokenizer" in text] == [
        f"model.vocab_size = {SIZE - 1}: expected at least {SIZE}, for the tokenizer {folder} has so many tokens"
    ]
    # With data of one's own, too.
    other = arguments(folder, paths, vocab_size=SIZE - 1)
    data = DataConfig(dataset="tests.programs.tiny:numbers", sequence_length=8, tokenizer=str(folder))
    problems, _ = plan(TrainingArguments(name="t", max_num_steps=1, data=data, model=other.model), 1)
    assert any("the tokenizer" in text and "has so many tokens" in text for text in problems), problems
    with pytest.raises(DataMissingError, match=r"data\.tokenizer = .*nowhere' does not exist; expected a folder of Hugging Face"):
        tokenizers.of(arguments(tmp_path / "nowhere", paths))
    with pytest.raises(UsageError, match=r"has no tokenizer: expected a folder with tokenizer\.json"):
        tokenizers.of(arguments(paths, paths))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for source in ("broken", "broken/tokenizer.json"):
        with pytest.raises(UsageError, match=r"cannot be read|is no tokenizer"):
            text_windows(arguments(tmp_path / source, paths))


def test_a_pretrained_model_brings_its_tokenizer_unless_another_is_named(folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(LLAMA, copy)
    model = ModelConfig(pretrained=str(copy))
    made = resolved(TrainingArguments(name="t", max_num_steps=1, model=model))
    assert made.data.tokenizer is None  # the folder has none
    shutil.copy(folder / "tokenizer.json", copy)
    assert resolved(TrainingArguments(name="t", max_num_steps=1, model=model)).data.tokenizer == str(copy)
    named = TrainingArguments(name="t", max_num_steps=1, model=model, data=DataConfig(tokenizer="bytes"))
    assert resolved(named).data.tokenizer == "bytes"


def test_rows_longer_than_the_context_of_a_pretrained_model_are_refused_unless_they_are_packed():
    def of(packing, length, lora=None):
        data = DataConfig(sequence_length=length, packing=packing)
        return TrainingArguments(name="t", max_num_steps=1, model=ModelConfig(pretrained=str(LLAMA)), data=data, lora=lora)

    context = vision_config.context(LLAMA)
    for lora in (None, LoraConfig(rank=2)):
        assert resolved(of(None, context, lora)).data.sequence_length == context
        error = rf"data\.sequence_length = {context + 1}: the model in .* is for texts of {context} tokens"
        with pytest.raises(ValueError, match=error):
            resolved(of(None, context + 1, lora))
    assert resolved(of("fit", 4 * context)).data.sequence_length == 4 * context


class Own(BaseTrainer):
    def build_model_assets(self):
        return {"labels": ["a", "b"]}


@pytest.mark.slow("trains more than once")
def test_a_run_carries_the_files_along_and_needs_the_folders_no_more(folder, tmp_path, events, cache):
    parity = ROOT / "tests" / "unit" / "data" / "parity" / "llama3"
    model = tmp_path / "model"
    shutil.copytree(parity, model)
    shutil.copytree(folder, tmp_path / "words")
    settings = {
        "task": "trainers.tasks.causal_lm:CausalLMTask",
        "model": {"vocab_size": SIZE, "width": 32, "num_layers": 1, "num_heads": 4, "mlp_width": 32},
        "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers", "tokenizer": str(tmp_path / "words")},
        "previews": {"prompts": ["the gang"], "num_tokens": 3, "greedy": True},
        "evaluation": {"max_batches": 1},
        "init_from": {"path": str(model), "strict": False, "include": ["final_norm"]},
        "max_num_steps": 2,
    }
    made = trainer(tmp_path, cls=Own, **settings)
    made.train()
    run = Path(made.output.checkpoint_path).parents[1]
    files = ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (run / "assets" / "hugging_face").iterdir()) == files
    assert made.output.metrics["sample"].startswith("the gang")
    for gone in (model, tmp_path / "words"):
        shutil.rmtree(gone)
    again = trainer(tmp_path, cls=Own, **settings | {"max_num_steps": 4})
    again.train()
    assert again.output.metrics["sample"].startswith("the gang")
    assert [event["message"] for event in of(events, "note") if "preview" in event["message"]] == []
    assert sorted(path.name for path in (run / "assets" / "hugging_face").iterdir()) == files
    assert assets.read(str(run))["labels"] == ["a", "b"]
    to_hugging_face(again.output.checkpoint_path, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*files, "labels", "model.safetensors", "generation_config.json"}  # the last: what ends an answer
    # It began with a part of another model: that one's configuration is not this one's.
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == SIZE


def test_a_training_on_kept_tokens_imports_no_library_of_tokenizers_and_none_of_checkpoints(folder, tmp_path, cache):
    paths = write(tmp_path / "texts", {"a": TEXT})
    text_windows(arguments(folder, paths))
    program = f"""
import sys
from tests.unit.trainers.text.test_tokenizers import arguments
from trainers.base import BaseTrainer
from trainers.data.sources.text import text_windows
made = arguments({str(folder)!r}, {str(paths)!r}, storage={str(tmp_path)!r}, global_batch_size=2)
BaseTrainer(made, *text_windows(made)).prepare()
print(sorted({{"transformers", "tokenizers", "huggingface_hub", "orbax", "tensorstore"}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, timeout=PATIENCE_S
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
