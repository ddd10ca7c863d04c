"""A process with much memory, which takes the kernel some time to take away."""

from __future__ import annotations

import json
import os
import sys
import time

if __name__ == "__main__":
    memory = b"x" * 200_000_000
    with os.fdopen(int(os.environ["EVENT_FD"]), "w") as events:
        events.write(json.dumps({"t": time.time(), "ev": "warm"}) + "\n")
        events.flush()
        sys.stdin.readline()
        time.sleep(60)
