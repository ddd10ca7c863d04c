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
            child = os.fork()
            if child == 0 and in_child(how):
                return
            if how == "is terminated":
                os.kill(child, signal.SIGTERM)
            print(how, os.waitpid(child, 0)[1])
            runtime.progress(step, loss=1.0)


def in_child(how: str) -> bool:
    """Returns whether the child comes back from the training."""
    if how == "raises":
        raise ValueError("of the child")
    if how == "exits":
        sys.exit(3)
    if how == "is terminated":
        time.sleep(60)
    runtime.progress(1000, loss=0.0)
    if how == "reports":
        os._exit(0)
    return True
