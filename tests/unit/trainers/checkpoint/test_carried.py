"""What an export has of the folder that a run began with: its tokenizer, the tokens that end a text, the length of its texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from gangway.errors import UsageError
from tests import ROOT
from tests.programs.small_tokens import datasets
from tests.unit import chat_folders
from tests.unit.training import arguments
from trainers.base import BaseTrainer
from trainers.checkpoint import carried, export
from trainers.config.hf_files import MORE_TEMPLATES
from trainers.export import to_hugging_face
from trainers.text import tokenizers

LLAMA = ROOT / "tests" / "unit" / "data" / "parity" / "llama3"
CONTEXT = 4096
SETTINGS = {
    "task": "trainers.tasks.causal_lm:CausalLMTask",
    "max_num_steps": 1,
    "global_batch_size": 8,
    "evaluation": {"max_batches": 1},
}
DATA = {"sequence_length": 8, "dataset": "tests.programs.small_tokens:datasets"}
SMALL = {"vocab_size": chat_folders.NUM_IDS, "width": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 8}


def trained(storage, **settings):
    made = arguments(storage, **SETTINGS | settings)
    trainer = BaseTrainer(made, *datasets(made))
    trainer.train()
    return trainer


def exported(trainer, out):
    to_hugging_face(trainer.output.checkpoint_path, out)
    return json.loads((out / "config.json").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of Hugging Face for long texts, with all that may lie in one."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(LLAMA, folder, dirs_exist_ok=True)
    about = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": CONTEXT, "eos_token_id": [3, 5]}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer whose file keeps a length of an earlier use."""
    folder = chat_folders.write(tmp_path_factory.mktemp("words") / "folder", around="<|begin_of_text|> $A <|end|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.model.dropout = 0.5
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("adapted"), data=DATA, lora={"rank": 2}, model={"pretrained": str(base)})


@pytest.mark.slow("trains and exports")
def test_the_export_of_adapters_has_the_ends_and_the_context_of_its_base(base, adapted, tmp_path):
    about = exported(adapted, tmp_path / "out")
    assert (about["eos_token_id"], about["max_position_embeddings"]) == ([3, 5], CONTEXT)
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("has_generation_config", [True, False])
def test_every_export_says_what_has_ended_a_turn_in_training(base, tmp_path, has_generation_config):
    """The base knows its own ends alone, the training had a tokenizer with a template of its own."""
    words = chat_folders.write(tmp_path / "words")
    folder = copied(base, tmp_path / "base")
    about = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(about))
    if not has_generation_config:
        (folder / "generation_config.json").unlink()
    resize(folder, 300)
    lora = {"rank": 2}
    run = trained(tmp_path / "runs", data=DATA | {"tokenizer": str(words)}, lora=lora, model={"pretrained": str(folder)})
    turn, end = (tokenizers.load(str(words)).encode_rendered(text).tokens[0] for text in ("<|im_end|>", "<|end|>"))
    for name, adapter in (("merged", False), ("adapter", True)):
        to_hugging_face(run.output.checkpoint_path, tmp_path / name, adapter=adapter)
        found = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert found["eos_token_id"] == [3, 5, end, turn]
        assert {*tokenizers.load(str(tmp_path / name)).stop_ids()} == {3, 5, end, turn}


def resize(folder, vocab_size):
    """Gives the tables of a model more rows."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = np.resize(tensors[name], (vocab_size, tensors[name].shape[1]))
    save_file(tensors, path)


@pytest.mark.slow("trains and exports")
def test_the_template_of_an_export_has_the_fields_of_the_run(tmp_path):
    words = chat_folders.write(tmp_path / "words", "{{ mood }}" + chat_folders.CHATML)
    data = DATA | {"tokenizer": str(words), "template_fields": {"mood": "calm", "loud": False}}
    (words / "chat_template.jinja").write_text("{{ mood }}{{ loud }}" + chat_folders.CHATML)
    exported(trained(tmp_path, model=SMALL, data=data), tmp_path / "out")
    said = [{"role": "user", "content": "q"}]
    read = tokenizers.FolderTokenizer(str(tmp_path / "out"))
    assert read.render(said).startswith("calmFalse<|im_start|>user")
    assert read.render(said, fields={"mood": "gay"}).startswith("gayFalse")


def test_an_end_of_several_tokens_is_a_text_that_stops(tmp_path):
    template = chat_folders.CHATML.replace("<|im_end|>", "[/end]")
    words = chat_folders.write(tmp_path / "words", template)
    exported(trained(tmp_path, model=SMALL, data=DATA | {"tokenizer": str(words)}), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == {"eos_token_id": 256, "stop_strings": ["[/end]"]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("alone", [False, True])
def test_the_export_of_a_new_model_has_the_ends_of_its_tokenizer(words, tmp_path, alone):
    read = tokenizers.load(str(words))
    tokenizer = str(words / "tokenizer.json") if alone else str(words)
    about = exported(trained(tmp_path, model=SMALL, data=DATA | {"tokenizer": tokenizer}), tmp_path / "out")
    begin, end, turn = (read.encode_rendered(text).tokens[0] for text in ("<|begin_of_text|>", "<|end|>", "<|im_end|>"))
    assert about["bos_token_id"] == begin
    assert about["eos_token_id"] == (end if alone else [end, turn])
    assert about["max_position_embeddings"] == 8  # nothing says more
    assert_texts_are_whole(tmp_path / "out")


def assert_texts_are_whole(folder):
    """Of a tokenizer that `tokenizers` alone reads."""
    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (found.truncation, found.padding, found.model.dropout) == (None, None, None)
    assert found.encode("a longer text").tokens[2:-2] == list("\u0120longer\u0120tex")


def test_each_export_has_the_tokenizer_without_the_lengths_of_an_earlier_use(words, tmp_path):
    path = copied(words, tmp_path / "whole") / "tokenizer.json"
    path.write_text(json.dumps({"truncation": None, "padding": None, "model": {"dropout": None}}, indent=3))
    carried.reset_tokenizer(path.parent)
    assert path.read_text().startswith('{\n   "truncation"'), "a file that keeps nothing stays as it is"
    export._copy_assets(copied(words, tmp_path / "run" / carried.NAME).parent, tmp_path / "out.assets")
    assert_texts_are_whole(tmp_path / "out.assets" / carried.NAME)


def copied(source, target):
    return Path(shutil.copytree(source, target))


def test_a_run_carries_what_a_run_that_it_begins_with_has_carried(base, adapted, tmp_path):
    run = Path(adapted.output.checkpoint_path).parents[1]
    of = carried.of(arguments(tmp_path, **SETTINGS, data=DATA, init_from={"path": str(run)}), str(tmp_path / "run"))
    files = of[carried.NAME].files
    assert {name: path.read_bytes() for name, path in files.items()} == {
        name: (base / name).read_bytes() for name in ("config.json", "generation_config.json")
    }


def test_all_chat_templates_of_a_tokenizer_are_carried(words, tmp_path):
    more = words / MORE_TEMPLATES / "tool_use.jinja"
    more.parent.mkdir()
    more.write_text("{{ messages }}")
    of = carried.of(arguments(tmp_path, **SETTINGS, data=DATA | {"tokenizer": str(words)}), str(tmp_path / "run"))
    of[carried.NAME].save_pretrained(str(tmp_path))
    assert (tmp_path / MORE_TEMPLATES / "tool_use.jinja").read_text() == "{{ messages }}"


def test_of_a_run_in_a_bucket_a_folder_that_is_gone_is_an_error_when_its_files_are_saved_and_not_before(tmp_path):
    """A plan or a compilation needs none of them."""
    gone = tmp_path / "gone"
    settings = arguments(tmp_path, **SETTINGS, data=DATA | {"tokenizer": str(gone)})
    (files,) = carried.of(settings, "gs://bucket/run").values()
    with pytest.raises(UsageError, match=f"{gone} is gone, and what a run in a bucket has kept of its files is not read"):
        files.save_pretrained(str(tmp_path))
    assert carried.of(settings, str(tmp_path / "run")) == {}
