"""A packed mixture of three sources, killed at random and resized: the samples, losses and tokens of an undisturbed run."""

from __future__ import annotations

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.multihost import harness
from tests.programs.processes import PATIENCE_S
from trainers.config.arguments import TrainingArguments, from_dict

WINGS = ("trainers/data",)

STEPS = 40
WORDS = ("the", "gang", "trains", "on", "hosts", "that", "come", "and", "go", "no", "token", "is", "lost", "or", "seen", "twice")


def texts(seed, number):
    numbers = random.Random(seed)
    return [" ".join(numbers.choices(WORDS, k=numbers.randint(1, 12))) for _ in range(number)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(1, 40)))
    pq.write_table(pa.table({"body": texts(2, 60)}), folder / "table.parquet")
    (folder / "texts").mkdir()
    for number, text in enumerate(texts(3, 30)):
        (folder / "texts" / f"{number}.txt").write_text(text)
    return [
        {"name": "lines", "paths": [str(folder / "lines.jsonl")], "weight": 0.5, "weight_at": [[25, 0.1]]},
        {"name": "table", "paths": [str(folder / "table.parquet")], "weight": 0.3, "columns": {"text": "body"}},
        {"name": "texts", "paths": [str(folder / "texts")], "pattern": "*.txt", "weight": 0.2, "epochs": 2},
    ]


def arguments(folder, sources, packing="fit"):
    settings = {
        "name": "run",
        "storage": str(folder),
        "global_batch_size": 6,
        "max_num_steps": STEPS,
        "publish_every_steps": 1,
        "model": {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24},
        "data": {"sequence_length": 32, "packing": packing, "overlong": "split", "mixture": sources, "eval_fraction": 0.1},
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"save_steps": 4},
        "previews": {"prompts": []},
    }
    return from_dict(TrainingArguments, settings)


def home(folder):
    """Where the tokens are kept."""
    return {"HOME": str(folder)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, sources):
    folder = tmp_path_factory.mktemp("undisturbed")
    (host,) = harness.run(arguments(folder, sources), folder / "logs", hosts=1, devices_per_host=2, env=home(folder))
    return host


def wait_for_step(host, step):
    with host.changed:
        host.changed.wait_for(lambda: host.exit is not None or max(harness.losses(host), default=0) >= step, PATIENCE_S)
        assert host.exit is None, host.child.log_tail()


def metrics(hosts):
    return {event["step"]: event["metrics"] for host in hosts for event in host.of("metrics") if "loss" in event["metrics"]}


@pytest.mark.slow("starts the processes of several hosts")
def test_killed_at_random_and_resized_it_trains_on_the_samples_of_an_undisturbed_run(tmp_path, sources, undisturbed):
    made, env = arguments(tmp_path, sources), home(tmp_path)
    killed_at, stopped_at = random.randint(5, 15), random.randint(22, 32)
    two = harness.start(made, tmp_path / "two", hosts=2, devices_per_host=1, env=env)
    wait_for_step(two[0], killed_at)
    two[0].wait_for("saved")  # the first checkpoint, of step 4, may still be on its way
    harness.kill(two)
    one = harness.run(made, tmp_path / "one", hosts=1, devices_per_host=2, stop_at=stopped_at, env=env)
    again = harness.run(made, tmp_path / "again", hosts=2, devices_per_host=1, env=env)
    assert one[0].of("restored")[0]["step"] in range(4, stopped_at)
    assert again[0].of("restored")[0]["step"] == stopped_at
    result, expected = harness.result(again[0]), harness.result(undisturbed)
    assert result["samples"] == expected["samples"] == 6 * STEPS
    assert result["samples_digest"] == expected["samples_digest"]
    found, wanted = metrics([two[0], one[0], again[0]]), metrics([undisturbed])
    assert sorted(found) == sorted(wanted) == list(range(1, STEPS + 1)), (killed_at, stopped_at)
    names = [name for name in wanted[STEPS] if name.startswith(("loss", "total_tokens/", "epoch"))]
    assert {"loss/lines", "total_tokens/table", "epoch/texts"} <= set(names)
    for step, values in wanted.items():
        np.testing.assert_allclose([found[step][n] for n in names], [values[n] for n in names], rtol=5e-5, err_msg=str(step))
    assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)


@pytest.mark.slow("starts the processes of several hosts")
def test_what_the_packing_made_is_reported_and_published_once(undisturbed):
    notes = [event["message"] for event in undisturbed.of("note")]
    assert [note for note in notes if note.startswith("lines: 36 documents in ")]
    with_numbers = [event["step"] for event in undisturbed.of("metrics") if "packing_efficiency" in event["metrics"]]
    assert with_numbers == [1]
    assert metrics([undisturbed])[1]["packing_efficiency"] > 0.9
    final = metrics([undisturbed])[STEPS]
    assert final["epoch/texts"] == pytest.approx(2, abs=0.1)
