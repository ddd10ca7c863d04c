"""Starts one child process as an agent does, and says what it tells: for tests that kill the parent.

`python -m tests.programs.parent PREPARATION ORDERS LOG`: the first two as `echo_worker` takes them, in JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

from cluster.agent.child_process import child_env, import_path, spawn

if __name__ == "__main__":
    preparation, orders = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    env = child_env(os.environ, {"PYTHONPATH": os.pathsep.join(import_path(sys.path))})
    child = spawn("tests.programs.echo_worker", env=env, first_line=preparation, log_path=sys.argv[3])
    child.watch(lambda event: print(json.dumps({**event, "pid": child.pid}), flush=True), lambda how: None)
    child.send(orders)
    time.sleep(1000)
