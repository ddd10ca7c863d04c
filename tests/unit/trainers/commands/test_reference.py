"""The reference of preferences: its log-probabilities by the command, and DPO against it as the example has it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml

from tests import ROOT
from tests.unit.records import ListRecords
from tests.unit.training import of
from trainers.base import BaseTrainer
from trainers.checkpoint import weights
from trainers.commands import reference
from trainers.config import DataConfig
from trainers.config.arguments import TrainingArguments, dataset_function, from_dict
from trainers.data.sources.preference import pairs
from trainers.data.sources.records import open_records
from trainers.settings import read
from trainers.text.tokenizers import load

MODEL = {"width": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 48}
EXAMPLE = yaml.safe_load((ROOT / "examples" / "dpo.yaml").read_text())
RECORDS = [
    {"prompt": f"to {number}: ", "chosen": "hello" * (1 + number % 3), "rejected": "HEY", "number": number}
    for number in range(19)
]


def trained(storage, **changes):
    settings = {name: value for name, value in EXAMPLE.items() if name not in ("hosts", "init_from", "frozen", "preference")}
    settings |= {"storage": str(storage), "model": MODEL, "previews": {"prompts": []}, **changes}
    arguments = from_dict(TrainingArguments, settings)
    made = BaseTrainer(arguments, *dataset_function(arguments)(arguments))
    made.train()
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model of the shape of the example's, hardly trained, in place of the run `tiny`."""
    storage = tmp_path_factory.mktemp("tiny")
    trained(storage, name="tiny", preference={"loss": "orpo"}, max_num_steps=1, evaluation={})
    return storage / "tiny"


@pytest.mark.slow("trains, and runs a command")
def test_the_margin_of_the_example_grows(tmp_path, run, events):
    begins = {"init_from": str(run), "frozen": {"reference": str(run)}, "preference": EXAMPLE["preference"]}
    trained(tmp_path, **begins, max_num_steps=40, optimizer={**EXAMPLE["optimizer"], "learning_rate": 3e-3})
    published = [event["metrics"] for event in of(events, "metrics")]
    training = [metrics for metrics in published if "loss" in metrics]
    evaluated = [metrics for metrics in published if "eval_loss" in metrics]
    margins = [metrics["rewards/margin"] for metrics in training]
    assert margins == sorted(margins)
    assert training[-1]["loss"] < 0.35 < np.log(2) / 1.9
    held_out = [metrics["eval_rewards/margin"] for metrics in evaluated]
    assert held_out[-1] > held_out[0] > 0
    assert evaluated[-1]["eval_accuracy"] == 1
    assert training[-1]["rewards/chosen"] > training[-1]["rewards/rejected"]


@pytest.fixture
def config(tmp_path, run):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    settings = {"name": "dpo", "task": EXAMPLE["task"], "model": MODEL, "max_num_steps": 1, "storage": str(tmp_path)}
    data = {"paths": [str(tmp_path / "pairs.jsonl")], "ignore_columns": ["number"], "sequence_length": 32}
    settings |= {"data": data, "frozen": {"reference": str(run)}}
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "dpo.yaml"


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.slow("trains, and runs a command")
def test_the_command_writes_the_log_probabilities_of_the_reference_beside_the_records(tmp_path, config, run, capsys, ending):
    output = tmp_path / f"with{ending}"
    assert reference.main([str(config), "--output", str(output)]) == 0
    assert f"wrote 19 records to {output}" in capsys.readouterr().err
    written = open_records(DataConfig(paths=(str(output),)))
    rows = pairs(ListRecords(RECORDS), load("bytes"), read(str(config)))
    model = model_of(run)
    for index, record in enumerate(RECORDS):
        assert {name: written[index][name] for name in record} == record
        found = [written[index][name] for name in ("ref_chosen_logps", "ref_rejected_logps")]
        expected = log_p(model, rows[index])
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    settings = read(str(config), ["preference.reference=columns", "frozen={}"])
    with_columns = pairs(written, load("bytes"), settings)[3]
    np.testing.assert_allclose(with_columns["ref_logps"], log_p(model, rows[3]), rtol=1e-4)


def model_of(run):
    made = BaseTrainer(from_dict(TrainingArguments, {"name": "x", "max_num_steps": 1, "model": MODEL}))
    made.configure_model()
    return made.model.merge(weights.load(weights.open_model(weights.find(str(run))), made.placement.model_arrays))


def log_p(model, row):
    logits = jax.jit(model.__call__)(row["tokens"][:, :-1])
    all_log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    of_targets = np.take_along_axis(all_log_p, row["tokens"][:, 1:, None], -1)[..., 0]
    return (of_targets * row["token_weight"][:, 1:]).sum(-1)


@pytest.mark.slow("trains, and runs a command")
def test_a_killed_command_leaves_nothing_under_its_name_and_the_next_call_works(tmp_path, config):
    """SIGKILL, while it writes."""
    many = [{**RECORDS[number % 19], "number": number} for number in range(3000)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in many))
    output = tmp_path / "with.jsonl"
    command = [sys.executable, "-m", "trainers.reference", str(config), "--output", str(output)]
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert any(line.startswith("reference: 1 of 3,000 records, ") for line in run.stderr)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("with*")] == ["with.jsonl.tmp"]
    assert reference.main(command[3:]) == 0
    assert [path.name for path in tmp_path.glob("with*")] == ["with.jsonl"]
    assert [json.loads(line)["number"] for line in output.open()] == list(range(3000))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--output", "x.csv"], r"--output x.csv: expected a file that ends with .jsonl or .parquet"),
        (["--output", "{tmp}/pairs.jsonl"], "pairs.jsonl is there already: give a new file"),
        (["--output", "gs://bucket/new.jsonl"], "gs://bucket/new.jsonl: expected a file on a disk or a mount"),
        (["--output", "{tmp}/none/new.jsonl"], "new.jsonl cannot be written: No such file or directory"),
        (["--output", "{tmp}/new.jsonl", "frozen={{}}"], "nothing names the reference: set frozen.reference"),
    ],
)
def test_what_the_command_refuses(config, tmp_path, capsys, words, error):
    assert reference.main([str(config), *(word.format(tmp=tmp_path) for word in words)]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()
