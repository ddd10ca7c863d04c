"""The process of a run that `orchestrator.library.launch` has started: `python -m orchestrator.commands.launched`.

It reads one line of JSON, {"configuration", "end", "program"}, runs the job as `orchestrator.run` does, and writes to the file
`end` how it ended. When its standard input ends, the program that wanted the run is gone: the run saves and stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from gangway.config.masking import masked
from gangway.program import command
from gangway.storage import documents
from orchestrator.commands.launching import REFUSALS, run_job, why_no_outcome
from orchestrator.config.job import build
from orchestrator.planning.child import PlanError


@command()
def main() -> int:
    # Also where the user's program ignores it, as what a shell runs in the background does: the end is asked for by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    message = json.loads(sys.stdin.readline())
    threading.Thread(target=stop_without_parent, name="parent", daemon=True).start()
    # Ray adds the folder of the program to the import path of its workers.
    sys.argv[0] = message["program"]
    documents.write_json(message["end"], end_of(message["configuration"]))
    return 0


def end_of(configuration: dict[str, Any]) -> dict[str, Any]:
    """Runs the job. Returns `status` (finished, stopped, failed, or refused: nothing was started), `error` and `stop_reason`."""
    try:
        outcome, error, lost = run_job(build(configuration, name="launch"), began_s=time.monotonic())
    except REFUSALS as refused:
        return {"status": "refused", "error": masked(str(refused)), "stop_reason": None}
    except PlanError as failed:
        return {"status": "failed", "error": masked(str(failed)), "stop_reason": None}
    if outcome is None:
        return {"status": "failed", "error": why_no_outcome(error, lost), "stop_reason": None}
    return {name: outcome[name] for name in ("status", "error", "stop_reason")}


def stop_without_parent() -> None:
    # Not by `sys.stdin`, whose lock Python would need at its end.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
