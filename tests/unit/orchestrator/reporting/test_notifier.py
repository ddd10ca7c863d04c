"""Somebody is told of a run: by a real command and a real server, which fail, hang, and are never waited for by training."""

from __future__ import annotations

import io
import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gangway.config.masking import MASK
from orchestrator.config.job import ConfigError, build, resolved_yaml, shown
from orchestrator.policies.notices import EVENTS, Notices, NotifyConfig
from orchestrator.reporting.notifier import Notifier

SECRET = "T00/B00/xyzzy"
STARTED = {"ev": "generation", "generation": 0, "hosts": 2}
ENDED = {"ev": "summary", "summary": {"status": "finished", "steps": 1200, "train_loss": 1.5}}
KEEPS = "import os, sys; open(sys.argv[1], 'a').write(os.environ['GANGWAY_EVENT'] + ' ' + sys.stdin.read())"


def incident(action="restart"):
    about = {"kind": "process_crash", "action": action, "evidence": {"summary": "host 1: ended by SIGKILL"}}
    return {"ev": "incident", "incident": about}


@pytest.fixture
def server():
    """Refuses the first `refuses` requests; `taken` has the others."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.tries += 1
            if made.tries <= made.refuses:
                self.send_error(503)
                return
            made.taken.append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *about): ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.tries, made.refuses, made.taken = 0, 0, []
    threading.Thread(target=made.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{made.server_port}/services/{SECRET}"
    yield made
    made.shutdown()
    made.server_close()


def notifier(notes, **config):
    return Notifier(NotifyConfig(**config), "mine", "/runs/mine", 0.0, notes.append, delays_s=(0.01, 0.01), wall=lambda: 1000.0)


def test_a_command_and_a_server_get_what_happened(server, tmp_path):
    path = tmp_path / "told"
    made = notifier(notes := [], command=(sys.executable, "-c", KEEPS, str(path)), webhook=server.url)
    for event in (STARTED, {**STARTED, "generation": 1}, incident(), ENDED):
        made.see(event)
    made.close(30.0)
    assert [body["event"] for body in server.taken] == ["started", "incident", "finished"]
    assert server.taken[0]["text"] == "mine started on 2 hosts"
    assert server.taken[1]["incident"]["kind"] == "process_crash"
    assert server.taken[2] == {
        "event": "finished",
        "run": "mine",
        "run_dir": "/runs/mine",
        "text": "mine finished at step 1,200, loss 1.5",
        "status": "finished",
        "steps": 1200,
        "train_loss": 1.5,
        "stop_reason": None,
        "error": None,
        "eval_loss": None,
    }
    lines = [line.partition(" ") for line in path.read_text().splitlines()]
    assert [(event, json.loads(body)) for event, _, body in lines] == [(body["event"], body) for body in server.taken]
    assert notes == []


def test_a_server_that_refuses_is_asked_again_and_then_reported_without_its_url(server):
    server.refuses = 2
    made = notifier(notes := [], webhook=server.url)
    made.see(STARTED)
    made.close(30.0)
    assert (server.tries, len(server.taken), notes) == (3, 1, [])
    server.refuses = 100
    again = notifier(notes, webhook=server.url)
    again.see(STARTED)
    again.close(30.0)
    assert notes == ["notify.webhook did not take the notice 'started': HTTP 503"]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("no-such-program",), "there is no program no-such-program"),
        ((sys.executable, "-c", "import sys; sys.exit('mail: no route')"), "exit status 1: mail: no route"),
    ],
)
def test_a_command_that_fails_is_reported(command, why):
    made = notifier(notes := [], command=command)
    made.see(STARTED)
    made.close(30.0)
    assert notes == [f"notify.command did not take the notice 'started': {why}"]


def test_a_command_that_hangs_holds_up_nobody():
    made = notifier(notes := [], command=(sys.executable, "-c", "import time; time.sleep(600)"))
    made.see(STARTED)
    made.close(0.1)
    assert notes == ["notify: not all notices were sent within 0.1 s"]


def test_slack_gets_its_form(monkeypatch):
    sent = []

    class Answer:
        __enter__ = __exit__ = read = lambda self, *about: self

    def opened(self, request, timeout):
        return sent.append((request.full_url, json.loads(request.data))) or Answer()

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", opened)
    for host in ("hooks.slack.com", "notslack.com"):
        made = notifier([], webhook=f"https://{host}/{SECRET}")
        made.see(STARTED)
        made.close(30.0)
    assert sent[0] == (f"https://hooks.slack.com/{SECRET}", {"text": "mine started on 2 hosts"})
    assert sent[1][1]["event"] == "started"


ODD = ("a\0b", "a\udc80b", "\x1b[2J[bold]", "x" * 200_000, "<!channel> & <https://a|b>")


@pytest.mark.parametrize("text", ODD)
def test_any_text_is_sent(server, tmp_path, text):
    path = tmp_path / "told"
    made = notifier(notes := [], command=(sys.executable, "-c", KEEPS, str(path)), webhook=server.url)
    event = incident()
    event["incident"]["evidence"]["summary"] = text
    made.see(event)
    made.close(30.0)
    assert notes == []
    assert json.loads(path.read_text().partition(" ")[2]) == server.taken[0]
    assert len(server.taken[0]["text"]) < 5000
    assert server.taken[0]["text"].isprintable()


def test_slack_is_told_no_words_of_its_own(monkeypatch):
    sent = []
    monkeypatch.setattr(
        urllib.request.OpenerDirector, "open", lambda self, request, timeout: sent.append(request) or io.BytesIO()
    )
    made = notifier([], webhook="https://hooks.slack.com/services/T/B/x")
    made.see({**incident(), "incident": {**incident()["incident"], "evidence": {"summary": ODD[-1]}}})
    made.close(30.0)
    assert "&lt;!channel&gt; &amp; &lt;https://a|b&gt;" in json.loads(sent[0].data)["text"]


def test_a_redirect_is_no_arrival(server, monkeypatch):
    def moved(handler):
        handler.send_response(301)
        handler.send_header("Location", f"http://127.0.0.1:{server.server_port}/elsewhere")
        handler.end_headers()

    monkeypatch.setattr(server.RequestHandlerClass, "do_POST", moved)
    monkeypatch.setattr(server.RequestHandlerClass, "do_GET", lambda handler: handler.send_error(200), raising=False)
    made = notifier(notes := [], webhook=server.url)
    made.see(STARTED)
    made.close(30.0)
    assert notes == ["notify.webhook did not take the notice 'started': HTTP 301"]


def test_nobody_is_reported_by_default_and_no_thread_starts():
    made = notifier([])
    made.see(STARTED)
    assert made._thread is None
    made.close(0.0)


def test_an_odd_event_is_noted():
    made = notifier(notes := [], webhook="http://127.0.0.1:9/")
    made.see({"ev": "generation"})
    assert notes == ["notify: no notice was made of an event (KeyError('generation'))"]


def test_of_incidents_in_a_row_the_first_is_reported_and_then_how_many_there_were():
    notices = Notices(NotifyConfig(), "mine")
    told = [notices.of(incident(), now_s, 0.0) for now_s in (0.0, 10.0, 20.0, 61.0)]
    assert [notice and notice.text for notice in told] == [
        "mine: host 1: ended by SIGKILL",
        None,
        None,
        "mine: host 1: ended by SIGKILL (and 2 more in the last minutes)",
    ]
    assert notices.of(incident("give up"), 200.0, 0.0) is None


def test_a_run_that_gave_up_is_reported_with_its_error():
    failed = {"ev": "summary", "summary": {"status": "failed", "steps": 7, "error": "host 1: out of memory"}}
    notice = Notices(NotifyConfig(), "mine").of(failed, 0.0, 0.0)
    assert (notice.event, notice.text) == ("gave_up", "mine failed at step 7: host 1: out of memory")


def test_goodput_below_the_limit_is_reported_once_until_it_was_better():
    notices = Notices(NotifyConfig(goodput_below=0.8, command=("x",)), "mine")

    def told(goodput, since_s=1000.0):
        notice = notices.of({"ev": "metrics", "step": 10, "metrics": {}, "goodput": goodput}, 0.0, since_s)
        return notice and notice.text

    assert told(0.1, since_s=599.0) is None
    assert told(0.7) == "mine: goodput is 70% at step 10, below 80%"
    assert [told(0.6), told(0.82), told(0.79)] == [None, None, None]
    assert told(0.9) is None
    assert told(0.5) == "mine: goodput is 50% at step 10, below 80%"


@pytest.mark.parametrize("event", EVENTS)
def test_only_the_events_that_are_wanted_are_reported(event):
    notices = Notices(NotifyConfig(events=(event,), goodput_below=0.8, command=("x",)), "mine")
    failed = {"ev": "summary", "summary": {"status": "failed", "steps": 7, "error": "x"}}
    low = {"ev": "metrics", "step": 10, "metrics": {}, "goodput": 0.1}
    told = [notices.of(one, 0.0, 1000.0) for one in (STARTED, incident(), low, ENDED, failed)]
    assert [notice.event for notice in told if notice] == [event]


def job(**notify):
    return build({"name": "x", "max_num_steps": 8, "notify": notify})


def test_the_webhook_is_in_nothing_that_is_shown_or_stored():
    made = job(webhook=f"https://hooks.slack.com/services/{SECRET}")
    assert made.notify.webhook.endswith(SECRET)
    assert shown(made)["notify"]["webhook"] == f"https://hooks.slack.com/{MASK}"
    assert SECRET not in resolved_yaml(made) + repr(made)
    with pytest.raises(ConfigError, match=r"notify.webhook"):
        build(shown(made))  # it has to be given again


@pytest.mark.parametrize(
    ("notify", "message"),
    [
        ({"events": ["finnished"]}, "expected some of started, incident, gave_up, finished, goodput; did you mean finished?"),
        ({"goodput_below": 80, "command": ["x"]}, "goodput_below = 80.0: expected a share between 0 and 1, such as 0.8"),
        ({"goodput_below": 0.8}, "nobody is notified of it; give notify.command or notify.webhook"),
        ({"webhook": "slack"}, "expected a URL such as https://hooks.slack.com/services/..."),
    ],
)
def test_a_wrong_section_is_refused(notify, message):
    with pytest.raises(ConfigError) as refused:
        job(**notify)
    assert message in str(refused.value)
