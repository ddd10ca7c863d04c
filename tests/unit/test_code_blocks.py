"""Every block of Python and YAML in the documents runs as it stands.

A block that begins with a file name is a file: the files of one document lie in one folder. Each YAML file is run by
`python -m trainers.run`, in this process, and PROMISES says what must come of it. The Python files of README.md and
docs/library.md are programs: SCRIPTS says what must come of them. Every function of every Python block is called by one of these
runs.

Each block of YAML is planned, too, as `gangway run CONFIG --dry-run` does it, in this process. One without a file name is a
whole configuration if it says what ends it. Else it is a part, and WHOLE is what it is added to. Its files and models are small
ones that `have_what_a_reader_has` makes. NOT_PLANNED names the blocks that cannot be planned here.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import math
import re
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image
from safetensors.numpy import load_file, save_file

import trainers.commands.run
from cluster.hosts.config import num_devices
from gangway.stop_reason import StopReason
from gangway.user_modules import load_object
from orchestrator.config.job import ConfigError, JobConfig, build, load
from tests import ROOT
from tests.unit import chat_folders
from tests.unit.documents import DOCUMENTS, Block, blocks, inline_code
from tests.unit.test_migrating import resolve
from tests.unit.training import assert_equal, of
from trainers import protocol, runtime
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.checkpoint import assets
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments
from trainers.library import Training
from trainers.planning import estimate
from trainers.step.state import initial_parameters

FILES = {block.file_name: block for kind in ("python", "yaml") for block in blocks(kind) if block.file_name}
PROGRAMS = [block.file_name for block in blocks("python") if block.document in ("README.md", "library.md")]
PYTHON, CONFIGURATIONS = ([name for name in FILES if name.endswith(ending)] for ending in (".py", ".yaml"))
EXTENDING = (ROOT / "docs" / "extending.md").read_text()


@dataclass
class Run:
    """What became of `python -m trainers.run NAME.yaml`."""

    trainer: Any
    events: list[dict[str, Any]]
    printed: str
    folder: Path
    """Of the run."""

    @property
    def published(self) -> dict[int, dict[str, float]]:
        """The metrics of each publish of training, by step."""
        return {event["step"]: event["metrics"] for event in of(self.events, "metrics") if "loss" in event["metrics"]}

    @property
    def last(self) -> dict[str, float]:
        return self.published[max(self.published)]

    @property
    def metrics(self) -> dict[str, Any]:
        return self.trainer.output.metrics

    @property
    def line(self) -> dict[str, float]:
        """What a line learnt."""
        return {name: float(value) for name, value in self.trainer.output.state.params.items()}


class Folder:
    """The files of the documents, and their runs: each is run and checked once."""

    def __init__(self, path: Path):
        self.path, self.called = path, set()
        self._runs: dict[str, Run] = {}
        self._checked: set[str] = set()
        for name, block in FILES.items():
            (path / name).write_text(block.text)

    def check(self, name: str) -> None:
        if name not in self._checked:
            with self.calls_noted():
                if name in SCRIPTS:
                    SCRIPTS[name](self.path / name)
                else:
                    PROMISES[name](self.run(name), self)
            self._checked.add(name)

    def run(self, name: str) -> Run:
        if name not in self._runs:
            for other in BEGINS_WITH.get(name, ()):
                self.run(other)
            self._runs[name] = self._run(name)
        return self._runs[name]

    def _run(self, name: str) -> Run:
        events, made = [], []
        with pytest.MonkeyPatch.context() as patch, signals_kept():
            show, make = trainers.commands.run.show, trainers.commands.run.build
            patch.setattr(trainers.commands.run, "show", lambda event, *to: (events.append(event), show(event, *to)))
            patch.setattr(trainers.commands.run, "build", lambda *given: made.append(make(*given)) or made[0])
            patch.setattr(sys, "argv", ["trainers/run.py", name])
            with redirect_stdout(io.StringIO()) as printed:
                assert trainers.commands.run.main() == 0
        return Run(made[0], events, printed.getvalue(), self.path / "runs" / Path(name).stem)

    @contextmanager
    def calls_noted(self) -> Iterator[None]:
        """Notes which functions of the folder's files are called, on any thread that begins meanwhile."""

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(folder):
                self.called.add((Path(frame.f_code.co_filename).name, frame.f_code.co_qualname))

        folder = str(self.path)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


@contextmanager
def signals_kept() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("blocks")
        patch.chdir(path)
        patch.syspath_prepend(path)
        have_what_a_reader_has(path)
        yield Folder(path)
    for name in PYTHON:
        sys.modules.pop(Path(name).stem, None)


def have_what_a_reader_has(path: Path) -> None:
    """Writes the model and the data that parts of a configuration name."""
    ids, parity, model = chat_folders.NUM_IDS, ROOT / "tests" / "unit" / "data" / "parity" / "qwen3", path / "models" / "qwen3"
    chat_folders.write(model)
    tensors = load_file(parity / "model.safetensors")
    tables = {name: np.resize(tensors[name], (ids, 32)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors | tables, model / "model.safetensors")
    config = json.loads((parity / "config.json").read_text()) | {"vocab_size": ids, "max_position_embeddings": 32768}
    (model / "config.json").write_text(json.dumps(config))
    shutil.copytree(model, path / "models" / "qwen3_small")
    chat = {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."}]}
    for name, records in {
        "texts/some.jsonl": 300 * [{"text": 400 * "abc "}],
        "books/some.jsonl": 300 * [{"text": 400 * "abc "}],
        "conversations.jsonl": 20 * [chat],
        "chats/some.jsonl": 20 * [chat],
        "pairs.jsonl": 40 * [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}],
        "gsm8k/test.jsonl": [{"question": "What is 2 + 2?", "answer": "#### 4"}],
    }.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (path / "reviews.csv").write_text("review,label\n" + 20 * "good,positive\nbad,negative\n")
    (path / "code").mkdir()
    for number in range(40):
        (path / "code" / f"{number}.py").write_text(2000 * "x = 1\n")
    (path / "web").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": 300 * [400 * "abc "]}), path / "web" / "some.parquet")
    for number in range(40):
        (path / "images" / f"class {number % 10}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path / "images" / f"class {number % 10}" / f"{number}.png")


# ---------------------------------------------------------------------- what the text says of each configuration


def is_the_line(run: Run) -> bool:
    """y = 3 x - 1"""
    return run.line == pytest.approx({"slope": 3, "offset": -1}, abs=0.1)


def xs(dataset: Any) -> np.ndarray:
    """The points of one epoch, in the order in which they are trained on."""
    return np.array([dataset[index]["x"] for index in range(len(dataset))])


def line(run: Run, folder: Folder) -> None:
    assert is_the_line(run)
    assert list(run.published) == list(range(10, 101, 10))
    assert run.metrics["eval_loss"] < 0.01
    assert (run.last["total_samples"], run.last["epoch"]) == (1600, 25)  # of 64 points: the data begins again
    x = xs(run.trainer.dataset_eval)  # 20 examples are no multiple of 8 devices: the rows that fill up do not count
    slope, offset = run.line["slope"], run.line["offset"]
    assert run.metrics["eval_loss"] == pytest.approx(np.mean(((slope - 3) * x + offset + 1) ** 2), rel=1e-4)
    assert isinstance(run.trainer.task, protocol.Task)


def counted(run: Run, folder: Folder) -> None:
    assert_equal(run.trainer.output.state.params, folder.run("line.yaml").trainer.output.state.params)  # metrics change nothing
    first = np.abs(3 * xs(run.trainer.dataset_train)[:160] - 1)
    assert 0 < run.published[10]["error"] <= np.max(first)
    x = xs(run.trainer.dataset_eval)  # 20 examples are no multiple of 8 devices: the rows that fill up do not count
    errors = np.abs((run.line["slope"] - 3) * x + run.line["offset"] + 1)
    assert run.metrics["eval_error"] == pytest.approx(np.mean(errors), rel=1e-3)
    assert run.metrics["eval_missed"] == np.mean(errors > 1)


def noisy_line(run: Run, folder: Folder) -> None:
    state = run.trainer.output.state
    norm, x = state.model_state["norm"], xs(run.trainer.dataset_train)
    assert float(norm["mean"][0]) == pytest.approx(np.mean(x), abs=0.2)
    assert float(norm["var"][0]) == pytest.approx(np.var(x), rel=0.3)
    assert run.metrics["eval_loss"] < 1  # of the line that is 0: about 10


def linen_line(run: Run, folder: Folder) -> None:
    assert set(run.trainer.output.state.model_state["linen"]["BatchNorm_0"]) == {"mean", "var"}
    assert run.metrics["eval_loss"] < 1


def function_line(run: Run, folder: Folder) -> None:
    learnt = run.trainer.output.state.params["weights"]
    assert {name: float(value) for name, value in learnt.items()} == pytest.approx({"slope": 3, "offset": -1}, abs=0.1)


def measured(run: Run, folder: Folder) -> None:
    misses = 0
    for step, metrics in run.published.items():
        assert 0 < metrics["error"] <= metrics["largest_error"]
        weighted = [(metrics[f"loss/{name}"], metrics[f"total_tokens/{name}"]) for name in ("negative", "positive")]
        assert sum(tokens for _, tokens in weighted) == metrics["total_tokens"] == 16 * step
        assert misses <= metrics["total_misses"] < 16 * step
        misses = metrics["total_misses"]
    assert misses > 16
    first_errors = np.abs(3 * xs(run.trainer.dataset_train) - 1)  # of slope 0 and offset 0
    assert max(first_errors[:16]) <= run.published[10]["largest_error"] <= max(first_errors)
    totals = {name: run.last[name] for name in ("total_misses", "total_tokens/positive")}
    again = again_until(run, 110)
    assert all(again.last[name] >= value for name, value in totals.items())  # a restart does not reset them
    assert again.last["total_tokens/positive"] > totals["total_tokens/positive"]


def again_until(run: Run, max_num_steps: int) -> Run:
    """The same run, started again with more steps to do."""
    events: list[dict[str, Any]] = []
    runtime.install(runtime.Runtime(events.append))
    arguments = replace(run.trainer.arguments, max_num_steps=max_num_steps)
    trainer = type(run.trainer)(arguments, *load_object(arguments.data.dataset)(arguments))
    trainer.train()
    return Run(trainer, events, "", run.folder)


def two_losses(run: Run, folder: Folder) -> None:
    for metrics in run.published.values():
        assert metrics["loss"] == pytest.approx(metrics["fit"] + metrics["penalty"])
    assert run.line["slope"] < 3


def stream(run: Run, folder: Folder) -> None:
    assert run.trainer.output.stop_reason is StopReason.END_OF_DATA
    assert [metrics["samples"] for metrics in run.published.values()] == [16] * 6 + [4]
    assert "eval_loss" not in run.metrics


def watch(run: Run, folder: Folder) -> None:
    smallest = min(metrics["loss"] for metrics in run.published.values())
    assert f"smallest loss: {smallest:.6f}" in run.printed.splitlines()
    assert_equal(run.trainer.output.state.params, folder.run("line.yaml").trainer.output.state.params)  # it changes nothing


def hooked(run: Run, folder: Folder) -> None:
    assert run.line == pytest.approx({"slope": 2, "offset": 0}, abs=0.1)
    x = xs(run.trainer.dataset_train)
    assert [metrics["clipped"] for metrics in run.published.values()] != [0] * 10
    assert np.mean([metrics["clipped"] for metrics in run.published.values()]) == pytest.approx(np.mean(np.abs(x) > 1))
    assert run.metrics["eval_clipped"] == pytest.approx(np.mean(np.abs(xs(run.trainer.dataset_eval)) > 1))
    for metrics in run.published.values():  # the mean of the roots is not the root of the mean
        assert 0 < metrics["root_loss"] <= math.sqrt(metrics["loss"]) + 1e-6


def student(run: Run, folder: Folder) -> None:
    assert run.line == pytest.approx({"slope": 2, "offset": 2}, abs=0.05)


def words(run: Run, folder: Folder) -> None:
    texts = sys.modules["words"].TEXTS
    kept = [min(len(text), 17) - 1 for text in texts if len(text) > 2]
    assert {metrics["tokens"] for metrics in run.published.values()} == {sum(kept)}
    assert {metrics["samples"] for metrics in run.published.values()} == {len(kept)}
    assert max(run.published) == run.trainer.arguments.max_num_data_epochs
    before = jax.jit(lambda: initial_parameters(run.trainer.task, run.trainer.arguments.seed))()
    after = run.trainer.output.state.params
    assert_equal(before["embed"], after["embed"])
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    assert assets.read(str(run.folder)) == {"shortest": 3}


def signs(run: Run, folder: Folder) -> None:
    rates = [metrics["learning_rate"] for metrics in run.published.values()]
    assert rates == pytest.approx([0.2 * 0.5**n for n in range(10)])
    # Each step moves each parameter by the rate: up or down.
    assert run.line["slope"] / rates[-1] == pytest.approx(round(run.line["slope"] / rates[-1]), abs=1e-2)


def far(run: Run, folder: Folder) -> None:
    assert run.trainer.output.stop_reason is StopReason.EARLY_STOPPED
    scores = {event["step"]: event["metrics"] for event in of(run.events, "metrics") if "far_loss" in event["metrics"]}
    assert all("near_loss" in metrics for metrics in scores.values())
    *earlier, last = sorted(scores)
    assert scores[last]["far_loss"] < 0.01 <= min(scores[step]["far_loss"] for step in earlier)
    assert run.trainer.output.metrics["steps"] == last


def median(run: Run, folder: Folder) -> None:
    x, line = xs(run.trainer.dataset_eval), run.line
    errors = np.abs(line["slope"] * x + line["offset"] - (3 * x - 1))
    assert run.metrics["eval_median_error"] == pytest.approx(np.median(errors), rel=1e-4)
    assert run.metrics["best_score"] <= run.metrics["eval_median_error"]


def table(run: Run, folder: Folder) -> None:
    rows = [row.split(",") for row in (run.folder / "losses.csv").read_text().splitlines()]
    assert {int(step): float(loss) for step, loss in rows} == {s: m["loss"] for s, m in run.published.items()}
    assert (run.folder / "metrics.jsonl").exists()


def huber(run: Run, folder: Folder) -> None:
    path = folder.path / "huber.yaml"
    assert is_the_line(run)
    assert run.trainer.arguments.huber.limit == load(path).training.huber.limit == 0.5
    assert load(path, ["huber.limit=2"]).training.huber.limit == 2
    with pytest.raises(ConfigError, match=r"huber\.limt: .*limit"):
        load(path, ["huber.limt=2"])
    with pytest.raises(ConfigError, match=r"limit = 0.*: expected more than 0"):
        load(path, ["huber.limit=0"])


def halve(run: Run, folder: Folder) -> None:
    trainer = run.trainer
    assert type(trainer).__mro__ == (type(trainer), object)
    assert isinstance(trainer, protocol.TrainerProtocol)
    assert trainer.output.state == (10, 1.0)
    assert [event["step"] for event in of(run.events, "saved")] == [4, 8]
    assert list(trainer.eval(trainer.output.state)) == [{"value": 1.0}]
    # A later generation goes on from what was saved last; one that is asked to stop saves and stops.
    path, events = of(run.events, "saved")[-1]["path"], []
    runtime.install(runtime.Runtime(events.append, restore_from=path))
    runtime.current().request_stop("terminated")
    later = type(trainer)(trainer.arguments, None, None)
    assert later.train() == (9, 2.0)
    assert later.output.stop_reason is StopReason.TERMINATED
    assert json.loads(Path(of(events, "saved")[0]["path"]).read_text()) == [9, 2.0]


def saves(run: Run, folder: Folder) -> None:
    assert run.trainer.functions.checkpoint_manager.saves == 3  # at steps 4 and 8, and at the end
    assert "saves: 2" in run.printed  # the last one comes after the hook
    assert [event["step"] for event in of(run.events, "saved")] == [4, 8, 10]


def without_offset(run: Run, folder: Folder) -> None:
    assert run.line["offset"] == 0.0
    assert run.line["slope"] > 0.0
    assert not run.trainer.output.state.pruner_state["kept"]


def another_line(run: Run, folder: Folder) -> None:
    told = [event["message"] for event in of(run.events, "note")]
    assert any(
        note.startswith("init_from: 1 of 2 parameters are those of ") and note.endswith("new run: offset") for note in told
    )
    # The optimizer takes ten small steps: the slope is still near that of the other run, and the offset near 0.
    assert run.line["slope"] == pytest.approx(3, abs=0.5)
    assert -0.5 < run.line["offset"] < 0


# ---------------------------------------------------------------------- the programs of README.md and docs/library.md


def notebook(path: Path) -> None:
    made, printed = run_program(path)
    x = np.linspace(-2, 2, 200)[:, None]
    assert made["predicted"].shape == (200, 1)
    assert np.mean((np.asarray(made["predicted"]) - np.sin(2 * x)) ** 2) < 0.01
    assert [step for step, _ in made["curve"]] == list(range(10, 301, 10))
    assert made["curve"][-1][1] < 0.01 < made["curve"][0][1]
    assert "step 300/300" in printed
    assert f"Result(steps=300, loss={made['curve'][-1][1]:.4g}, stop_reason=max_steps)" in printed
    assert [each.name for each in path.parent.glob("runs/net*")] == []


def from_python(path: Path) -> None:
    made, printed = run_program(path)
    assert float(made["result"].model(np.array([1.0]))[0]) == pytest.approx(2, abs=0.1)
    assert "stop_reason=max_steps) [" in printed


def held_out(path: Path) -> None:
    made, printed = run_program(path)
    assert made["result"].metrics["eval_accuracy"] >= 0.9
    assert [row["step"] for row in made["result"].history if "eval_accuracy" in row] == [50, 100, 150, 200]
    assert str(made["result"].metrics["eval_accuracy"]) in printed


def on_hosts(path: Path) -> None:
    """tests/ray/test_library.py runs it as it stands."""
    made = runpy.run_path(str(path), run_name="on_hosts")
    result = Training(made["Net"], made["squared_error"], made["waves"], steps=2, batch_size=40, progress=False).fit()
    assert [row["step"] for row in result.history] == [1, 2]


def run_program(path: Path) -> tuple[dict[str, Any], str]:
    """What it defines, and what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        made = runpy.run_path(str(path), run_name="__main__")
    return made, printed.getvalue()


SCRIPTS = {f"{check.__name__}.py": check for check in (from_python, notebook, held_out, on_hosts)}


def flowers(run: Run, folder: Folder) -> None:
    held_out, learnt = sys.modules["flowers"].flowers(run.trainer.arguments)[1], run.trainer.output.state.params
    answers = np.argmax(held_out["size"] @ np.asarray(learnt["kernel"]) + np.asarray(learnt["bias"]), -1)
    # 30 examples are no multiple of 8 devices: the rows that fill up do not count.
    assert run.metrics["eval_accuracy"] == pytest.approx(np.mean(answers == held_out["kind"]))
    assert run.metrics["eval_accuracy"] > 0.9
    assert {"loss", "accuracy"} < set(run.last)
    assert "perplexity" not in run.last


def pupil(run: Run, folder: Folder) -> None:
    assert run.line == pytest.approx(folder.run("line.yaml").line, abs=0.05)


def mirrored(run: Run, folder: Folder) -> None:
    module, key = sys.modules["mirrored"], jax.random.key(0)
    images = np.arange(2 * 16 * 4 * 4 * 3, dtype=np.float32).reshape(2, 16, 4, 4, 3)
    made = np.asarray(module.mirrored(images, key))
    assert_equal(made, np.asarray(module.mirrored(images, key)))
    turned = (made == images[..., ::-1, :]).all((2, 3, 4))
    assert (turned != (made == images).all((2, 3, 4))).all()
    assert 0 < turned.sum() < turned.size
    assert run.metrics["eval_loss"] > 0


BEGINS_WITH = {"another_line.yaml": ("line.yaml",), "pupil.yaml": ("line.yaml",)}
"""The runs that must have been made before."""

PROMISES: dict[str, Callable[[Run, Folder], None]] = {
    f"{check.__name__}.yaml": check
    for check in (
        line,
        counted,
        noisy_line,
        linen_line,
        function_line,
        measured,
        two_losses,
        stream,
        watch,
        hooked,
        student,
        words,
        saves,
        without_offset,
        another_line,
        flowers,
        pupil,
        signs,
        far,
        median,
        table,
        huber,
        halve,
        mirrored,
    )
}


# ---------------------------------------------------------------------- the tests


def test_there_are_blocks_of_each_kind_and_none_that_no_test_can_try():
    assert all(blocks(kind) for kind in ("python", "yaml", "commands", "drawing"))
    assert blocks("unknown") == []


@pytest.mark.parametrize(("language", "text"), [("rust", "fn main() {}\n"), ("", "some words\n"), ("sh", "make test\nuv run\n")])
def test_a_block_of_a_new_kind_is_found_out(language, text):
    assert Block("new.md", 1, language, text).kind == "unknown"


def test_each_block_of_python_is_a_file_of_its_own():
    python = blocks("python")
    assert [str(block) for block in python if block.file_name is None] == []
    assert len({block.file_name for block in python}) == len(python)


def test_each_configuration_and_each_program_has_a_promise():
    assert sorted(PROMISES) == sorted(CONFIGURATIONS)
    assert sorted(SCRIPTS) == sorted(PROGRAMS)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.slow("trains with each block of the text")
def test_a_program_trains_and_does_what_the_text_says(folder, name):
    folder.check(name)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.slow("trains with each block of the text")
def test_a_configuration_trains_and_does_what_the_text_says(folder, name):
    folder.check(name)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_orchestrator_takes_the_same_configuration(folder, name):
    assert load(folder.path / name).training.name == Path(name).stem


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in BEGINS_WITH])  # with a run that is not there yet
@pytest.mark.sampled(2)
def test_a_dry_run_takes_the_same_configuration(folder, name):
    planned(load(folder.path / name))


@pytest.mark.slow("trains what the documents show")
def test_every_function_of_every_block_is_called(folder):
    for name in (*CONFIGURATIONS, *SCRIPTS):
        folder.check(name)
    written = {(name, function) for name in PYTHON for function in functions(ast.parse(FILES[name].text))}
    assert written - folder.called == set()


def functions(tree: ast.AST, prefix: str = "") -> set[str]:
    """The qualified names of all functions that do something and are no part of another one."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found |= functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not is_empty(node):
            found.add(prefix + node.name)
    return found


def is_empty(function: ast.FunctionDef) -> bool:
    return len(function.body) == 1 and isinstance(function.body[0], ast.Expr) and ast.unparse(function.body[0]) == "..."


PARTS = [block for block in blocks("yaml") if block.file_name is None]


WHOLE: dict[str, Any] = {"max_num_steps": 100, "data": {"paths": ["texts/*.jsonl"]}}
"""The configuration to which a part is added."""
OF_MANY_DEVICES = {"global_batch_size": 4096}
"""Of a part that names its hosts."""
NOT_PLANNED = {
    "storage: gs://my-bucket/runs": "whether the run has begun is asked of the bucket",
    "storage: s3://my-bucket/runs": "whether the run has begun is asked of the bucket",
}
"""Blocks, or entries of one, by the beginning of their text, and why they are not planned here: their keys alone are checked."""


@pytest.mark.parametrize("block", PARTS, ids=str)
def test_a_part_of_a_configuration_can_be_run(folder, block, tmp_path):
    for part in alternatives(block.text):
        config = build({"name": "part", "storage": str(tmp_path)} | completed(part))
        if not any(yaml.safe_dump(part).startswith(text) for text in NOT_PLANNED):
            planned(config)


def completed(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a whole configuration as it is, and any other with what it lacks."""
    if {"max_num_steps", "max_num_data_epochs"} & part.keys():
        return part
    data = part.get("data", {})
    lacking = {} if {"paths", "mixture", "dataset"} & data.keys() else WHOLE["data"]
    return WHOLE | (OF_MANY_DEVICES if "hosts" in part else {}) | part | {"data": lacking | data}


def planned(config: JobConfig) -> None:
    """Does what a dry run does, in this process. Raises AssertionError if it would refuse the run, or a setting has no effect."""
    problems, facts = estimate.plan(config.training, num_devices(config.hosts))
    assert problems == []
    assert facts.get("without_effect", []) == []
    assert "doubt" not in facts


def test_a_block_with_data_and_a_model_is_a_whole_configuration():
    """A reader copies it as it stands."""
    parts = [(block, part) for block in PARTS for part in alternatives(block.text)]
    recipes = [(block, part) for block, part in parts if "paths" in part.get("data", {}) and {"model", "task"} & part.keys()]
    assert len(recipes) > 5
    assert [str(block) for block, part in recipes if completed(part) != part] == []


def test_what_a_dry_run_would_refuse_is_found_out(folder, tmp_path):
    for part in ({"data": {"paths": ["none.jsonl"]}}, {"model": {"width": 65}}, {"data": {"tokenizer": "models/qwen3"}}):
        with pytest.raises((AssertionError, ConfigError)):
            planned(build({"name": "part", "storage": str(tmp_path)} | completed(part)))


def test_each_block_that_is_not_planned_is_there():
    parts = [yaml.safe_dump(part) for block in PARTS for part in alternatives(block.text)]
    assert all(any(part.startswith(text) for part in parts) for text in NOT_PLANNED)


def test_a_part_of_a_configuration_in_the_text_has_known_keys_only(tmp_path):
    for path in DOCUMENTS:
        for code in inline_code(path):
            if re.match(r"[a-z_]+: *[{\[]", code):
                check_part(yaml.safe_load(code), tmp_path)


def alternatives(text: str) -> list[dict[str, Any]]:
    """One configuration, or, if its keys come again, several of one key each."""
    entries = re.findall(r"^\w.*\n(?:[ #].*\n|\n)*", text, re.M)
    parts = [yaml.safe_load(entry) for entry in entries]
    keys = [key for part in parts for key in part]
    return parts if len(set(keys)) < len(keys) else [yaml.safe_load(text)]


def check_part(part: dict[str, Any], tmp_path: Path) -> None:
    """Raises ConfigError."""
    build({"name": "part", "storage": str(tmp_path), "max_num_steps": 100, "global_batch_size": 4096, **part})


def test_an_unknown_key_of_a_part_is_found_out(tmp_path):
    first, second = alternatives("hosts: {count: 2}\nhosts: {cuont: 2}  # again\n")
    check_part(first, tmp_path)
    with pytest.raises(ConfigError, match="cuont"):
        check_part(second, tmp_path)
    assert alternatives("hosts: {count: 2}\nseed: 1\n") == [{"hosts": {"count": 2}, "seed": 1}]


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables below a heading of docs/extending.md."""
    section = EXTENDING.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in text.strip("| ").split("|")] for text in re.findall(r"^\|.*\|$", section, re.M)]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_table_of_events_has_each_event_with_its_keywords():
    events = {
        event: names(row[1]) for row in rows("A callback") if len(row) == 3 for event in names(row[0]) if event[:3] == "on_"
    }
    methods = [row for row in inspect.getmembers(Callback, inspect.isfunction) if row[0].startswith("on_")]
    keywords = {
        name: [word.name for word in inspect.signature(method).parameters.values() if word.kind is word.KEYWORD_ONLY]
        for name, method in methods
    }
    assert events == keywords


HOOKS = [
    *(name for name in vars(BaseTrainer) if name.startswith("on_")),
    *(
        "calculate_metrics",
        "preprocess_batch",
        "prepare_batch",
        "prepared_shapes",
        "preforward",
        "postforward",
        "forward_backward",
    ),
]


def test_the_table_of_hooks_has_each_hook():
    documented = [hook for row in rows("A hook")[2:] for hook in names(row[0])]
    assert sorted(documented) == sorted(HOOKS)


def test_the_table_of_overrides_has_what_there_is_to_override():
    documented = {override for row in rows("Overrides")[2:] for override in names(row[0])}
    replaceable = {name for name in dir(BaseTrainer) if name.startswith(("configure_", "build_", "freeze_", "post_init"))}
    assert documented == replaceable | {"task", "scheduler", "optimizer"}


def test_the_table_of_runtime_has_what_a_trainer_may_call():
    documented = {name for row in rows("A trainer that inherits nothing")[2:] for name in names(row[0])}
    assert documented == set(runtime.__all__) - {"Event", "Runtime", "current", "install"}


KEYS = [
    (path.name, code)
    for path in DOCUMENTS
    if path.name in ("extending.md", "metrics.md")
    for code in inline_code(path)
    if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", code)
    and code.split(".")[0] in {*TrainingArguments.__dataclass_fields__, "trainers", *ORCHESTRATOR_SECTIONS}
    and not code.endswith((".py", ".jsonl", ".yaml", ".run"))
]


@pytest.mark.parametrize(("document", "name"), KEYS)
def test_a_key_or_an_object_that_the_text_names_exists(document, name, tmp_path):
    if name.split(".")[0] not in ORCHESTRATOR_SECTIONS:
        resolve(name)
        return
    form = build({"name": "keys", "storage": str(tmp_path), "max_num_steps": 1})
    for part in name.split("."):
        form = getattr(form, part)
