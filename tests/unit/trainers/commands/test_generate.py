"""The commands that speak with a model: `trainers.generate`, and `trainers.evaluate` of any model on a configuration's data."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from gangway.errors import UsageError
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from tests.programs.small_tokens import datasets
from tests.saved import saved
from tests.unit import chat_folders
from tests.unit.trainers.text.test_tokenizers import SIZE, TEXT, cache, folder  # noqa: F401  fixtures
from tests.unit.training import arguments, trainer
from trainers.base import BaseTrainer
from trainers.commands import evaluate, generate
from trainers.data.sources.text import text_windows
from trainers.evaluation.generation import Generator
from trainers.export import to_hugging_face
from trainers.text.tokenizers import FolderTokenizer

PARITY = ROOT / "tests" / "unit" / "data" / "parity"
MODEL = {"vocab_size": SIZE, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24}


TRUSTED = ("--trust-code", "tests.programs.tiny:TableTask")


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):  # noqa: F811
    """A run with a tokenizer, whose folder is gone, and that has several checkpoints."""
    home, words = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("words") / "words"
    shutil.copytree(folder, words)
    (home / "text.txt").write_text(TEXT)
    made = arguments(
        home,
        task="trainers.tasks.causal_lm:CausalLMTask",
        model=MODEL,
        mesh={"data": 4, "tensor": 2},
        data={"sequence_length": 32, "paths": [str(home / "text.txt")], "tokenizer": str(words)},
        optimizer={"learning_rate": 0.02, "schedule": {"name": "constant"}},
        checkpoint={"save_steps": 6},
        previews={"prompts": []},
        evaluation={"max_batches": 1},
        max_num_steps=30,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        made = BaseTrainer(made, *text_windows(made))
    made.train()
    shutil.rmtree(words)
    return Path(made.output.checkpoint_path).parents[1]


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "hf"
    to_hugging_face(saved(run, 30), out)
    return out


def asked(capsys, *options, status=0):
    """What the command prints: (standard output, standard error)."""
    assert generate.main([str(option) for option in options]) == status
    return capsys.readouterr()


def rows(capsys, *options):
    return json.loads(asked(capsys, *options, "--json").out)


@pytest.mark.slow("generates with whole models")
def test_many_prompts_get_what_each_gets_alone_whatever_the_batch(run, capsys):
    prompts = ["the gang", "a", "one model restarts"]
    options = [run, "--max-new-tokens", 6, "--temperature", 1.0, "--seed", 3]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    together = rows(capsys, *options, *given)
    assert [row["prompt"] for row in together] == prompts
    assert together == rows(capsys, *options, *given, "--batch-size", 2)
    assert together[2:] == rows(capsys, *options, "--prompt", prompts[2])
    assert together != rows(capsys, *options[:-1], 4, *given)
    twice = rows(capsys, *options, "--prompt", "a", "--prompt", "a")
    assert twice[0]["text"] == together[1]["text"] != twice[1]["text"]


@pytest.mark.slow("generates with whole models")
def test_one_prompt_is_shown_as_a_stream_and_nothing_else_is_on_standard_output(run, exported, capsys, tmp_path):
    expected = rows(capsys, run, "--prompt", "the gang", "--max-new-tokens", 9)[0]
    assert expected["finish"] == "length"
    printed = asked(capsys, run, "--prompt", "the gang", "--max-new-tokens", 9)
    assert printed.out == expected["text"] + "\n"
    assert printed.err.startswith(f"reading {run}\n")
    # The export has the same weights and the same tokenizer.
    assert asked(capsys, exported, "--prompt", "the gang", "--max-new-tokens", 9).out == printed.out
    earlier = asked(capsys, run, "--prompt", "the gang", "--max-new-tokens", 9, "--step", 18).out
    assert earlier == asked(capsys, saved(run, 18), "--prompt", "the gang", "--max-new-tokens", 9).out != printed.out
    (tmp_path / "prompts").write_text("the gang\n\na\n")
    printed = asked(capsys, run, "--prompts-file", tmp_path / "prompts", "--max-new-tokens", 9).out
    assert printed.startswith(f"> the gang\n{expected['text']}\n\n> a\n")


def test_a_stream_holds_back_half_a_character_and_the_beginning_of_a_stop_text():
    made = Generator.__new__(Generator)
    made.stop = ("END",)
    assert made._held_back("caf\ufffd", done=False) == 1
    assert made._held_back("the EN", done=False) == 2
    assert made._held_back("the EN", done=True) == made._held_back("the end", done=False) == 0


def test_a_file_of_prompts_has_one_a_line_and_lines_end_with_a_new_line_alone(tmp_path, monkeypatch):
    text = "\ufeffone\u2028still\x85and\x0cone\r\n\n  two\n"
    (tmp_path / "prompts").write_bytes(text.encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "latin-1"))
    for name in (str(tmp_path / "prompts"), "-"):
        asked_for = generate.prompts_of(generate._parse(["model", "--prompts-file", name]))
        assert asked_for == ["one\u2028still\x85and\x0cone", "  two"]
    (tmp_path / "prompts").write_bytes(b"a\xe9\n")
    with pytest.raises(UsageError, match=r"--prompts-file .*prompts: it is no utf-8: byte 0xe9 at offset 1"):
        generate.prompts_of(generate._parse(["model", "--prompts-file", str(tmp_path / "prompts")]))


def test_a_stop_that_is_a_special_token_ends_a_text_by_its_token_and_one_with_more_is_refused(tmp_path):
    tokenizer = FolderTokenizer(str(chat_folders.write(tmp_path / "folder")))
    opened, end = SimpleNamespace(tokenizer=tokenizer), tokenizer.stop_ids()
    options = generate._parse(["model", "--stop", "<|eot_id|>", "--stop", "end"])
    assert (generate.stop_ids(opened, options), generate.stop_texts(opened, options)) == ((*end, 256 + 6), ("end",))
    with pytest.raises(UsageError, match=r"--stop '<\|eot_id\|>\\n' has a special token and more"):
        generate.stop_ids(opened, generate._parse(["model", "--stop", "<|eot_id|>\n"]))


@pytest.mark.slow("generates with whole models")
def test_a_text_ends_at_a_stop_text_or_a_stop_token(exported, capsys, tmp_path):
    whole = rows(capsys, exported, "--prompt", "the gang", "--max-new-tokens", 24)[0]
    stop = whole["text"][3:5]
    expected = whole["text"][: whole["text"].index(stop)]
    for many in ([], ["--prompt", "a"]):
        row = rows(capsys, exported, "--prompt", "the gang", *many, "--max-new-tokens", 24, "--stop", stop, "--stop", "\0")[0]
        assert (row["text"], row["finish"]) == (expected, "stop")
    assert asked(capsys, exported, "--prompt", "the gang", "--max-new-tokens", 24, "--stop", stop).out == expected + "\n"
    # The first new token is one that the folder says ends a text.
    from trainers.text import tokenizers

    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    first = tokenizers.load(str(exported)).encode(whole["text"])[0]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    row = rows(capsys, copy, "--prompt", "the gang", "--max-new-tokens", 24)[0]
    assert (row["text"], row["finish"], row["num_tokens"]) == ("", "stop", 0)


@pytest.mark.slow("compiles a decoder")
def test_a_chat_goes_by_the_template_of_the_folder(exported, capsys, tmp_path):
    options = [exported, "--max-new-tokens", 5]
    said = rows(capsys, *options, "--chat", "--system", "be brief", "--prompt", "hi")[0]["text"]
    assert said == rows(capsys, *options, "--prompt", "<|system|>be brief<|user|>hi<|assistant|>")[0]["text"]
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    (copy / "chat_template.jinja").unlink()
    assert "copy has no chat template" in asked(capsys, copy, "--chat", "--prompt", "hi", status=2).err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "there is no prompt: give --prompt TEXT"),
        (["--prompt", "a", "--system", "b"], "--system is a part of a chat: add --chat"),
        (["--prompt", "a", "--top-k", "3"], "--top-k and --top-p draw tokens, and --temperature 0 draws none"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens 0: expected 1 or more"),
        (["--prompt", "a", "--batch-size", "0"], "--batch-size 0: expected 1 or more"),
        (["--prompt", "a", "--stop", ""], "--stop '': expected at least one character"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "2"], "top_p = 2.0: expected 0 < top_p <= 1"),
        (["--prompt", "a", "--step", "3"], "checkpoints/3"),
        (["--prompt", ""], "the prompt '' has no tokens"),
        (["--prompt", "a", "--image", "cat.png"], "is a model of texts alone: expected one that reads images; leave it out"),
    ],
)
def test_what_cannot_be_done_is_said(run, capsys, options, said):
    printed = asked(capsys, run, *options, status=2)
    assert said in printed.err
    assert printed.out == ""


def test_sources_that_cannot_generate_are_named(capsys, tmp_path):
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "a.safetensors")
    assert "is a file of weights alone" in asked(capsys, tmp_path / "a.safetensors", "--prompt", "a", status=2).err
    made = trainer(tmp_path, max_num_steps=1)
    made.train()
    run = Path(made.output.checkpoint_path).parents[1]
    assert "TableTask has no encode and decode" in asked(capsys, run, "--prompt", "a", *TRUSTED, status=2).err
    copy = tmp_path / "gpt2"
    shutil.copytree(PARITY / "gpt2", copy)
    printed = asked(capsys, copy, "--prompt", "a", status=2)
    assert "has no tokenizer: a token is a byte" in printed.err
    assert "model.vocab_size = 64: expected at least 256, for the data are bytes" in printed.err


@pytest.mark.slow("generates with whole models")
def test_of_a_run_with_lora_the_adapters_are_merged_with_their_base(exported, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT[::-1])
    settings = arguments(
        tmp_path,
        task="trainers.tasks.causal_lm:CausalLMTask",
        model={"pretrained": str(exported)},
        lora={"rank": 4, "alpha": 16},
        data={"sequence_length": 32, "paths": [str(tmp_path / "text.txt")]},
        optimizer={"learning_rate": 0.05, "schedule": {"name": "constant"}},
        previews={"prompts": []},
        evaluation={"max_batches": 1},
        max_num_steps=6,
    )
    made = BaseTrainer(settings, *text_windows(settings))
    made.train()
    checkpoint = Path(made.output.checkpoint_path)
    to_hugging_face(checkpoint, tmp_path / "merged")
    options = ["--prompt", "the gang", "--max-new-tokens", 8]
    found = rows(capsys, checkpoint.parents[1], *options)
    assert found == rows(capsys, tmp_path / "merged", *options)
    assert found != rows(capsys, exported, *options)


@pytest.mark.slow("generates with whole models")
def test_learned_positions_have_an_end(capsys, tmp_path):
    made = trainer(
        tmp_path,
        task="trainers.tasks.causal_lm:CausalLMTask",
        model={"family": "gpt2", "num_positions": 8, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        previews={"prompts": []},
        evaluation={"max_batches": 1},
        max_num_steps=1,
    )
    made.train()
    run = Path(made.output.checkpoint_path).parents[1]
    printed = asked(capsys, run, "--prompt", "abcd", "--max-new-tokens", 5, status=2)
    assert "the prompt has 4 tokens, and --max-new-tokens is 5: expected at most 8 together" in printed.err
    asked(capsys, run, "--prompt", "abcd", "--max-new-tokens", 4)


def test_the_first_line_comes_before_the_libraries(tmp_path):
    program = """
import sys
from trainers.commands import generate
def told(line):
    print(line, sorted({"jax", "numpy", "transformers"} & sys.modules.keys()))
    sys.exit(0)
generate.tell = told
generate.main(["nowhere", "--prompt", "a"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, timeout=PATIENCE_S
    )
    assert done.stdout == "reading nowhere []\n", done.stderr


# ------------------------------------------------------------------ evaluation of any model on a configuration's data


@pytest.fixture
def configuration(tmp_path, cache):  # noqa: F811
    """Of another model, whose tokens are bytes."""
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "other.yaml"
    settings = {
        "model": {"width": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "mlp_width": 8},
        "data": {"paths": [str(tmp_path / "text.txt")], "sequence_length": 16, "eval_fraction": 0.3},
        "global_batch_size": 8,
        "max_num_steps": 1,
        "storage": str(tmp_path),
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def evaluated(capsys, *given):
    assert evaluate.main([*map(str, given), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_and_a_folder_are_evaluated_on_the_data_of_any_configuration(run, exported, configuration, capsys, tmp_path):
    (of_run,) = evaluated(capsys, run, configuration)
    assert of_run["checkpoint"] == str(saved(run, 30))
    (of_folder,) = evaluated(capsys, exported, configuration)
    assert of_folder["metrics"] == pytest.approx(of_run["metrics"], rel=1e-6)
    changed = tmp_path / "changed"
    shutil.copytree(exported, changed)
    tensors = load_file(changed / "model.safetensors")
    save_file({name: value * 1.5 for name, value in tensors.items()}, changed / "model.safetensors")
    assert evaluated(capsys, changed, configuration)[0]["metrics"]["loss"] != of_run["metrics"]["loss"]
    (fewer,) = evaluated(capsys, run, configuration, "evaluation.max_batches=1", "data.eval_fraction=0.5")
    assert fewer["metrics"]["loss"] != of_run["metrics"]["loss"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a.yaml"], "nothing to evaluate: give --checkpoint PATH, or RUN_OR_CHECKPOINT before CONFIG"),
        (["a", "b", "c.yaml"], "a b c.yaml: expected CONFIG, or RUN_OR_CHECKPOINT and CONFIG"),
        (["key=value"], "no CONFIG: expected CONFIG"),
    ],
)
def test_what_is_missing_is_said(given, said, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate.main(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------------- what transformers generates with exports (`make parity`)

GENERATE = ROOT / "tests" / "unit" / "data" / "generate"
EXPECTED = json.loads((GENERATE / "expected.json").read_text())


def assert_as_transformers(capsys, source, name):
    """Each answer is the one of `transformers.generate`, and ends with the turn as it did there."""
    options = [option for prompt in EXPECTED[name] for option in ("--prompt", prompt)]
    found = {row["prompt"]: (row["text"] + "<|im_end|>", row["finish"]) for row in rows(capsys, source, "--chat", *options)}
    assert found == {prompt: (answer, "stop") for prompt, answer in EXPECTED[name].items()}


def test_an_export_answers_as_transformers_does_with_it(capsys):
    assert_as_transformers(capsys, GENERATE / "merged", "merged")


@pytest.mark.slow("trains")
def test_a_run_that_begins_with_an_exported_adapter_answers_as_transformers_does(tmp_path, capsys):
    made = arguments(
        tmp_path,
        task="trainers.tasks.causal_lm:CausalLMTask",
        model={"pretrained": str(GENERATE / "merged")},
        lora={"rank": 8, "alpha": 32},
        init_from={"path": str(GENERATE / "adapter")},
        data={"sequence_length": 8, "dataset": "tests.programs.small_tokens:datasets", "tokenizer": str(GENERATE / "adapter")},
        optimizer={"learning_rate": 1e-12},
        max_num_steps=1,
        evaluation={"max_batches": 1},
    )
    own = BaseTrainer(made, *datasets(made))
    own.train()
    assert_as_transformers(capsys, own.output.checkpoint_path, "adapter")
