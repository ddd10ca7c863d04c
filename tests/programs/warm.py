"""Trains as a host's process does, in one process: `python -m tests.programs.warm ARGUMENTS`, a file of JSON. Prints what was
imported after the process was warm and before its first step."""

from __future__ import annotations

import json
import sys

from trainers import runtime, worker
from trainers.callbacks import Callback
from trainers.settings import ARGUMENTS_CLASS


class Looking(Callback):
    def __init__(self, warm, imported):
        self.warm, self.imported = warm, imported

    def on_train_begin(self, state, **about):
        self.imported.extend(sorted(set(sys.modules) - self.warm))


def main(path: str) -> None:
    with open(path) as file:
        prepared = worker.prepare({"cmd": "prepare", "arguments_class": ARGUMENTS_CLASS, "arguments": json.load(file)})
    warm, imported = set(sys.modules), []
    runtime.install(runtime.Runtime(lambda event: None, program_key="tests"))
    trainer = prepared.trainer
    trainer.add_callback(Looking(warm, imported))
    trainer.train()
    print(json.dumps({"imported": imported, "from_step": trainer.training.loop.resume.meta.get("step")}))


if __name__ == "__main__":
    main(sys.argv[1])
