"""Lines of a host's log, for the console."""

from __future__ import annotations

import pytest

from cluster.agent import printed
from cluster.agent.printed import Printed
from tests.event_schema import check_event


@pytest.fixture
def shows(tmp_path):
    """Writes to a log, and returns what is then reported: (lines, how many were left out)."""
    told = []
    watched = Printed(told.append)

    def write(text, name="a.log", asked=3, mode="a"):
        path = tmp_path / name
        with path.open(mode, newline="") as log:
            log.write(text)
        told.clear()
        watched.show(str(path), {"shown_lines": asked})
        for event in told:
            check_event({**event, "n": 0}, "host")
        return [(event["lines"], event["left_out"]) for event in told]

    return write


def test_each_complete_line_is_shown_once(shows):
    assert shows("one\ntwo\nthr") == [(["one", "two"], 0)]
    assert shows("ee\n\n") == [(["three"], 0)]
    assert shows("") == []


def test_of_many_lines_the_last_ones_are_shown_and_the_others_counted(shows):
    assert shows("".join(f"{number}\n" for number in range(10))) == [(["7", "8", "9"], 7)]
    assert shows("next\n") == [(["next"], 0)]


def test_a_progress_bar_is_one_line_and_a_long_line_is_cut(shows):
    assert shows("10%\r20%\r30%\r\nx\n") == [(["30%", "x"], 0)]
    assert shows("y" * 1000 + "\n") == [(["y" * printed.MAX_LINE], 0)]


def test_another_log_and_one_that_was_emptied_begin_anew(shows):
    shows("one\ntwo\n")
    assert shows("other\n", name="b.log") == [(["other"], 0)]
    assert shows("now\n", name="b.log", mode="w") == [(["now"], 0)]


def test_of_very_much_at_once_only_the_end_is_read(shows, monkeypatch):
    monkeypatch.setattr(printed, "MAX_BYTES", 8)
    assert shows("a\n" * 100, asked=50) == [(["a"] * 4, 0)]
    assert shows("b\n") == [(["b"], 0)]


def test_nobody_asked_and_no_log(tmp_path):
    (tmp_path / "a.log").write_text("one\n")
    for path, orders in ((str(tmp_path / "a.log"), {}), (None, {"shown_lines": 3}), (str(tmp_path / "b"), {"shown_lines": 3})):
        Printed(pytest.fail).show(path, orders)
