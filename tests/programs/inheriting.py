"""A trainer of one's own that starts children in every way, and keeps what each of them has of the training process."""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.programs.processes import PATIENCE_S
from trainers import runtime

PR_GET_PDEATHSIG = 2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


def facts() -> dict[str, object]:
    """What this process has."""
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death))
    umask = os.umask(0)
    os.umask(umask)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # that of the listing
    logging.getLogger("children").warning("has the lock of logging")
    done = threading.Event()
    threading.Thread(target=done.set).start()
    return {
        "descriptors": descriptors,
        "blocked": int(status["SigBlk"], 16),
        "ignored": [number.name for number in SIGNALS if int(status["SigIgn"], 16) >> (number - 1) & 1],
        "environment": sorted(name for name in os.environ if name.startswith(("EVENT", "GANGWAY", "LD_", "MALLOC"))),
        "folder": os.getcwd(),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "dies_with_its_parent": death.value,
        "umask": umask,
        "nice": os.nice(0),
        "input": sys.stdin.read(),
        "starts_threads": done.wait(PATIENCE_S),
    }


def keep(path: Path) -> None:
    path.write_text(json.dumps(facts()))


class Trainer:
    def __init__(self, arguments, train_dataset, eval_dataset):
        self.folder = Path(arguments.storage)

    def train(self):
        keep(self.folder / "own.json")
        for way in ("fork", "spawn"):
            child = multiprocessing.get_context(way).Process(target=keep, args=(self.folder / f"{way}.json",))
            child.start()
            child.join()
        program = f"from tests.programs.inheriting import keep, Path; keep(Path({str(self.folder / 'subprocess.json')!r}))"
        subprocess.run([sys.executable, "-c", program], check=True)
        runtime.progress(1, loss=0.0)
