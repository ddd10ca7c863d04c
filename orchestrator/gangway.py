"""The command `gangway`: `gangway run CONFIG` is `python -m orchestrator.run CONFIG`, and so on for each of COMMANDS.

It imports nothing heavy: the first answer comes at once. The exit status is that of the command.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from gangway.config.section import did_you_mean
from gangway.program import EXIT_FINE, EXIT_REFUSED, GANGWAY, command, has_source, leave
from gangway.surroundings import keep_freed_memory
from orchestrator.shipped.files import configuration_named


class Command(NamedTuple):
    module: str
    """Its `main()` reads `sys.argv` and returns the exit status."""
    about: str


COMMANDS = {
    "init": Command("orchestrator.commands.init", "write a small project of your own, which runs at once"),
    "run": Command("orchestrator.run", "train on one machine or many; --dry-run shows what would run"),
    "plan": Command("orchestrator.plan", "what a run will need: memory, time of a step, days, goodput, price; --on v5e-256"),
    "compile": Command(
        "orchestrator.commands.compile", "compile a run for its hosts, which need not be there: memory, exchanges"
    ),
    "deploy": Command(
        "orchestrator.deploy.__main__", "write the files with which a run goes onto KubeRay, TPU VMs, SLURM or Ray's launcher"
    ),
    "train": Command("trainers.run", "the same training in one process, without Ray"),
    "sweep": Command("orchestrator.commands.sweep", "train with each of several settings, one run after another, and compare"),
    "prepare": Command("trainers.prepare", "make the tokens of the data once, for all hosts; trains a tokenizer, too"),
    "data": Command("trainers.data.__main__", "look at the data of a configuration as training will see it"),
    "generate": Command("trainers.generate", "continue prompts with the model of a run, or of a folder of Hugging Face"),
    "evaluate": Command("trainers.evaluate", "the metrics of checkpoints, on held-out data"),
    "reference": Command("trainers.reference", "the log-probabilities of a reference, as columns of preference data"),
    "export": Command("trainers.export", "the model of a run as files for other programs"),
    "status": Command("orchestrator.runs.status", "how runs are: step, loss, time left, goodput; --watch"),
    "history": Command(
        "orchestrator.runs.history", "the course of a run's metrics, drawn: its loss, and that of its evaluations"
    ),
    "compare": Command("orchestrator.runs.compare", "settings and results of runs side by side"),
    "report": Command("orchestrator.report.__main__", "a page about a run, or about several side by side, in one file"),
    "incidents": Command("orchestrator.runs.incidents", "what failed in a run, and what it cost"),
    "logs": Command("orchestrator.runs.logs", "what the processes of a run have printed; --follow"),
    "save": Command("orchestrator.runs.save", "let a run save now, and go on"),
    "stop": Command("orchestrator.runs.stop", "let a run save and stop, from any machine that sees its storage"),
    "checkpoints": Command("orchestrator.commands.checkpoints", "list and check the checkpoints of a run"),
    "profile": Command("orchestrator.commands.profile", "profile a few steps of a run while it goes on"),
    "verify": Command("orchestrator.verify", "prove that your program can be killed, resumed and resized"),
    "chaos": Command("orchestrator.chaos", "inject faults into a real run, and score the result"),
    "completion": Command(
        "orchestrator.commands.completion", "what lets bash, zsh or fish complete these commands, options and keys"
    ),
    "tracking": Command("orchestrator.tracking.__main__", "ship the metrics to MLflow that a run could not ship"),
}


def script() -> NoReturn:
    """The program that `pip install` makes. Imports modules of the working folder first, as `python -m` does."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        print("error: the working folder is gone: start in another one", file=sys.stderr)
        leave(EXIT_REFUSED)
    if not sys.flags.safe_path:
        sys.path[0] = here  # in the place of the folder of the program
    leave(main())


@command()
def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return EXIT_FINE if words else EXIT_REFUSED
    if words[0] == "--version":
        print(version())
        return EXIT_FINE
    name, *rest = words
    if (problem := unknown(name)) is not None:
        print(f"error: {problem}", file=sys.stderr)
        return EXIT_REFUSED
    if not sys.flags.safe_path and has_source(Path.cwd()):
        # All processes of a run import the source of the working folder: this one must not be of another version.
        os.execv(sys.executable, [sys.executable, "-m", "orchestrator.gangway", *words])
    if name == "train":
        keep_freed_memory(os.environ, GANGWAY, "orchestrator.gangway")  # this process trains
    return call(name, rest)


def usage() -> str:
    rows = (f"  {name:<13}{command.about}" for name, command in COMMANDS.items())
    return "\n".join(
        [
            f"usage: {GANGWAY} COMMAND ...\n",
            *rows,
            f"\n{GANGWAY} COMMAND --help shows the options of a command. Each is also a module of Python, such as",
            "`python -m orchestrator.run` for `gangway run`.",
        ]
    )


def version() -> str:
    from importlib import metadata

    try:
        return f"{GANGWAY} {metadata.version(GANGWAY)}"
    except metadata.PackageNotFoundError:
        return f"{GANGWAY}, not installed: it runs from {Path(__file__).resolve().parents[1]}"


def unknown(name: str) -> str | None:
    """Returns what is wrong with the name of a command; None if there is one of this name."""
    if name in COMMANDS:
        return None
    if name.endswith((".yaml", ".yml")):
        return f"{name!r} is no command; to train what it describes: {GANGWAY} run {name}"
    hint = did_you_mean(name, COMMANDS, prefix=f"{GANGWAY} ") or f"; expected one of {', '.join(COMMANDS)}"
    return f"there is no command {name!r}{hint}"


def call(name: str, rest: Sequence[str]) -> int:
    """Runs the command, and returns its exit status. Its `main` finds its name and its words in `sys.argv`."""
    sys.argv = [f"{GANGWAY} {name}", *with_shipped(rest)]
    return importlib.import_module(COMMANDS[name].module).main()


def with_shipped(words: Sequence[str]) -> list[str]:
    """Returns the words of a command, with the path of a configuration that comes with gangway in the place of its name. A file
    in the working folder comes first."""
    found = list(words)
    for number, word in enumerate(words):
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            if Path(word).exists():
                break
            if path := configuration_named(word):
                found[number] = str(path)
                print(f"{word}: the one that comes with {GANGWAY}, {path}", file=sys.stderr)
            elif configuration_named(name := Path(word).name):
                print(f"{word} is not there; {name} comes with {GANGWAY}, and is found by this name alone", file=sys.stderr)
            break
    return found


if __name__ == "__main__":
    leave(main())
