"""The files that each run's folder has of what was asked for, and of what was shown."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

from orchestrator.config.job import build, load
from orchestrator.driver import main
from orchestrator.policies.notices import NotifyConfig
from orchestrator.reporting.board import Board
from orchestrator.reporting.notifier import Notifier
from orchestrator.run_state.goodput import Goodput
from orchestrator.run_state.progress import Progress


def test_a_run_has_its_settings_and_what_its_console_has_shown(tmp_path):
    config = build({"name": "mine", "max_num_steps": 1, "seed": 4, "storage": str(tmp_path)})
    waiting, tracked = {}, []
    launch = SimpleNamespace(
        run_dir=config.run_dir,
        progress=Progress(Goodput(0.0)),
        write_beside=waiting.__setitem__,
        tracker=SimpleNamespace(log_artifact=lambda path: tracked.append(Path(path).read_text())),
    )
    (tmp_path / "mine").mkdir()
    main.keep_configuration(launch, config)
    message = {"started_at_s": time.time(), "shown": [{"ev": "note", "message": "checked"}]}
    for launch.progress.drivers in (1, 2):  # the second driver of a launch does not tell again what the command has shown
        board = main.logged(Board(), launch, message, Notifier(NotifyConfig(), "x", config.run_dir, 0.0, print))
        board.post({"ev": "note", "message": f"driver {launch.progress.drivers}"})
        for write in waiting.values():
            write()
    assert load(tmp_path / "mine" / "config.yaml") == config
    assert tracked[0] == (tmp_path / "mine" / "config.yaml").read_text()
    log = (tmp_path / "mine" / "console.log").read_text()
    assert [line[9:] for line in log.splitlines() if "launch" not in line] == ["checked", "driver 1", "driver 2"]
