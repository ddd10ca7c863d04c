"""What `gangway completion` writes, read by the shells themselves. A shell that is not installed is left out.
Outside of its line editor zsh has no completion: what it reads is that of the library alone."""

import shutil
import subprocess
import sys

import pytest

from tests import ROOT

ASK = {
    "bash": "source {file}; COMP_WORDS=({words} {last!r}); COMP_CWORD={count}; _shtab_gangway; "
    'printf "%s\\n" "${{COMPREPLY[@]}}"',
    "fish": "source {file}; complete -C '{words} {last}'",
}
FIRST = {"bash": str.strip, "fish": lambda line: line.partition("\t")[0]}
"""The word of a line that a shell has printed."""


@pytest.fixture(scope="module", params=ASK)
def offered(request, tmp_path_factory):
    """What a shell offers for the last word of a line."""
    shell, file = request.param, tmp_path_factory.mktemp("completion") / "gangway"
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    with file.open("w") as out:
        subprocess.run([sys.executable, "-m", "orchestrator.commands.completion", shell], check=True, cwd=ROOT, stdout=out)

    def ask(words: str, last: str) -> set[str]:
        asked = ASK[shell].format(file=file, words=words, last=last, count=len(words.split()))
        command = [shell, "--no-config" if shell == "fish" else "--norc", "-c", asked]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=file.parent)
        assert done.stderr == ""
        return {FIRST[shell](line) for line in done.stdout.splitlines()}

    return ask


def test_a_shell_offers_commands_options_their_values_and_the_keys_of_a_configuration(offered):
    assert {"completion", "compile", "compare"} <= offered("gangway", "com")
    assert {"--dry-run", "--fresh"} <= offered("gangway run config.yaml", "--")
    assert {"kuberay", "slurm"} <= offered("gangway deploy config.yaml --to", "")
    assert {"bash", "zsh", "fish"} <= offered("gangway completion", "")
    keys = {key.rstrip("=") for key in offered("gangway run config.yaml", "optimizer.learn")}
    assert "optimizer.learning_rate" in keys
    assert "optimizer.learning_rate" not in {key.rstrip("=") for key in offered("gangway export runs/a", "optimizer.learn")}
