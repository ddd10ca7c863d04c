"""Texts as programs write them, at each way out of a run: the terminal, the page, JSON, a command, a server, Slack and MLflow.

    make fuzz KIND=texts COUNT=500

Prometheus gets no text of a program: its labels are the run, numbers of hosts and words of ours."""

from __future__ import annotations

import html
import io
import json
import random
import re
import sqlite3
import sys
import urllib.request
from contextlib import closing
from html.parser import HTMLParser

import pytest

from gangway.storage.opening import place_of
from orchestrator.commands import checkpoints
from orchestrator.report.__main__ import write as write_report
from orchestrator.runs import compare, incidents, status
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.mlflow_shipper import MAX_PARAM_LENGTH
from orchestrator.tracking.tracker import Tracker
from tests import fuzz
from tests.programs.processes import PATIENCE_S
from tests.unit.orchestrator.reporting.test_notifier import KEEPS, incident, notifier, server
from tests.unit.orchestrator.test_runs import an_incident, end, start, storage
from trainers.console.text import plain_console, printable

__all__ = ["server", "start", "storage"]

SIGNS = (
    "[",
    "]",
    "/",
    "[bold]",
    "[/x]",
    "[batch, heads]",
    ":smile:",
    "\x1b[2J",
    "\x1b]0;t\a",
    "\0",
    "\udc80",
    "<b>",
    "</script>",
    "<!channel>",
    "&",
    "&amp;",
    "%s",
    "{0}",
    "\\",
    "'",
    '"',
    "\n",
    "\r",
    "\u202e",
    "\U0001f600",
    "a" * 300,
    "a",
)


def odd_texts():
    dice = random.Random(fuzz.seed(1))
    for _ in range(fuzz.count(6)):
        yield "".join(dice.choices(SIGNS, k=dice.randrange(1, 12)))


def test_any_text_is_a_line_of_a_console():
    for text in odd_texts():
        plain_console(file=(out := io.StringIO()), width=1000).print(text)
        assert out.getvalue() == f"{printable(text)}\n"


class Words(HTMLParser):
    """What a browser shows of a page; a tag or a reference that a text has made is missing in it."""

    def __init__(self):
        super().__init__()
        self.found, self.skips = [], 0

    def handle_starttag(self, tag, attrs):
        self.skips += tag in ("script", "style")

    def handle_endtag(self, tag):
        self.skips -= tag in ("script", "style")

    def handle_data(self, data):
        if not self.skips:
            self.found.append(data)


def words_of(path):
    words = Words()
    words.feed(path.read_text(encoding="utf-8"))
    words.close()
    return "".join(words.found)


def shown_of(text):
    """The signs that can be shown. A carriage return ends a line in one place, and has a sign in its place in another."""
    return re.sub("[ \n\xa0\N{MIDDLE DOT}]", "", printable(text))


def test_any_text_of_a_run_is_shown_as_it_is(start, storage, capsys, tmp_path):
    """Nothing of it is taken for markup or for an order to the terminal, and the page is written."""
    for number, text in enumerate(odd_texts()):
        run = storage / f"r{number}"
        launch = start(run.name, text=text)
        launch.record(an_incident(evidence={"summary": text, "log_tail": [text]}))
        assert launch.flush(30.0)
        end(launch, "finished")
        for show in (
            lambda run=run: incidents.main([str(run)]),
            lambda run=run: incidents.main([str(run), "--number", "1"]),
            lambda run=run: status.main([str(run)]),
            lambda run=run: checkpoints.main([str(run)]),
            lambda run=run: compare.main([str(storage / "r0"), str(run)]) if run.name != "r0" else 0,
            lambda run=run: write_report([place_of(str(run))], str(tmp_path / "page.html")) or 0,
        ):
            assert show() in (0, 1)
            told = capsys.readouterr()
            assert all(sign.isprintable() or sign == "\n" for sign in told.out + told.err)
        incidents.main([str(run), "--number", "1"])
        assert shown_of(text) in shown_of(capsys.readouterr().out)
        assert shown_of(text) in shown_of(words_of(tmp_path / "page.html"))
        assert incidents.main([str(run), "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert told["evidence"]["summary"] == text


def test_any_text_arrives_at_a_command_and_a_server(server, tmp_path):
    texts, path = list(odd_texts()), tmp_path / "told"
    for text in texts:
        made = notifier(notes := [], command=(sys.executable, "-S", "-c", KEEPS, str(path)), webhook=server.url)
        made.see(event_of(text))
        made.close(PATIENCE_S)
        assert notes == []
    taken = [json.loads(line.partition(" ")[2]) for line in path.read_text().splitlines()]
    assert taken == server.taken
    assert [each["text"] for each in taken] == [f"mine: {printable(text)}" for text in texts]


def event_of(text):
    event = incident()
    event["incident"]["evidence"]["summary"] = text
    return event


def test_any_text_is_text_for_slack(monkeypatch):
    sent = []
    monkeypatch.setattr(
        urllib.request.OpenerDirector, "open", lambda self, request, timeout: sent.append(request) or io.BytesIO()
    )
    for text in odd_texts():
        made = notifier(notes := [], webhook="https://hooks.slack.com/services/T/B/x")
        made.see(event_of(text))
        made.close(PATIENCE_S)
        told = json.loads(sent.pop().data)["text"]
        assert not re.search(r"[<>]|&(?!amp;|lt;|gt;)", told)  # https://api.slack.com/reference/surfaces/formatting#escaping
        assert html.unescape(told) == f"mine: {printable(text)}"
        assert notes == []


@pytest.mark.slow("ships to a store of MLflow")
def test_any_text_arrives_in_mlflow_and_stops_nothing(tmp_path):
    texts = list(odd_texts())
    tracker = Tracker(str(tmp_path / "a"), TrackingConfig(), "a")
    for number, text in enumerate(texts):
        tracker.set_params({f"param.{number}": text})
        tracker.set_tags({f"tag.{number}": text})
        tracker.log_metrics(number, {f"named {text}": 1.0, "loss": 1.0})
    assert tracker.close(PATIENCE_S) is None
    expected = [(number, stored(text)) for number, text in enumerate(texts)]
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        for kind in ("param", "tag"):
            rows = database.execute(f"select key, value from {kind}s where key like '{kind}.%'").fetchall()
            assert sorted((int(key.partition(".")[2]), value) for key, value in rows) == expected
        steps = database.execute("select step from metrics where key = 'loss' order by step").fetchall()
        assert steps == [(step,) for step in range(len(texts))]


def stored(text):
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()[:MAX_PARAM_LENGTH]
