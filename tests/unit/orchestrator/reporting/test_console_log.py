"""`console.log` has the lines of the console; nothing that is wrong with it reaches the run."""

from __future__ import annotations

import time

from orchestrator.reporting.board import Board
from orchestrator.reporting.console import LoggedBoard

RUN = {"ev": "run", "name": "mine", "hosts": 2, "devices": 2, "parameters": 10, "tokens_per_step": 4, "max_steps": 9}


class Log:
    def __init__(self, broken=False):
        self.text, self.waiting, self.broken = "", [], broken
        self.inner = Board()
        self.board = LoggedBoard(self.inner, time.time() - 65, self.append, self.waiting.append)

    def append(self, text):
        if self.broken:
            raise OSError("full")
        self.text += text

    def work(self):
        while self.waiting:
            self.waiting.pop()()


def posted(board):
    return board.read(0, 0.0)[1]


def test_it_has_the_lines_of_what_is_posted_with_their_times():
    log = Log()
    log.board.show(RUN)  # the command has posted it
    log.board.post({"ev": "note", "message": "hello"})
    assert log.text == ""  # no event waits for the storage
    log.work()
    first, *lines = log.text.splitlines()
    assert first.endswith("a launch begins")
    assert lines == [
        "   1:05  mine  2 hosts · 2 devices · 10 parameters · 4 tokens a step · 9 steps",
        "   1:05  hello",
    ]
    assert posted(log.inner) == [{"ev": "note", "message": "hello"}]
    log.board.post({"ev": "note", "message": "the end"})
    log.board.write()  # of a launch that is over
    assert log.text.endswith("the end\n")
    assert len(log.text.splitlines()) == 4


def test_a_log_that_cannot_be_written_or_an_event_that_cannot_be_shown_stops_nothing():
    log = Log(broken=True)
    log.board.post({"ev": "note", "message": "lost"})
    log.work()
    log.board.post({"ev": "metrics"})  # type: ignore[typeddict-item]
    log.broken = False
    log.board.post({"ev": "note", "message": "written"})
    log.work()
    assert "lost" not in log.text
    assert "written" in log.text
    assert len(posted(log.inner)) == 3


def test_requests_go_to_the_board():
    log = Log()
    assert log.board.stop_requested() is None
    log.board.request_stop("interrupted")
    assert log.inner.stop_requested() == log.board.stop_requested() == "interrupted"
    assert log.board.read(0, 0.0) == (0, [])
