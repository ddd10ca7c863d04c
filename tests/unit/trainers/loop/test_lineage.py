"""What made a state: stretches of batches by topology, and the batches left out."""

from __future__ import annotations

import json

import pytest

from gangway.errors import UsageError
from gangway.storage import json_text
from trainers.loop.lineage import SKIPPED_FILE, Lineage, read_skipped, write_skipped

THREE = {"num_hosts": 3, "num_devices": 3, "mesh": {"data": 3, "fsdp": 1, "tensor": 1}}
TWO = {"num_hosts": 2, "num_devices": 2, "mesh": {"data": 2, "fsdp": 1, "tensor": 1}}


def at(batch_index, topology):
    return {"batch_index": batch_index, **topology}


def went_on(*starts):
    """The stretches after starting at each (batch index, topology), each from a checkpoint of the one before."""
    meta = None
    for batch_index, topology in starts:
        lineage = Lineage()
        lineage.start(batch_index, topology, meta)
        meta = json.loads(json.dumps(lineage.meta(batch_index)))
    return meta["lineage"]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, TWO)], [at(0, TWO)]),
        ([(0, TWO), (20, TWO)], [at(0, TWO)]),
        ([(0, THREE), (20, TWO), (40, THREE)], [at(0, THREE), at(20, TWO), at(40, THREE)]),
        ([(0, THREE), (20, TWO), (20, THREE)], [at(0, THREE)]),  # nothing was trained on two
        ([(0, THREE), (0, TWO)], [at(0, TWO)]),
        ([(7, TWO)], [at(7, TWO)]),
    ],
)
def test_a_stretch_for_each_change_of_topology(starts, expected):
    assert went_on(*starts) == expected


def test_a_checkpoint_tells_of_the_batches_skipped_before_it_only():
    lineage = Lineage(skipped={3, 30})
    lineage.start(0, TWO)
    assert lineage.meta(20)["skipped_batches"] == [3]
    assert lineage.meta(30)["skipped_batches"] == [3]
    assert lineage.meta(31)["skipped_batches"] == [3, 30]


def test_what_the_checkpoint_skipped_stays_skipped():
    lineage = Lineage(skipped={30})
    lineage.start(20, TWO, {"lineage": [at(0, TWO)], "skipped_batches": [3]})
    assert lineage.skipped == {3, 30}


def test_a_checkpoint_that_was_trained_on_a_batch_skipped_since_is_refused():
    lineage = Lineage(skipped={17, 18, 30})
    assert lineage.refuse({"batch_index": 17, "skipped_batches": []}) == ""
    assert lineage.refuse({"batch_index": 20, "skipped_batches": [17, 18]}) == ""
    assert lineage.refuse({"batch_index": 20, "skipped_batches": [4, 17, 18]}) == ""
    why = lineage.refuse({"batch_index": 20, "skipped_batches": [17]})
    assert why == "it belongs to an abandoned trajectory: it was trained on batches that are skipped now (18)"


def test_the_file_of_skipped_batches(tmp_path):
    run = tmp_path / "run"
    assert read_skipped(str(run)) == []
    write_skipped(str(run), {18, 17})
    write_skipped(str(run), {18, 17, 30})
    assert read_skipped(str(run)) == [17, 18, 30]
    assert [path.name for path in run.iterdir()] == [SKIPPED_FILE]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"skipped_batches": ["x"]}'])
def test_a_file_that_makes_no_sense_is_set_aside_and_reported(tmp_path, text, events):
    (tmp_path / SKIPPED_FILE).write_text(text)
    assert read_skipped(str(tmp_path)) == []
    assert (tmp_path / f"{SKIPPED_FILE}.damaged").read_text() == text
    assert "skipped_batches.json: damaged: " in events[0]["message"]
    assert "batches that rollbacks have left out since the newest checkpoint are trained on again" in events[0]["message"]


def test_one_of_a_newer_program_is_refused(tmp_path):
    (tmp_path / SKIPPED_FILE).write_text(json_text.seal({"format": 2, "batches": [17]}))
    with pytest.raises(UsageError, match=r"skipped_batches.json was written by a newer gangway: it has format 2"):
        read_skipped(str(tmp_path))
