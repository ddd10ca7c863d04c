import io
import re
import threading

import pytest
from rich.console import Console as Screen

from gangway import published
from orchestrator.reporting.board import Board
from orchestrator.reporting.console import job_lines_of, make_console, watch
from orchestrator.reporting.text import recovery, summary_page, waiting
from tests import ROOT
from tests.event_schema import check_event
from trainers.console.screens import PlainConsole, TerminalConsole
from trainers.console.text import clock_time, count, printable, seconds, sentence

INCIDENT = {
    "kind": "process_crash",
    "host": 1,
    "generation": 0,
    "step": 120,
    "failed_at_s": 0.0,
    "evidence": {"summary": "host 1: training process ended by SIGKILL at step 120"},
    "action": "restart",
    "recovery_s": {"detect": 0.02, "decide": 0.0004, "first_step": 0.4},
    "resumed_step": None,
    "total_s": 0.4204,
    "replayed_steps": 20,
    "step_s": 0.27,
}
SUMMARY = {
    "name": "tiny",
    "status": "finished",
    "stop_reason": "max_steps",
    "steps": 300,
    "tokens": 1_228_800,
    "train_loss": 2.0123,
    "eval_loss": 2.0511,
    "generations": 2,
    "incidents": [INCIDENT | {"resumed_step": 100}],
    "goodput": {"start": 3.0, "step": 81.0, "compile": 16.0, "idle": 0.0, "finish": 4.0},
    "wall_s": 100.0,
    "prompt": "def ",
    "sample": "main():\n\treturn \x1b[31m1",
    "storage": "/runs/tiny",
    "checkpoints": "/runs/tiny/checkpoints",
    "mlflow": {"uri": "sqlite:////runs/mlflow.db", "command": "mlflow ui --backend-store-uri sqlite:////runs/mlflow.db"},
}


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


RUN = {
    "ev": "run",
    "name": "tiny",
    "hosts": 1,
    "devices": None,
    "parameters": None,
    "tokens_per_step": None,
    "max_steps": None,
}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain(clock):
    """A plain console, and a function that shows events and returns what they printed."""
    stream = io.StringIO()
    console = PlainConsole(stream, clock, None, job_lines_of, summary_page)

    def show(*events, known=True):
        start = stream.tell()
        for event in events:
            if known:
                check_event(event, "console")
            console.show(event)
        return stream.getvalue()[start:]

    return show


def metrics(step, **values):
    kind = "eval" if any(name.startswith("eval_") for name in values) else "train"
    return {"ev": "metrics", "step": step, "metrics": values, "kind": kind}


def test_plain_header_and_start_are_reported_once(plain, clock):
    header = {
        "ev": "run",
        "name": "tiny",
        "hosts": 2,
        "devices": 1,
        "parameters": 101_234,
        "tokens_per_step": 4096,
        "max_steps": 300,
    }
    assert plain(header) == "   0:00  tiny  2 hosts · 1 device · 101 k parameters · 4,096 tokens a step · 300 steps\n"
    clock.now_s += 65
    statuses = [{"ev": "status", "state": s} for s in ("reserving", "importing", "joining", "compiling", "training", "compiling")]
    assert plain(*statuses, header) == "   1:05  reserving machines\n   1:05  starting processes\n   1:05  compiling\n"
    assert plain({"ev": "generation", "generation": 0, "hosts": 1}) == "   1:05  gang of 1 host is ready\n"
    assert plain({"ev": "generation", "generation": 1, "hosts": 1}) == ""
    assert plain({"ev": "status", "state": "saving", "message": "stopping (SIGINT)\nmore"}) == "   1:05  stopping (SIGINT)\n"


def test_plain_metrics_come_now_and_then_and_at_the_end(plain, clock):
    plain({**RUN, "max_steps": 300})
    clock.now_s += 1
    line = plain(metrics(10, loss=3.0, tokens_per_s=41_234.0, step_time_s=0.1))
    assert line == "   0:01  step 10/300  loss 3.0000  41.2 k tokens/s  0:29 left  1 host\n"
    assert plain(metrics(20, loss=2.9), {"ev": "checkpoint", "step": 20, "path": "x"}) == ""
    assert plain(metrics(20, eval_loss=2.5, eval_accuracy=0.4)) == "   0:01  ◆ step 20  held-out loss 2.5000  accuracy 0.4000\n"
    clock.now_s += 5
    assert plain(metrics(30, loss=2.8)) == "   0:06  step 30/300  loss 2.8000  41.2 k tokens/s  0:27 left  1 host  saved 20\n"
    assert plain(metrics(300, loss=2.0)) == "   0:06  step 300/300  loss 2.0000  41.2 k tokens/s  1 host  saved 20\n"


def test_a_users_own_metrics_and_those_of_every_unit_are_shown(plain, clock):
    shown = plain(metrics(10, loss=3.0, margin=0.25, tiny=1e-7, epoch=0.5, mfu=0.4, **{"loss/web": 1.0}))
    assert "step 10  loss 3.0000  MFU 40%  margin 0.2500  tiny 1e-07" in shown
    far = {"far_loss": 4.0, "far_error": 0.5, "far_seconds": 3.0}
    shown = plain(metrics(10, **far, eval_margin=0.75, eval_loss=2.5, score=2.5, eval_samples_per_s=3.0))
    assert shown.endswith("step 10  held-out loss 2.5000  margin 0.7500  far_loss 4.0000  far_error 0.5000  score 2.5000\n")
    clock.now_s += 10
    assert "margin 0.1250" in plain(metrics(20, loss=3.0, margin=0.125))
    clock.now_s += 10
    assert "margin" not in plain(metrics(30, loss=3.0))  # a hook that gives it no longer


def test_the_live_view_has_a_line_of_a_users_own_metrics(clock):
    terminal = TerminalConsole(Screen(file=io.StringIO(), force_terminal=True, width=80, color_system=None), clock)
    terminal.show({"ev": "status", "state": "training"})
    terminal.show(metrics(10, loss=3.0, margin=0.25))
    live = Screen(file=io.StringIO(), width=80)
    live.print(terminal._lines())
    terminal.close()
    assert [line.strip() for line in live.file.getvalue().splitlines()][1] == "margin 0.2500"


def test_what_the_system_publishes_is_not_taken_for_a_users():
    documented = re.findall(r"^\| ((?:`[a-z_0-9]+`(?:, )?)+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    names = [name for cell in documented for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) > 25
    assert published.own(dict.fromkeys(names, 0.0)).keys() <= {name for name in names if name.startswith("eval_")}


def test_a_checkpoint_that_somebody_has_deleted_is_no_longer_shown_as_saved(plain, clock):
    plain({**RUN, "max_steps": 300}, metrics(10, loss=3.0), {"ev": "checkpoint", "step": 20, "path": "x"})
    clock.now_s += 6
    assert "saved 20" in plain(metrics(30, loss=2.8))
    clock.now_s += 6
    assert "saved" not in plain({"ev": "checkpoint_gone", "step": 20}, metrics(40, loss=2.7))


def test_the_times_count_from_when_the_command_began(clock):
    stream = io.StringIO()
    console = make_console(stream, clock.now_s - 12, clock)
    console.show({"ev": "status", "state": "checking"})
    assert stream.getvalue() == "   0:12  checking the model and the data, while Ray starts\n"


def test_previews_are_a_line_each_whatever_the_model_wrote(plain):
    shown = [{"prompt": "def ", "text": "f(x):\n\treturn \x1b[31m1"}, {"prompt": "a", "text": "b" * 200}]
    assert plain({"ev": "preview", "step": 20, "previews": shown}) == (
        "   0:00  ◇ step 20  def f(x):↵  return ·[31m1\n" + "   0:00  ◇ step 20  a" + "b" * 70 + "…\n"
    )


def test_plain_without_an_end_or_a_rate(plain):
    assert plain(metrics(7, loss=3.0)) == "   0:00  step 7  loss 3.0000\n"


def test_plain_incident_and_recovery(plain):
    assert plain({"ev": "incident", "incident": INCIDENT}) == (
        "   0:00  ✗ host 1: training process ended by SIGKILL at step 120 → restarting\n"
    )
    assert plain({"ev": "recovered", "incident": INCIDENT | {"resumed_step": 100}}) == (
        "   0:00  ✓ training again at step 100 after 0.42 s; 20 steps, 5.40 s again  detect 0.02 · first step 0.40\u00a0s\n"
    )
    for steps, words in ((120, "0 steps again"), (100, "20 steps, 5.40 s again")):
        again = INCIDENT | {"resumed_step": steps, "replayed_steps": 120 - steps, "source": "memory"}
        assert f" after 0.42 s; {words}, from memory  detect" in plain({"ev": "recovered", "incident": again})
    avoided = {
        "action": "shrink",
        "hosts_after": 2,
        "detail": "slot 1 is avoided: it has failed 4 times in 3600 s",
        "evidence": {},
    }
    assert plain({"ev": "incident", "incident": INCIDENT | avoided}) == (
        "   0:00  ✗ process_crash → going on with 2 hosts; slot 1 is avoided: it has failed 4 times in 3600 s\n"
    )
    given_up = plain({"ev": "incident", "incident": INCIDENT | {"action": "give up", "detail": "4 failures", "evidence": {}}})
    assert given_up == "   0:00  ✗ process_crash → give up: 4 failures\n"


def test_plain_notes(plain):
    assert plain({"ev": "note", "message": "hello"}) == "   0:00  hello\n"
    assert plain({"ev": "note", "message": "careful", "level": "warning"}) == "   0:00  ! careful\n"
    shown = plain({"ev": "printed", "host": 3, "lines": ["a\x1b[2Jb", "c"], "left_out": 2})
    assert shown == "   0:00  host 3  (2 lines left out; logs/ has all)\n   0:00  host 3  a·[2Jb\n   0:00  host 3  c\n"
    assert plain({"ev": "something new", "x": 1}, known=False) == ""


def test_text_from_programs_cannot_drive_the_terminal_or_be_taken_for_markup(plain):
    assert plain({"ev": "note", "message": "[bold]x[/bold] \x1b[2J\x07"}) == "   0:00  [bold]x[/bold] ·[2J·\n"


def page(summary, width=110):
    stream = io.StringIO()
    summary_page(Screen(file=stream, width=width, color_system=None, highlight=False), summary)
    return stream.getvalue()


def test_summary_says_what_happened_where_the_time_went_and_where_things_are():
    lines = [line.rstrip() for line in page(SUMMARY).splitlines()]
    assert lines == [
        "",
        "  ✓ tiny finished  300 steps, 1.23 M tokens in 1 min 40 s",
        "",
        "  loss         training 2.0123  held-out 2.0511",
        "  restarts     1",
        "",
        "  Incidents",
        "    ✓  process crash  host 1  step 120  0.42 s; 20 steps, 5.40 s again  detect 0.02 · first step 0.40\u00a0s",
        "",
        "  Where the time went: goodput 81.0 %",
        "    starting the command      3.00 s   3.0 %  ▉",
        "    compiling                 16.0 s  16.0 %  ████▊",
        "    training steps        1 min 21 s  81.0 %  ████████████████████████▎",
        "    after the last step       4.00 s",
        "",
        "  The model, now",
        "    │ def main():",
        "    │     return ·[31m1",
        "",
        "  summary      /runs/tiny/summary.json",
        "  checkpoints  /runs/tiny/checkpoints",
        "  metrics      mlflow ui --backend-store-uri sqlite:////runs/mlflow.db",
        "",
    ]


@pytest.mark.parametrize(
    ("reason", "headline"),
    [
        ("early_stopped", "✓ tiny finished (early, by evaluation.score)  300"),
        ("end_of_data", "✓ tiny finished (the data has ended)  300"),
        ("max_data_epochs", "✓ tiny finished (max_num_data_epochs)  300"),
    ],
)
def test_summary_says_what_ended_a_run_before_its_last_step(reason, headline):
    assert headline in page({**SUMMARY, "stop_reason": reason})


def test_summary_has_a_users_own_metrics_and_all_of_the_evaluations():
    measured = {"train_metrics": {"margin": 0.25}, "evaluation": {"eval_loss": 2.0511, "eval_margin": 0.5, "far_loss": 4.0}}
    lines = [line.rstrip() for line in page({**SUMMARY, **measured}).splitlines()]
    assert lines[3:6] == [
        "  loss         training 2.0123  held-out 2.0511",
        "  training     margin 0.2500",
        "  held-out     margin 0.5000  far_loss 4.0000",
    ]


def test_examples_that_are_one_thing_each_are_not_called_tokens():
    assert "300 steps, 1.23 M examples in" in page({**SUMMARY, "samples": SUMMARY["tokens"]})
    assert "300 steps, 1.23 M tokens in" in page({**SUMMARY, "samples": 100})
    assert published.counted(None, 3.0) == (3.0, "examples")
    assert published.counted(None, None) is None


def test_the_end_has_where_the_output_of_the_hosts_is():
    assert "  printed      /runs/tiny/logs\n" in page({**SUMMARY, "logs": "/runs/tiny/logs"})


def test_the_metrics_of_a_task_are_its_accuracy_and_its_own_whatever_their_names():
    own = {"rewards/margin": 1.0, "mean_error": 2.0, "packing_speed": 3.0}
    of_system = {
        "loss": 1.0,
        "loss/web": 1.0,
        "grad_norm/out": 1.0,
        "mean_accuracy": 0.4,
        "packing_efficiency": 1.0,
        "lost_tokens": 0.0,
    }
    assert published.own({**of_system, "accuracy": 0.5, **own}) == own
    assert published.of_task({**of_system, "accuracy": 0.5, **own}) == {"accuracy": 0.5, **own}


def test_summary_does_not_cut_what_is_there_to_be_copied():
    assert "  metrics      mlflow ui --backend-store-uri sqlite:////runs/mlflow.db\n" in page(SUMMARY, width=30)


def test_summary_of_a_run_that_failed_early():
    failed = {
        "name": "tiny",
        "status": "failed",
        "steps": 0,
        "incidents": [INCIDENT | {"action": "give up", "detail": "the same user_error twice", "host": None, "step": None}],
        "goodput": {},
        "wall_s": 0.0,
        "tokens": None,
        "train_loss": None,
        "sample": None,
    }
    text = page(failed)
    assert "  ✗ tiny failed  0 steps\n" in text
    assert "✗  process crash" in text
    assert "give up: the same user_error twice" in text
    assert "Where the time went" not in text


def test_summary_of_a_run_that_was_stopped_and_of_many_incidents():
    text = page(SUMMARY | {"status": "stopped", "stop_reason": "interrupted", "incidents": [INCIDENT] * 40})
    assert "  ■ tiny stopped (interrupted)  300 steps" in text
    assert text.count("process crash") == 12
    assert "    and 28 before these: all are in incidents.jsonl" in text


def test_terminal_shows_the_same_story_around_a_live_line(clock):
    stream = io.StringIO()
    console = TerminalConsole(
        Screen(file=stream, force_terminal=True, width=120, color_system=None), clock, None, job_lines_of, summary_page
    )
    events = [
        {**RUN, "hosts": 2, "max_steps": 300},
        {"ev": "status", "state": "reserving"},
        {"ev": "status", "state": "training"},
        metrics(10, loss=3.0, tokens_per_s=41_234.0, step_time_s=0.1),
        {"ev": "incident", "incident": INCIDENT},
        {"ev": "recovered", "incident": INCIDENT | {"resumed_step": 0}},
    ]
    for event in events:
        console.show(event)
    live = Screen(file=io.StringIO(), width=120)
    live.print(console._lines())
    above, below = live.file.getvalue().splitlines()
    assert above.endswith("step 0/300  loss 3.0000  41.2 k tokens/s")
    assert below.strip() == "training  0:30 left  2 hosts  1 incident"
    console.show({"ev": "summary", "summary": SUMMARY})
    console.close()
    shown = stream.getvalue()
    for part in ("tiny  2 hosts", "reserving machines", "✗ host 1: training", "✓ training again at step 0", "✓ tiny finished"):
        assert part in shown
    assert shown.endswith("\n")


FULL = {
    "loss": 12.3456,
    "learning_rate": 3e-4,
    "tokens_per_s": 1_234_567.0,
    "samples_per_s": 3210.0,
    "mfu": 0.412,
    "step_time_s": 0.5,
}


@pytest.mark.parametrize(("unit", "rate"), [("tokens", "1.23 M tokens/s"), ("examples", "3,210 examples/s")])
def test_the_live_view_fits_into_80_columns_and_a_log_says_the_same(plain, clock, unit, rate):
    terminal = TerminalConsole(
        Screen(file=io.StringIO(), force_terminal=True, width=80, color_system=None), clock, None, job_lines_of, summary_page
    )
    incident = {"ev": "incident", "incident": INCIDENT}
    events = [
        {**RUN, "hosts": 256, "max_steps": 10_000, "tokens_per_step": 4096, "unit": unit},
        {"ev": "status", "state": "training"},
        {"ev": "checkpoint", "step": 9_000, "path": "x"},
        incident,
        {"ev": "incident", "incident": INCIDENT | {"kind": "preemption"}},  # planned: no incident for a user
        metrics(9_120, **FULL) | {"goodput": 0.873},
    ]
    for event in events:
        check_event(event, "console")
        terminal.show(event)
    live = Screen(file=io.StringIO(), width=80)
    live.print(terminal._lines())
    terminal.close()
    above, below = live.file.getvalue().splitlines()
    for part in ("step 9120/10000", "loss 12.3456", "lr 3.0e-04", rate, "MFU 41%"):
        assert part in above, above
    run = ("7:20 left", "256 hosts", "saved 9000", "1 incident", "goodput 87%")
    for part in ("training", *run):
        assert part in below, below
    shown = plain(*events)
    for part in (f"4,096 {unit} a step", rate, "MFU 41%", *run):
        assert part in shown, part


def test_the_hosts_of_the_live_view_are_those_of_the_generation(plain, clock):
    line = plain({**RUN, "hosts": 4}, {"ev": "generation", "generation": 1, "hosts": 3}, metrics(1, loss=1.0))
    assert line.endswith("loss 1.0000  3 hosts\n")


def test_a_log_gets_no_control_sequences():
    stream = io.StringIO()
    console = make_console(stream)
    console.show({"ev": "summary", "summary": SUMMARY})
    console.close()
    assert "\x1b" not in stream.getvalue()


def test_a_stream_that_cannot_show_the_signs_gets_others():
    raw = io.BytesIO()
    console = make_console(io.TextIOWrapper(raw, encoding="ascii"))
    console.show({"ev": "incident", "incident": INCIDENT})
    console.show({"ev": "summary", "summary": SUMMARY})
    console.close()
    assert b"? host 1: training process ended by SIGKILL" in raw.getvalue()


class Recorder:
    def __init__(self):
        self.events, self.closed = [], False

    def show(self, event):
        self.events.append(event["n"])

    def close(self):
        self.closed = True


def test_watch_shows_everything_that_was_posted_before_the_end():
    board, recorder, over = Board(), Recorder(), threading.Event()

    def drive():
        for n in range(100):
            board.post({"ev": "x", "n": n})
        over.set()

    threading.Timer(0.05, drive).start()
    watch(board, recorder, over.is_set)
    assert recorder.events == list(range(100))
    assert recorder.closed


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (1234.4, "1,234"),
        (41_234, "41.2 k"),
        (101_234, "101 k"),
        (3_212_000, "3.21 M"),
        (12.3e9, "12.3 G"),
        (999_600, "1.00 M"),
        (999.7e6, "1.00 G"),
        (9_996_000, "10.0 M"),
        (99_960, "100 k"),
    ],
)
def test_count(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.426, "0.43 s"), (9.999, "10.0 s"), (59.97, "1 min 00 s"), (103, "1 min 43 s"), (7500, "2 h 05 min")],
)
def test_seconds(duration_s, text):
    assert seconds(duration_s) == text


def test_small_texts():
    assert [clock_time(s) for s in (-1, 7.9, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]
    assert recovery({"detect": 0.0, "first_step": 0.25}) == "first step 0.25\u00a0s"
    assert recovery({}) == ""
    assert sentence("\n first \nsecond") == "first"
    assert sentence("") == ""
    assert printable("a\tb\x00") == "a   b·"
    assert printable("0.25\u00a0s, 日本\u3000語") == "0.25\u00a0s, 日本\u3000語", "spaces control no terminal"


def test_while_the_next_try_is_waited_for_the_user_reads_why_and_until_when():
    what = "host 1: ConnectionError: the data server does not answer\nTraceback ..."
    assert waiting(4.0, 1630.0, what) == (
        "trying again in 4.00 s, for 27 min 10 s at most: host 1: ConnectionError: the data server does not answer"
    )
    assert waiting(60.0, None, "host 0: crashed") == "trying again in 1 min 00 s: host 0: crashed"


def test_plain_progress_of_a_long_evaluation_comes_now_and_then(plain, clock):
    def at(done, total=40):
        return {"ev": "evaluating", "unit": "eval", "done": done, "total": total}

    clock.now_s += 1
    assert plain(at(12), at(13)) == "   0:01  evaluating eval 12/40 batches\n"
    clock.now_s += 60
    assert plain(at(30, None)) == "   1:01  evaluating eval 30 batches\n"


class Closes(io.StringIO):
    """A terminal, or a log, that can be written to until it `is_closed`."""

    is_closed = False

    def __init__(self, *, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        if self.is_closed:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_can_no_longer_be_shown_is_in_the_log_of_the_run_with_the_page_at_the_end(tmp_path, monkeypatch, is_terminal):
    monkeypatch.setenv("TERM", "xterm")
    stream, log = Closes(is_terminal=is_terminal), tmp_path / "console.log"
    console = make_console(stream, clock=Clock(), log=str(log))
    console.show(RUN)
    console.show({"ev": "note", "message": "the first note"})
    assert not log.exists()
    stream.is_closed = True
    console.show({"ev": "note", "message": "the second note"})
    console.show({"ev": "summary", "summary": SUMMARY})
    console.close()
    assert "the first note" in stream.getvalue()
    assert "second" not in stream.getvalue()
    lines = log.read_text().splitlines()
    assert lines[0].endswith("standard output is lost (Input/output error): what follows is shown here alone")
    assert lines[1].endswith("the second note")
    assert "  ✓ tiny finished  300 steps, 1.23 M tokens in 1 min 40 s" in lines


def test_a_log_that_has_the_lines_in_any_case_gets_them_once(tmp_path):
    stream, log = Closes(is_terminal=False), tmp_path / "console.log"
    console = make_console(stream, clock=Clock(), log=str(log), logged=True)
    stream.is_closed = True
    console.show({"ev": "note", "message": "logged by the driver"})
    console.show({"ev": "note", "message": "this one too"})
    console.close()
    (line,) = log.read_text().splitlines()
    assert "standard output is lost" in line


def test_without_a_stream_and_without_room_for_a_log_the_console_shows_nothing_and_raises_nothing(tmp_path):
    for log in (None, str(tmp_path / "gone" / "console.log"), "gs://bucket/console.log"):
        console = make_console(None, log=log)
        console.show(RUN)
        console.close()


def test_an_event_that_cannot_be_shown_is_named_and_left_out():
    console = make_console(stream := io.StringIO(), clock=Clock())
    console.show({"ev": "incident", "incident": {}})
    console.show({"ev": "note", "message": "and on it goes"})
    assert "an event 'incident' cannot be shown: KeyError: 'kind'" in stream.getvalue()
    assert "and on it goes" in stream.getvalue()
