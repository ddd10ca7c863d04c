from __future__ import annotations

import json

import pytest

from orchestrator.run_state import replay
from orchestrator.run_state.replay import ReplayError, ReplayPlan, Segment


def stretches(*starts):
    return [{"batch_index": batch, "num_hosts": hosts, "mesh": {}} for batch, hosts in starts]


@pytest.mark.parametrize(
    ("batch_index", "expected"),
    [
        pytest.param(0, Segment(3, 20, (7,)), id="the first stretch ends where the second begins"),
        pytest.param(19, Segment(3, 20, (7,)), id="a run that is resumed within a stretch goes on with it"),
        pytest.param(20, Segment(2, 40, (7,)), id="at a boundary the next stretch has begun"),
        pytest.param(55, Segment(3, None, (7,)), id="the last stretch has no end"),
    ],
)
def test_what_a_generation_is_to_do(batch_index, expected):
    assert replay.parse(stretches((0, 3), (20, 2), (40, 3)), [7]).segment_at(batch_index) == expected


def test_a_summary_is_a_lineage(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"status": "finished", "lineage": stretches((0, 2)), "skipped_batches": [9, 3]}))
    assert replay.read(str(path)) == ReplayPlan(((0, 2),), (3, 9))


@pytest.mark.parametrize(
    "document",
    [{}, {"lineage": []}, {"lineage": stretches((5, 2))}, {"lineage": stretches((0, 2), (30, 3), (20, 2))}, {"lineage": 3}],
)
def test_what_is_no_lineage_is_refused_by_name(tmp_path, document):
    path = tmp_path / "lineage.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ReplayError, match=r"driver.replay: .*lineage.json holds no lineage"):
        replay.read(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ReplayError, match=r"there is no file .*nothing.json; expected a JSON file with `lineage`"):
        replay.read(str(tmp_path / "nothing.json"))
