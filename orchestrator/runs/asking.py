"""What `gangway stop` and `gangway save` have in common: a request to the driver of a run, and the wait for what comes of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gangway.program import EXIT_FINE
from gangway.storage.documents import Where
from gangway.storage.opening import place_of
from orchestrator.config.locate import NoRunError, parser_of_run, run_of
from orchestrator.run_state import requests
from orchestrator.runs import overview
from orchestrator.runs.overview import ENDED, LIVE, Overview

EXIT_NOT_DONE = 1
TIMEOUT_S = 300.0
LOOK_EVERY_S, LOOK_IN_BUCKET_EVERY_S = 0.5, 2.0


def main(kind: requests.Kind, module: str, about: str, argv: Sequence[str] | None = None) -> int:
    """The command of a kind of request. Returns 0; 1 if it was not done in time; 2 if there is no such run, or it does not go
    on."""
    parser = parser_of_run(module, about, example="runs/spirals")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help=f"default: {TIMEOUT_S:g}")
    options = parser.parse_intermixed_args(argv)
    done, line = ask(run_of(options.run, options.overrides), kind, options.timeout)
    print(line)
    return EXIT_FINE if done else EXIT_NOT_DONE


def ask(run: Where, kind: requests.Kind, timeout_s: float = TIMEOUT_S) -> tuple[bool, str]:
    """Sends a request to a run, and waits until it is done. Returns whether it is, and a line that says what happened. Raises
    NoRunError if the run does not go on, or OSError."""
    folder = place_of(run)
    before = overview.read(folder)
    if before.kind != LIVE or before.launch_id is None:
        raise NoRunError(f"the run in {folder} does not go on now: {before.state}")
    look_every_s = LOOK_EVERY_S if folder.store.is_local else LOOK_IN_BUCKET_EVERY_S
    path = requests.send(folder.url, kind, before.launch_id)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        now = overview.read(folder)
        if now.kind == LIVE and now.launch_id is not None and now.launch_id != before.launch_id:
            # Another launch has taken the run over: nobody has asked that one.
            before, path = now, requests.send(folder.url, kind, now.launch_id)
        if (line := _result(kind, before, now, taken=not requests.is_waiting(path))) is not None:
            return True, line
        time.sleep(look_every_s)
    heard = "the driver has not read the request" if requests.is_waiting(path) else "the driver has read the request"
    return False, f"not done within {timeout_s:g} s: {heard}; the run is {overview.read(folder).state}"


def _result(kind: requests.Kind, before: Overview, now: Overview, *, taken: bool) -> str | None:
    """Returns what came of a request; None while nothing has."""
    if now.kind == ENDED:
        saved = "no checkpoint" if now.checkpoint_step is None else f"saved at step {now.checkpoint_step:,}"
        return f"{now.name}: {now.state}; {saved}"
    newest = now.checkpoint_step
    if (
        kind != requests.STOP
        and taken
        and newest is not None
        and newest >= (before.step or 0)
        and newest != before.checkpoint_step
    ):
        return f"{now.name}: saved at step {newest:,}; it goes on"
    return None
