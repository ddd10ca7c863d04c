"""The command that makes tokens once: killed and gone on with, used by a run, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import yaml

from tests import ROOT
from trainers.commands import prepare
from trainers.data import __main__ as look
from trainers.data.prepared import PreparedDocuments
from trainers.data.sources.text import text_windows
from trainers.settings import read
from trainers.tasks.causal_lm import CausalLMTask
from trainers.text import tokenizers

TEXTS = [f"the gang of host {number} trains and restarts, and trains again. " * 4 for number in range(600)]


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(path))
    return path


@pytest.fixture
def config(tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    path = tmp_path / "mine.yaml"
    settings = {
        "data": {"paths": [str(tmp_path / "texts.jsonl")], "sequence_length": 16},
        "model": {"vocab_size": 300},  # more than the tokenizer has: as it is
        "max_num_steps": 1,
        "storage": str(tmp_path / "runs"),
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_reads_what_was_prepared_with_a_tokenizer_of_its_own(config, tmp_path, capsys, monkeypatch):
    assert prepare.main([str(config), "--train-bpe", "280", "--workers", "0"]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "mine.prepared"
    assert out.splitlines()[0] == f"reading {config}"
    assert "data: 600 of 600 records" in out
    assert "data: 600 documents, " in out
    settings = out.splitlines()[-3:]
    assert settings == [f"data.prepared={folder}", f"data.tokenizer={folder}/tokenizer", "model.vocab_size=300"]
    arguments = read(str(config), [*settings, "data.shuffle=false"])
    tokenizer = tokenizers.of(arguments)
    documents = PreparedDocuments(folder / "data")
    assert tokenizer.decode(documents[7].tokens[:-1]) == TEXTS[7]
    assert documents[7].tokens[-1] == tokenizer.separator
    assert len(documents[7].tokens) < len(TEXTS[7]) / 2
    assert documents.num_ids <= 280
    monkeypatch.setattr(tokenizers.FolderTokenizer, "encode_documents", None)
    train, _ = text_windows(arguments)
    np.testing.assert_array_equal(train[2]["tokens"], documents.tokens[32:49])
    # Once more: nothing is made again, and another size is refused.
    assert prepare.main([str(config), "--train-bpe", "280"]) == 0
    out = capsys.readouterr().out
    assert f"{folder}/tokenizer: it is there already" in out
    assert f"data: {folder}/data is there already, and whole" in out
    tokens = folder / "data" / "tokens.bin"
    tokens.write_bytes(b"x" + tokens.read_bytes()[1:])
    assert prepare.main([str(config), "--train-bpe", "280"]) == 2
    assert "data is damaged: tokens.bin do not have the checksums" in capsys.readouterr().err
    assert prepare.main([str(config), "--train-bpe", "290"]) == 2
    assert "has a tokenizer of other files or another size: give a new --output" in capsys.readouterr().err


def command(config, output, *more):
    return [sys.executable, "-m", "trainers.prepare", str(config), "--output", str(output), "--workers", "2", *more]


def test_a_model_gets_the_tokens_of_a_tokenizer_that_is_trained_for_it(config, tmp_path, capsys, monkeypatch):
    config.write_text(config.read_text().replace("vocab_size: 300", "vocab_size: 270"))
    assert prepare.main([str(config), "--train-bpe", "290", "--workers", "0"]) == 0
    settings = capsys.readouterr().out.splitlines()[-3:]
    num_tokens = tokenizers.load(str(tmp_path / "runs" / "mine.prepared" / "tokenizer")).num_ids
    assert num_tokens > 270
    assert settings[-1] == f"model.vocab_size={num_tokens}"
    train, _ = text_windows(read(str(config), settings))
    assert len(train) > 0
    # As a user would look at them.
    monkeypatch.setattr("trainers.runtime.install", lambda made: None)
    for words, shown in (([], False), (["--specials"], True)):
        assert look.main([str(config), *settings, "data.packing=concat", "--examples", "2", *words]) == 0
        assert ("again. <|endoftext|>" in capsys.readouterr().out) == shown


def test_a_task_that_decodes_by_itself_has_no_special_tokens_to_show(config, capsys, monkeypatch):
    monkeypatch.setattr("trainers.runtime.install", lambda made: None)
    assert look.main([str(config), "task=tests.unit.trainers.commands.test_prepare:Decoding", "--specials"]) == 2
    assert "--specials: Decoding decodes tokens by itself; leave it out" in capsys.readouterr().err


class Decoding(CausalLMTask):
    def decode(self, tokens):
        return "x"


def test_a_killed_command_goes_on_with_the_finished_parts(config, tmp_path):
    """SIGKILL, after the first parts: the workers end too, and the second call makes the same bytes as one undisturbed."""
    (tmp_path / "slow.py").write_text(SLOW)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert prepare.main([str(config), "--output", str(undisturbed), "--workers", "0"]) == 0
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.Popen(
        [sys.executable, "-m", "slow", *command(config, killed)[3:]], cwd=ROOT, env=env, stdout=subprocess.DEVNULL
    )
    while not (finished := sorted(killed.glob("data.parts-*/*.json"))):
        assert run.poll() is None
        time.sleep(0.01)
    workers = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert len(workers) >= 2
    wait_until(lambda: not any(worker.is_running() for worker in workers))
    assert not (killed / "data").exists()
    finished = {path: path.stat().st_mtime_ns for path in killed.glob("data.parts-*/*.json")}
    assert 0 < len(finished) < 10
    again = subprocess.run(command(config, killed), cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"({64 * len(finished)} of them from before)" in again.stdout
    assert contents(killed / "data") == contents(undisturbed / "data")
    assert sorted(path.name for path in killed.iterdir()) == ["data"]


SLOW = """
import sys, time
from trainers.data import preparing
from trainers.data.parts import write_part

def slowly(*given):
    about = write_part(*given)
    time.sleep(0.5)
    return about

preparing.write_part = slowly
if __name__ == "__main__":
    from trainers.commands import prepare
    sys.exit(prepare.main())
"""


def wait_until(is_so, limit_s=20):
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_what_is_refused(config, tmp_path, capsys):
    def error(*given):
        assert prepare.main([str(config), "--workers", "0", *given]) == 2
        return capsys.readouterr().err

    assert "model.vocab_size = 200: expected at least 256, for the data are bytes" in error("model.vocab_size=200")
    assert "--train-bpe 100: expected at least 257" in error("--train-bpe", "100")
    assert "gs://bucket/x is no folder: tokens are mapped from files; give --output" in error("--output", "gs://bucket/x")
    mixture = f"data.mixture=[{{name: tokenizer, paths: [{tmp_path / 'texts.jsonl'}]}}]"
    assert "a source 'tokenizer', the name of the folder for --train-bpe" in error("--train-bpe", "300", mixture)
    (tmp_path / "blocked").write_text("")
    assert "Not a directory" in error("--output", str(tmp_path / "blocked" / "x"))
    assert prepare.main([str(config), "--workers", "0", f"data.prepared={tmp_path / 'there'}"]) == 0
    assert (tmp_path / "there" / "data" / "prepared.json").is_file()
    (tmp_path / "texts.jsonl").write_text('{"text": "other"}\n')
    assert f"{tmp_path}/texts.jsonl had" in error("--output", str(tmp_path / "there"))
