"""A child process that works something out with JAX: it reads JSON and writes JSON, and takes no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.agent.child_process import child_env
from orchestrator.config.job import ConfigError, JobConfig

TIMEOUT_S = 600.0
"""Reading the data may take long; a child that hangs must not."""


class PlanError(Exception):
    """The child that works out the plan failed by itself."""


class Child:
    """The process. It starts at once, and is killed at the end of the `with` if it is still there."""

    def __init__(
        self,
        module: str,
        config: JobConfig,
        request: Mapping[str, Any],
        env: Mapping[str, str],
        timeout_s: float = TIMEOUT_S,
    ):
        """`module` is run with the arguments of the run and `request`."""
        self.module, self.name, self.timeout_s = module, config.training.name, timeout_s
        # Not pipes: a child that prints much would wait for somebody to read, and nobody does while Ray starts.
        self._given, self._answer, self._errors = (tempfile.TemporaryFile("w+") for _ in range(3))  # noqa: SIM115 - closed by __exit__
        asked = {"arguments_class": config.arguments_class, "arguments": asdict(config.training), **request}
        json.dump(asked, self._given)
        self._given.seek(0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=self._given,
            stdout=self._answer,
            stderr=self._errors,
            # On CPU: it must not take a device from the processes that will train.
            env=child_env(os.environ, {"JAX_PLATFORMS": "cpu", **env}),
            start_new_session=True,  # what ends it is `__exit__`, and no signal to the command
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._given, self._answer, self._errors):
            file.close()

    def facts(self) -> dict[str, Any]:
        """Waits for the answer. Raises ConfigError with everything that is wrong, and PlanError if the child itself failed."""
        try:
            status = self._process.wait(self.timeout_s)
        except subprocess.TimeoutExpired as error:
            raise PlanError(
                f"python -m {self.module} has not answered within {self.timeout_s:.0f} s: does data.dataset or the model wait "
                "for something?"
            ) from error
        if status != 0:
            self._errors.seek(0)
            raise PlanError(f"python -m {self.module} failed with exit status {status}:\n{self._errors.read()[-4000:]}")
        self._answer.seek(0)
        if not (text := self._answer.read()):
            raise PlanError(f"python -m {self.module} has ended without an answer: does your code end the process (os._exit)?")
        answer = json.loads(text)
        if answer["problems"]:
            raise ConfigError(self.name, answer["problems"])
        return answer["facts"]
