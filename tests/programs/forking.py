"""A trainer of one's own that forks itself: what becomes of the child is not the host's."""

from __future__ import annotations

import os
import signal
import sys
import time

from trainers import runtime


class Trainer:
    def __init__(self, arguments, train_dataset, eval_dataset):
        pass

    def train(self):
        for step, how in enumerate(("raises", "exits", "reports", "returns", "is terminated"), 1):
            ready, tells = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(ready)
                if in_child(how, tells):
                    return
            os.close(tells)
            if how == "is terminated":
                os.read(ready, 1)  # a signal that comes while Python makes a new process of itself is lost
                os.kill(child, signal.SIGTERM)
            os.close(ready)
            print(how, os.waitpid(child, 0)[1])
            runtime.progress(step, loss=1.0)


def in_child(how: str, tells: int) -> bool:
    """Returns whether the child comes back from the training."""
    if how == "raises":
        raise ValueError("of the child")
    if how == "exits":
        sys.exit(3)
    if how == "is terminated":
        os.write(tells, b"1")
        time.sleep(60)
    runtime.progress(1000, loss=0.0)
    if how == "reports":
        os._exit(0)
    return True
