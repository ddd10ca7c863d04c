"""Preemption notices, with a real HTTP server in the place of the cloud's."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cluster.agent import preemption


@pytest.fixture
def server():
    """Answers as Google Cloud's metadata server does; `answers` is by the last part of the path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            folder, _, name = self.path.rpartition("/")
            if folder != "/computeMetadata/v1/instance" or self.headers["Metadata-Flavor"] != "Google":
                self.send_error(403)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.answers[name].encode())

        def log_message(self, *arguments): ...

    http = HTTPServer(("127.0.0.1", 0), Handler)
    http.answers = {"preempted": "FALSE", "maintenance-event": "NONE"}
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield http
    http.shutdown()
    http.server_close()


def test_a_preempted_machine_learns_it_from_the_metadata_server(server, monkeypatch):
    monkeypatch.setenv(preemption.METADATA_URL_VARIABLE, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # the server answers for the machine itself: never by a proxy
    [ask] = preemption.sources(None, "gce")
    assert ask() is None
    server.answers["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert ask() is None  # the machine stays
    server.answers["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert ask() == {"reason": "the machine is to be terminated for maintenance", "deadline_s": None}
    server.answers["preempted"] = "TRUE"
    assert ask() == {"reason": "the machine is preempted", "deadline_s": 30.0}


def test_no_metadata_server_is_an_os_error(server):
    port = server.server_port
    with pytest.raises(OSError, match="403"):
        preemption.ask_gce(f"http://127.0.0.1:{port}/elsewhere")
    with pytest.raises(OSError, match="refused"):
        preemption.ask_gce("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ('{"reason": "spot", "deadline_s": 25}', {"reason": "spot", "deadline_s": 25.0}),
        ('{"deadline_s": "soon"}', {"reason": "PATH exists", "deadline_s": None}),
        ("", {"reason": "PATH exists", "deadline_s": None}),
        ("back on Monday\n", {"reason": "back on Monday", "deadline_s": None}),
        ("[1]", {"reason": "PATH exists", "deadline_s": None}),
    ],
)
def test_a_file_is_a_notice_whatever_it_holds(tmp_path, text, notice):
    path = tmp_path / "notice"
    [read] = preemption.sources(str(path), "none")
    assert read() is None
    path.write_text(text)
    assert read() == {name: value.replace("PATH", str(path)) if name == "reason" else value for name, value in notice.items()}


def test_a_source_that_does_not_answer_is_reported_of_once(monkeypatch):
    answers, troubles = [], []

    class Enough(Exception): ...

    def on_answer(answer):
        answers.append(answer)
        if len(answers) == 3:
            raise Enough

    def silent():
        raise OSError("no route to host")

    monkeypatch.setattr(preemption, "INTERVAL_S", 0.01)
    with pytest.raises(Enough):
        preemption.poll_sources([silent, lambda: {"reason": "r", "deadline_s": None}], on_answer, troubles.append)
    assert answers == [{"reason": "r", "deadline_s": None}] * 3
    assert troubles == ["this machine cannot learn whether it is about to be taken away: no route to host"]


def test_a_source_that_answered_again_is_reported_at_the_next_outage(monkeypatch):
    class Enough(Exception): ...

    answers = iter([OSError("first"), OSError("still"), None, OSError("second"), Enough()])
    troubles = []

    def source():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(preemption.time, "sleep", lambda seconds: None)
    with pytest.raises(Enough):
        preemption.poll_sources([source], lambda answer: None, troubles.append)
    assert [trouble.rpartition(": ")[2] for trouble in troubles] == ["first", "second"]


def test_a_source_that_fails_once_does_not_withdraw_its_notice(monkeypatch):
    class Enough(Exception):
        pass

    notice = {"reason": "preempted", "deadline_s": None}
    answers = iter([notice, OSError("busy"), notice, None])
    seen = []

    def source():
        answer = next(answers, Enough())
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(preemption.time, "sleep", lambda seconds: None)
    with pytest.raises(Enough):
        preemption.poll_sources([source], seen.append, lambda trouble: None)
    assert seen == [notice, notice, notice, None]
