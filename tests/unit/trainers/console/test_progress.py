"""The progress of a command over many records."""

from __future__ import annotations

import io

from trainers.console.progress import plain_lines, progress_on


def test_progress_without_a_terminal_is_a_line_now_and_then():
    stream, times = io.StringIO(), iter([0.0, 1.0, 2.0, 7.0, 8.0])
    progress = plain_lines(stream, "web", 40, "tokens", lambda: next(times))
    for done in (10, 20, 30, 40):
        progress(done, done * 8, 10)
    assert stream.getvalue().splitlines() == [
        "web: 10 of 40 records (10 of them from before), 80 tokens/s",
        "web: 30 of 40 records (10 of them from before), 34 tokens/s",
        "web: 40 of 40 records (10 of them from before), 40 tokens/s",
    ]


def test_progress_on_a_terminal_is_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with progress_on(stream, "web", 40, "tokens") as progress:
        progress(20, 100, 0)
    assert "20/40" in stream.getvalue()
