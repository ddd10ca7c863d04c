"""Grafana's dashboard, docs/grafana/gangway.json: its queries name only what is exported, and each panel says what it shows."""

from __future__ import annotations

import json
import re

import pytest

from orchestrator.tracking.prometheus import METRICS, OF_GOOGLE
from tests import ROOT

BOARD = json.loads((ROOT / "docs" / "grafana" / "gangway.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [query for panel in PANELS for query in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
OF_RAY = {"SessionName"}
OURS = {f"ray_{m.name}": {"workload_id" if m in OF_GOOGLE else "run", *m.labels, *OF_RAY} for m in METRICS}
WORDS = {"by", "max", "sum", "delta", "sort_desc"}
"""Of the language of the queries."""


@pytest.fixture(scope="module")
def exported():
    """The labels of each metric that a query may name: ours, and those that Ray's agent measures of its node."""
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    return OURS | {f"ray_{name}": {"ip", *OF_RAY} for name in METRICS_GAUGES if name.startswith("node_")}


def names_in(expression):
    """The metrics of a query, the labels that it compares, and those by which it groups."""
    metrics = re.findall(r"(\w+)\{", expression)
    compared = set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression))
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
    return metrics, compared, grouped


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query["expr"])
def test_a_query_names_only_metrics_and_labels_that_are_exported(query, exported):
    metrics, compared, grouped = names_in(query["expr"])
    assert metrics
    for metric in metrics:
        assert compared | grouped <= exported[metric], metric
    assert set(re.findall(r"\{\{(\w+)\}\}", query["legendFormat"])) <= grouped
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|by \([^)]*\)", "", query["expr"])
    assert set(re.findall(r"[A-Za-z_]+", bare)) <= WORDS | set(metrics)


def test_every_query_is_of_the_chosen_run_and_session():
    for query in QUERIES:
        for selector in re.findall(r"\{([^}]*)\}", query["expr"]):
            assert 'SessionName=~"$session"' in selector
        assert '=~"$run"' in query["expr"] or "ray_node_" in query["expr"]
    assert set(re.findall(r"\$(\w+)", " ".join(query["expr"] for query in QUERIES))) == {"run", "session", "window"}
    assert set(VARIABLES) == {"source", "session", "run", "window"}
    for name in ("session", "run"):
        metric = re.search(r"ray_\w+", VARIABLES[name]["query"]).group()
        assert metric in OURS


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_has_a_title_a_unit_and_says_what_it_shows(panel):
    assert panel["title"]
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}


def test_every_metric_of_ours_is_drawn_somewhere():
    drawn = {metric for query in QUERIES for metric in names_in(query["expr"])[0]}
    told_by_others = {"ray_gangway_tokens", "ray_gangway_generations_total"}
    of_google = {f"ray_{metric.name}" for metric in OF_GOOGLE} - {"ray_workload_badput_time", "ray_workload_disruptions"}
    assert drawn >= set(OURS) - told_by_others - of_google


def test_panels_do_not_cover_each_other_and_have_ids_of_their_own():
    squares = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not own & squares
        squares |= own
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
