"""Sequences that the devices of several hosts share, and stages and slices of one host: killed, resized from two hosts to one and
back, and replayed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multihost import harness
from tests.multihost.resizing import killed_and_resized, resized
from trainers.config.arguments import TrainingArguments, from_dict

WINGS = ("trainers/parallel", "trainers/models", "trainers/checkpoint")

STEPS = 6
CUT_AT = (3, 5)
MODEL = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16, "context_attention": "ring"}
AXES = {
    "context": ({"mesh": {"data": 1, "context": -1}}, [{"context": 4}, {"context": 2}, {"context": 4}]),
    "pipeline": (
        {"mesh": {"pipeline": 2, "data": -1}, "accumulation_steps": 1, "model": {**MODEL, "num_layers": 2}},
        [{"pipeline": 2, "data": 2}, {"pipeline": 2, "data": 1}, {"pipeline": 2, "data": 2}],
    ),
    "slice": ({"mesh": {"slice": 2, "data": -1}, "accumulation_steps": 1}, [{"data": 2}, {"data": 1}, {"data": 2}]),
}
"""Settings, and what the mesh has on two hosts, on one, and on two again: of each host, one axis has two devices."""


def arguments(tmp_path, **changes):
    """Packed rows, which each host reads whole, and has a part of."""
    texts = tmp_path / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(24):
        words = (str(number * step % 97) for step in range(3 + 2 * number))
        (texts / f"{number:02}.txt").write_text(" ".join(words))
    about = {
        "name": "run",
        "storage": str(tmp_path),
        "global_batch_size": 4,
        "accumulation_steps": 2,
        "max_num_steps": STEPS,
        "publish_every_steps": 1,
        "model": MODEL,
        "data": {"sequence_length": 32, "paths": [str(texts)], "eval_fraction": 0.2, "packing": "concat"},
        "optimizer": {"learning_rate": 0.01, "schedule": {"name": "constant"}},
        "checkpoint": {"save_steps": 2},
        **changes,
    }
    return from_dict(TrainingArguments, about)


@pytest.fixture(scope="module", params=AXES)
def about(request):
    return AXES[request.param]


@pytest.fixture(scope="module")
def killed(about, tmp_path_factory):
    """One host is killed at batch 2."""
    folder = tmp_path_factory.mktemp("killed")
    return killed_and_resized(arguments(folder, **about[0]), folder, CUT_AT)


@pytest.mark.slow("starts the processes of several hosts")
def test_a_run_that_was_killed_and_resized_equals_the_replay_of_its_lineage(about, killed, tmp_path):
    result = harness.result(killed[0])
    settings, meshes = about
    assert [(part["batch_index"], part["num_hosts"]) for part in result["lineage"]] == [(0, 2), (3, 1), (5, 2)]
    for part, sizes in zip(result["lineage"], meshes, strict=True):
        assert {**part["mesh"], **sizes} == part["mesh"]
        assert part["mesh"].get("slice", 1) == settings["mesh"].get("slice", 1)
    again = harness.result(resized(arguments(tmp_path, **settings, checkpoint={}), tmp_path, CUT_AT)[0])
    assert again["params_digest"] == result["params_digest"] == harness.result(killed[1])["params_digest"]
    assert again["samples_digest"] == result["samples_digest"]
    assert again["eval_loss"] == result["eval_loss"]


@pytest.mark.slow("starts the processes of several hosts")
def test_its_losses_and_its_samples_are_those_of_one_device(about, killed, tmp_path):
    one_device = arguments(tmp_path, **{**about[0], "mesh": {}})
    (one,) = harness.run(one_device, tmp_path / "logs", hosts=1, devices_per_host=1)
    expected, found = harness.losses(one), harness.losses(killed[0])
    assert list(found) == [6]
    np.testing.assert_allclose(found[6], expected[6], rtol=1e-5)
    assert harness.result(killed[0])["samples_digest"] == harness.result(one)["samples_digest"]
    assert harness.result(killed[0])["eval_loss"] == pytest.approx(harness.result(one)["eval_loss"], rel=1e-5)
