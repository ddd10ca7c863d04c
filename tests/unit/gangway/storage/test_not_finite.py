"""Numbers that JSON does not have: null in a document, with a sibling that says what they are."""

from __future__ import annotations

import json
import math

import pytest

from gangway.storage import documents, json_text
from gangway.storage.documents import DocumentKind
from gangway.storage.json_text import dumps, hide_not_finite, show_not_finite
from orchestrator.tracking.spool import Spool, entry
from tests.unit.trainers.recorders.test_recorders import about
from trainers.recorders.jsonl import JsonLines

NAN, INF = math.nan, math.inf
ODD = {"loss": NAN, "best": -INF, "steps": 3, "nested": {"scores": [1.0, INF, [NAN, 2.0]], "runs": [{"loss": NAN}]}}


def strict(text):
    """As a parser of another language reads it."""

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_null_and_a_sibling():
    assert strict(dumps(ODD)) == {
        "loss": None,
        "loss_not_finite": "nan",
        "best": None,
        "best_not_finite": "-inf",
        "steps": 3,
        "nested": {
            "scores": [1.0, None, [None, 2.0]],
            "scores_not_finite": {"1": "inf", "2": {"0": "nan"}},
            "runs": [{"loss": None, "loss_not_finite": "nan"}],
        },
    }


def test_they_come_back():
    back = show_not_finite(strict(dumps(ODD)))
    assert repr(back) == repr(ODD)  # NaN equals nothing


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"a": None},
        {"a": 1, "a_not_finite": "nan"},
        {"a": None, "a_not_finite": "a word"},
        {"a": [None], "a_not_finite": {"5": "nan"}},
        {"a": [1], "a_not_finite": {}},
    ],
)
def test_other_documents_stay_as_they_are(plain):
    assert hide_not_finite(plain) == show_not_finite(plain) == plain


KIND = DocumentKind("x.json", dict[str, float | None], "nothing")


def test_every_way_of_writing_a_document(tmp_path):
    path = tmp_path / "x.json"
    documents.write_json(path, {"loss": NAN})
    assert strict(path.read_text()) == {"loss": None, "loss_not_finite": "nan"}
    assert math.isnan(documents.read_json(path)["loss"])
    KIND.write(path, {"loss": INF})
    assert strict(path.read_text())["loss_not_finite"] == "inf"
    assert KIND.read(path) == {"loss": INF}
    text = json_text.seal({"metrics": {"loss": NAN}})
    assert strict(text)["metrics"] == {"loss": None, "loss_not_finite": "nan"}
    assert math.isnan(json_text.unseal(text)["metrics"]["loss"])


def test_a_digest_that_was_made_with_nan_in_the_text_still_counts():
    document = {"loss": NAN}
    text = json.dumps({**document, "digest": json_text.digest_of(document)})
    assert math.isnan(json_text.unseal(text)["loss"])


def test_a_line_of_metrics_says_it(tmp_path):
    recorder = JsonLines(about(tmp_path))
    recorder.record(1, {"loss": NAN, "lr": 0.1}, {})
    recorder.close()
    line = strict((tmp_path / "metrics.jsonl").read_text())
    assert (line["metrics"], line["not_finite"]) == ({"loss": None, "lr": 0.1}, {"loss": "nan"})


def test_a_course_that_is_left_says_it_too(tmp_path):
    recorder = JsonLines(about(tmp_path))
    for step in (1, 2):
        recorder.record(step, {"loss": NAN}, {})
    recorder.go_back(1)
    recorder.close()
    for path in tmp_path.glob("*.jsonl"):
        assert strict(path.read_text())["metrics"]["loss"] is None
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_lines_of_an_earlier_version_are_for_any_parser_once_they_are_written_again(tmp_path):
    lines = [json.dumps({"t": 1.0, "step": step, "metrics": {"loss": NAN}}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    recorder = JsonLines(about(tmp_path))
    recorder.go_back(1)
    recorder.close()
    found = {path.name: strict(path.read_text())["metrics"] for path in tmp_path.glob("*.jsonl")}
    hide_not_finite = {"loss": None, "loss_not_finite": "nan"}
    assert found == {"metrics.jsonl": hide_not_finite, "metrics.left.jsonl": hide_not_finite}


def test_a_metric_that_is_nan_reaches_the_shipper_as_it_is(tmp_path):
    spool = Spool(str(tmp_path / "metrics.jsonl"))
    spool.append({"t": 1.0, "step": 1, "metrics": {"loss": NAN}})
    spool.close()
    text = (tmp_path / "metrics.jsonl").read_bytes().strip()
    assert strict(text)["metrics"] == {"loss": None, "loss_not_finite": "nan"}
    assert math.isnan(entry(text)["metrics"]["loss"])
