import threading
from types import SimpleNamespace

import ray

from orchestrator.reporting.board import Board, RemoteBoard


def test_each_reader_gets_every_event_once():
    board = Board()
    board.post({"n": 0})
    board.post({"n": 1})
    cursor, events = board.read(0, timeout_s=0)
    assert (cursor, [e["n"] for e in events]) == (2, [0, 1])
    assert board.read(cursor, timeout_s=0) == (2, [])
    board.post({"n": 2})
    assert board.read(cursor, timeout_s=0) == (3, [{"n": 2}])
    assert len(board.read(0, timeout_s=0)[1]) == 3


def test_take_waits_for_an_event():
    board = Board()
    threading.Timer(0.05, board.post, [{"n": 0}]).start()
    assert board.read(0, timeout_s=30) == (1, [{"n": 0}])


def test_a_slow_reader_loses_the_oldest_events_and_goes_on():
    board = Board(kept_events=3)
    for n in range(10):
        board.post({"n": n})
    cursor, events = board.read(2, timeout_s=0)
    assert (cursor, [e["n"] for e in events]) == (10, [7, 8, 9])


def test_a_cursor_of_an_earlier_life_of_the_board_does_not_wait_for_ever():
    board = Board()
    assert board.read(50, timeout_s=0) == (0, [])
    board.post({"n": 0})
    assert board.read(0, timeout_s=0) == (1, [{"n": 0}])


def test_the_first_reason_to_stop_stays():
    board = Board()
    assert board.stop_requested() is None
    board.request_stop("SIGINT")
    board.request_stop("SIGTERM")
    assert board.stop_requested() == "SIGINT"


def test_the_board_may_be_asked_of_several_threads_at_once(monkeypatch):
    """As at the end, where one thread writes and another looks at how long that may take."""
    asked, answered = [], []

    def wait(calls, timeout):
        assert calls != [None]
        if len(answered) < 3:  # another thread asks meanwhile, and has the answer first
            answered.append(calls)
            assert board.stop_requested() is None
        return calls, []

    actor = SimpleNamespace(stop_requested=SimpleNamespace(remote=lambda: asked.append("asked") or asked[-1]))
    board = RemoteBoard(actor)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda call, timeout: {"asked": None}[call])
    assert board.stop_requested() is None
    assert len(answered) == 3
