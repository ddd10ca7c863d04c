"""The page about a run: what is on it comes from the files, what is missing is named, and it needs no network."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from gangway.published import SYSTEM
from gangway.storage import documents
from orchestrator.config.job import CONFIG, build, resolved_yaml
from orchestrator.driver.exported import STATES
from orchestrator.failures.classify import FailureKind
from orchestrator.failures.history import PastFailure
from orchestrator.report import __main__ as command
from orchestrator.report import charts, child, drawing, page, record, timeline
from orchestrator.report.charts import thinned
from orchestrator.run_state import launch as launches
from orchestrator.run_state.incidents import Incident
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.spool import Spool
from tests.saved import saved

BEGAN_S = 1_795_000_000.0


def train(run_dir, *, steps=200, loss=3.0, incidents=1, **settings):
    """A launch of two hosts that has trained, failed and recovered, as its files say."""
    run_dir.mkdir(parents=True, exist_ok=True)
    now = [BEGAN_S]
    launch = launches.open_launch(
        str(run_dir), "launch", BEGAN_S, TrackingConfig(mlflow=False), {"seed": "0", **settings}, lambda: now[0]
    )
    launch.progress.max_steps = steps
    launch.mark("state", state="reserving")
    launch.mark("state", BEGAN_S + 2, state="joining")
    for host in range(2):
        launch.mark("phase", BEGAN_S + 2, host=host, phase="join", generation=0)
    launch.mark("state", BEGAN_S + 10, state="training")
    launch.progress.goodput.switch("step", BEGAN_S + 10)
    for step in range(10, steps + 1, 10):
        now[0] = BEGAN_S + 10 + step
        launch.publish(step, {"loss": loss - step / steps, "learning_rate": 1e-3, "step_time_s": 1.0, "mine": float(step)})
        launch.mark("busy", now[0], step=step, busy_s=[0.4, 0.5])
    launch.publish(steps, {"eval_loss": loss, "eval_seconds": 1.0})
    launch.mark("saved", now[0], step=steps)
    launch.saved(steps, str(saved(run_dir, steps)))
    for number in range(incidents):
        failed = Incident(kind="process_crash", host=1, generation=number, step=50 + number, failed_at_s=BEGAN_S + 60 + number)
        failed.evidence = {"summary": "host 1: <killed> by SIGKILL", "log tail": "Traceback <b>"}
        failed.action, failed.resumed_step = "restart", 40
        failed.recovery_s = {"detect": 0.1, "join": 0.4}
        launch.failed(PastFailure(kind=FailureKind.PROCESS_CRASH, step=50, exception=None, generation=number), failed)
    launch.mark("state", now[0], state="recovering")
    launch.close("FINISHED", 60.0)
    return run_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def text(run):
    return page.of_one(record.read(run))


def test_the_page_has_what_the_files_say(text):
    for what in ("mine", "200 of 200", "process crash", "held out", "Learning rate", "Time line", "Where the time went"):
        assert what in text, what
    assert "<b>1</b><span>incident</span>" in text
    assert "What is missing here" not in text
    assert "Work of each host" in text
    # On a narrow page, which has no columns, each value has its name beside it.
    assert '<span data-name="recovery">0.50 s</span><span data-name="again">10 steps</span>' in text
    assert '.row > [data-name]::before { content: attr(data-name) " "' in text
    assert "host 1: &lt;killed&gt; by SIGKILL" in text  # a text of a run is no HTML
    assert "Traceback &lt;b&gt;" in text


def test_the_page_needs_no_network_and_no_script(text):
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", text)
    assert "<script" not in text
    assert "url(http" not in text
    assert len(text) < 2_000_000


def test_a_picture_has_the_colours_of_light_and_dark(text):
    assert f"var({drawing.VARIABLES[drawing.SERIES[0]]})" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r'(stroke|fill)="#0[abc]0', text)


def test_the_page_and_its_pictures_use_only_colours_that_the_style_sheet_defines(text):
    """Light, dark and print each define all: a colour that one of them lacks would be none there."""
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    schemes = re.findall(r":root \{([^}]*)\}", text)
    assert len(schemes) == 3
    for scheme in schemes:
        defined = set(re.findall(r"(--[\w-]+):", scheme))
        assert used - defined == set()
    assert set(drawing.VARIABLES) == set(drawing.LIGHT) == set(drawing.DARK)


def test_what_is_published_at_the_same_step_takes_no_place_of_the_training(tmp_path):
    """An evaluation of any name, and the ledger of the end; but a step that comes again takes the place of what it was."""
    folder = train(tmp_path / "run")
    last = {"step": 200, "metrics": {"loss": 2.5, "step_time_s": 1.0}}
    more = [{"step": 200, "metrics": {"books_loss": 4.0}}, {"step": 200, "metrics": {"goodput/share": 0.5}}, last]
    with open(folder / "tracking" / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"t": BEGAN_S + 300 + number, **row}) + "\n" for number, row in enumerate(more))
    found = record.read(folder)
    assert [found.curve(name)[-1] for name in ("loss", "eval_loss", "books_loss", "goodput/share")] == [
        *((200, 2.5), (200, 3.0), (200, 4.0), (200, 0.5))
    ]
    assert sum("loss" in one.metrics for one in found.published if one.step == 200) == 1


def test_the_time_line_is_what_the_run_and_its_hosts_did(run):
    line = timeline.of(record.read(run))
    assert line.rows == ["run", "host 0", "host 1"]
    assert [(bar.from_s, bar.to_s, bar.kind) for bar in line.bars if bar.row == "host 1"] == [
        (2.0, 10.0, "starting"),
        (10.0, 210.0, "training"),
        (210.0, 210.0, "failed, recovering"),
    ]
    assert line.incidents == [(60.0, "process crash")]
    assert line.saves == [210.0]


def test_the_time_line_begins_with_the_command_as_the_goodput_does(run):
    """The driver, whose marks are on it, comes seconds after the command."""
    found = record.read(run)
    later = dataclasses.replace(found, marks=[dataclasses.replace(mark, at_s=mark.at_s + 5) for mark in found.marks])
    line = timeline.of(later)
    assert line.bars[0] == timeline.Bar("run", 0.0, 5.0, "starting")
    assert line.saves == [215.0]
    assert line.incidents == [(60.0, "process crash")]


def test_the_time_line_of_a_run_that_was_resumed_is_that_of_its_newest_launch(run):
    found = record.read(run)
    again = [dataclasses.replace(mark, launch="second", at_s=mark.at_s + 10_000) for mark in found.marks]
    line, of_first = timeline.of(dataclasses.replace(found, marks=[*found.marks, *again])), timeline.of(found)
    assert line.bars[0] == of_first.bars[0], "it begins with the first mark, and not with the command of the first launch"
    assert line.saves == of_first.saves


def test_each_state_of_a_run_has_its_kind_on_the_time_line():
    assert {*STATES} <= {*timeline.KINDS}


def test_the_page_says_first_what_differs_from_the_defaults_and_what_it_was_made_with(run, text, tmp_path):
    assert "What differs from the defaults" not in text  # this run has no config.yaml, and no tags
    made = shutil.copytree(run, tmp_path / "made")
    (made / CONFIG).write_text(resolved_yaml(build({"name": "made", "max_num_steps": 7, "data": {"dataset": "mine:data"}})))
    tags = {"version.jax": "0.10", "mlflow.source.git.commit": "c" * 40, "mlflow.source.git.branch": "work"}
    Spool(str(made / "tracking" / "metrics.jsonl")).append({"t": BEGAN_S, "tags": tags})
    page_of = page.of_one(record.read(made))
    given = page_of.partition("<p>What differs from the defaults:</p><pre>")[2].partition("</pre>")[0]
    assert "max_num_steps: 7" in given
    assert "seed" not in given
    assert "commit cccccccccccc (work), perhaps changed · jax 0.10" in page_of


def test_half_a_run_has_a_page_that_names_what_is_missing(run, tmp_path):
    half = tmp_path / "half"
    half.mkdir()
    (half / "timeline.jsonl").write_text((run / "timeline.jsonl").read_text()[:200] + "{half a line")
    (half / "launch.json").write_text("{damaged")
    text = page.of_one(record.read(half))
    assert "launch.json cannot be read" in text
    assert "1 damaged lines of timeline.jsonl are left out" in text
    assert "metrics.jsonl is not there" in text


def test_what_a_rollback_took_back_is_not_drawn(tmp_path):
    folder = tmp_path / "tracking"
    folder.mkdir()
    rows = [
        {"t": 1.0, "step": 10, "metrics": {"loss": 3.0}},
        {"t": 2.0, "step": 20, "metrics": {"loss": None}},
        {"t": 3.0, "go_back": 10},
        {"t": 4.0, "step": 20, "metrics": {"loss": 2.0}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert record.read(tmp_path).curve("loss") == [(10.0, 3.0), (20.0, 2.0)]


def test_settings_that_changed_at_a_resume_are_reported(tmp_path):
    folder = tmp_path / "tracking"
    folder.mkdir()
    rows = [{"t": 1.0, "params": {"seed": "0", "a": "1"}}, {"t": 2.0, "params": {"seed": "0", "a": "2"}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (resume,) = record.read(tmp_path).resumes
    assert resume.changes == {"a": ("1", "2")}


def test_several_runs_are_beside_each_other(run, tmp_path, capsys, monkeypatch):
    other = train(tmp_path / "runs" / "mine", loss=2.0, seed="1", incidents=0)
    monkeypatch.chdir(tmp_path)
    assert command.main([str(run), str(other)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out == "report.html\n"
    assert "<code>seed</code>" in text
    assert f"{run.parent.name}/mine" in text  # two of one name are told apart by their folders
    row = re.search(r"<td>loss</td>(.*?)</tr>", text, re.S)[1]
    assert re.findall(r'class="num( best)?">([\d.]+)<', row) == [("", "2.0000"), (" best", "1.0000")]


def test_a_run_that_does_not_exist_is_refused(tmp_path, capsys):
    assert command.main([str(tmp_path / "none")]) == 2
    assert "error: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([str(tmp_path), str(tmp_path), "--figures", "a"])


def test_the_pictures_are_written_as_png(run, tmp_path):
    command.write([run], tmp_path / "a.html", tmp_path / "figures")
    names = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert {"loss", "goodput", "time_line", "learning_rate"} <= names
    assert (tmp_path / "figures" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_of_many_points_the_spikes_stay():
    points = [(float(step), 1.0) for step in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    points[5] = (5.0, float("nan"))
    few = thinned(points)
    assert len(few) <= 600
    assert (77_777.0, 9.0) in few
    assert few == sorted(few)


def test_the_names_of_lines_are_above_the_chart_and_the_parts_of_the_bar_are_the_whole():
    """A name beside a line lies on it where two lines are near each other."""
    chart = charts.lines("Loss", "", {"training": [(1.0, 2.0), (2.0, 1.0)], "held out": [(2.0, 1.5)]})
    drawn = drawing.svg(chart)
    assert re.findall(r"role-legend-label.*?>(training|held out)<", drawn)
    assert {"training", "held out"} == {*re.findall(r">(training|held out)<", drawn.partition("role-legend")[2])}
    assert "role-legend" not in drawing.svg(charts.lines("Loss", "", {"training": [(1.0, 2.0)]}))
    bar = charts.goodput_bar({"step": 90.0, "recovery": 10.0, "idle": 0.0})
    rows = bar["layer"][0]["data"]["values"]
    assert [(row["what"], row["from"], row["to"]) for row in rows] == [("step", 0.0, 0.9), ("recovery", 0.9, 1.0)]


def test_axes_have_units_that_people_read(text):
    """No milli-minutes: the rolling goodput of a short run counts seconds, and short steps count milliseconds."""
    short, long = (charts.lines("Goodput", "", {"goodput": [(0.0, 0.5)]}, x=charts.unit_of(s)[1]) for s in (40.0, 4000.0))
    axes = [chart["layer"][0]["encoding"]["x"]["axis"] for chart in (short, long)]
    assert [(axis["title"], "format" in axis) for axis in axes] == [("seconds", False), ("minutes", False)]
    assert "milliseconds of a step" in text
    several = {"a": [(0.0, 1e-3), (1.0, 0.0)], "b": [(0.0, 5e-3), (1.0, 5e-3)]}
    assert charts.lines("Learning rate", "", several)["layer"][0]["encoding"]["y"]["scale"]["domainMin"] == 0, "none is negative"
    for points in ([(0.0, 4.0), (1.0, 3.0)], [(0.0, 4.0), (1.0, -3.0)]):
        chart = charts.lines("Loss", "", {"a": points, "b": [(0.0, 4.0)]})
        assert "domainMin" not in chart["layer"][0]["encoding"]["y"]["scale"]
    assert [row["phase"] for row in charts.phases({"first_step": 0.5})["layer"][0]["data"]["values"]] == ["first step"]
    small = charts.lines("Learning rate", "", {"": [(0.0, 1e-3), (1.0, 1.2e-3)]})["layer"][0]["encoding"]["y"]["axis"]
    assert "'0'" in small["labelExpr"]
    marks = [{"x": at, "what": "process crash"} for at in (10.0, 10.5, 11.0, 60.0)]
    assert [one["x"] for one in charts.apart(marks, 100.0)] == [10.0, 60.0], "names do not lie over each other"
    bar = charts.goodput_bar({"data_wait": 70.0, "checkpoint": 5.0, "step": 25.0})
    assert [row["what"] for row in bar["layer"][1]["data"]["values"]] == ["data wait", "step"]


@pytest.mark.parametrize(
    "ends", [(1e-3, 1.2e-3), (1e-3, 1.0001e-3), (3e-4, 3e-4), (0.0, 6e-5), (12_000.0, 12_001.0), (1.69, 1.6938)]
)
def test_no_two_ticks_have_the_same_label(ends):
    drawn = drawing.svg(charts.lines("Learning rate", "", {"": [*enumerate(ends)]}))
    of_axis = re.findall(r"role-axis-label.*?</g>", drawn)
    labels = re.findall(r">([^<>]+)</text>", of_axis[-1])
    assert len(labels) == len({*labels}) >= 1


def test_the_wide_charts_have_a_form_for_a_telephone(text):
    broad, narrow = (re.findall(rf'<div class="{name}"><svg [^>]*max-width:([\d.]+)px', text) for name in ("broad", "narrow"))
    assert len(broad) == len(narrow) == 4  # the time line, the bar of the goodput, its course, the work of the hosts
    assert min(map(float, broad)) > 900
    assert max(map(float, narrow)) <= 400
    assert ".broad { display: none; } .narrow { display: block; }" in text.partition("@media (max-width: 700px)")[2]
    late = charts.gantt(timeline.Timeline(100.0, "", [], [(10.0, "process crash"), (99.0, "hang")]), charts.NARROW)
    assert [one["align"] for one in late["layer"][-1]["data"]["values"]] == ["left", "right"], "no name leaves the chart"


def test_a_traceback_is_folded_and_in_letters_of_one_width(tmp_path):
    folder = train(tmp_path / "run")
    error = "host 1: ValueError: <bad>\ngiving up: it came again\n\nTraceback (most recent call last):\n  File 'a.py'"
    documents.write_json(
        folder / "summary.json", {"launch_id": "launch", "status": "failed", "stop_reason": None, "error": error}
    )
    shown = page.of_one(record.read(folder)).partition('<div class="card error">')[2].partition("</div>")[0]
    said, _, folded = shown.partition("<details>")
    assert said == "host 1: ValueError: &lt;bad&gt;\ngiving up: it came again"
    assert "<pre>Traceback (most recent call last):\n  File " in folded
    assert "<details" not in page.of_one(record.read(train(tmp_path / "well"))).partition("<h2>")[0]


def test_the_page_that_the_driver_makes_says_how_the_launch_has_ended(tmp_path):
    """Its outcome is written after the page."""
    folder = train(tmp_path / "run")
    ended = {"launch_id": "launch", "status": "stopped", "stop_reason": "time_limit", "error": None}
    documents.write_json(folder / "summary.json", ended | {"tokens": 30, "samples": 30})
    head = page.head(record.read(folder))
    assert (head["state"], head["reason"], head["kind"]) == ("stopped", "time_limit", "good")
    assert ("examples", "30") in head["tiles"], "an example of one token is an example"


def test_a_report_that_cannot_be_written_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as of a driver that Ray Train has started: this program is not in its folder
    with pytest.raises(OSError, match=rf"there is no .*: gangway report {tmp_path / 'none'}"):
        child.write_report(str(tmp_path / "none"), figures=False)


@pytest.mark.slow("reads a million steps")
def test_a_long_run_has_a_page_of_three_megabytes_in_seconds(tmp_path):
    """Of the time it is asserted alone that to read the files is a few times what their JSON takes, whatever the machine does."""
    folder = train(tmp_path / "long", incidents=500)
    metrics = dict.fromkeys(sorted(SYSTEM)[:24], 0.123456789)
    with open(folder / "tracking" / "metrics.jsonl", "a") as file:
        for step in range(210, 1_000_000, 10):
            numbers = {**metrics, "loss": 2.0 + (step % 7) / 10, "step_time_s": 1.0, "grad_norm": 1.0}
            file.write(json.dumps({"t": BEGAN_S + step, "step": step, "metrics": numbers}) + "\n")
    lines, times_s = (folder / "tracking" / "metrics.jsonl").read_bytes().splitlines(), [time.process_time()]
    for line in lines:
        json.loads(line)
    times_s.append(time.process_time())
    found = record.read(folder)
    times_s.append(time.process_time())
    text = page.of_one(found)
    times_s.append(time.process_time())
    json_s, read_s, page_s = (end - begin for begin, end in pairwise(times_s))
    print(f"1 M steps, 500 incidents: JSON {json_s:.1f} s, read {read_s:.1f} s, page {page_s:.1f} s, {len(text) / 1e6:.1f} MB")
    assert read_s < 10 * json_s  # 4 alone; a busy machine slows one down more than the other
    assert len(text) < 3_000_000
    assert text.count('<details class="incident">') == 500


@pytest.mark.parametrize("name", ["mfu", "mfu_of_fp8_peak"])
def test_each_utilization_has_a_chart_of_its_own_in_percent(name):
    points = [(1.0, 0.25), (2.0, 0.5)]
    of_run = SimpleNamespace(
        overview=SimpleNamespace(metrics={}),
        published=[SimpleNamespace(metrics={name: 0.25})],
        curve=lambda asked: points if asked == name else [],
    )
    (chart,) = page.curves({"run": of_run})
    assert "Model FLOPs" in str(chart)
    assert "%" in str(chart)
