"""A trainer of a user's own, whose native code ends the process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


class Trainer:
    def __init__(self, arguments, train_dataset, eval_dataset):
        pass

    def train(self):
        self.deep(40)

    def deep(self, more: int) -> None:
        if more:
            self.deep(more - 1)
        else:
            self.crash()


class SIGSEGV(Trainer):
    def crash(self):
        ctypes.string_at(0)  # SIGSEGV


class SIGABRT(Trainer):
    def crash(self):
        os.abort()  # SIGABRT


def line_of(comment: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [index for index, line in enumerate(lines, 1) if line.endswith(f"  # {comment}")]
    return f"{__file__}, line {number}, in crash"
