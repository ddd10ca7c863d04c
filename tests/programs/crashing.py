"""`python -m tests.programs.crashing FOLDER [load|use]`: a process with one compiled program, kept in FOLDER, that crashes while
what was kept is loaded or used for the first time. Prints what was noted, and how often the program was traced."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from trainers.runtime import executable_files
from trainers.runtime.executables import Program, ProgramStore


def crash(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def main(folder: str, when: str = "") -> None:
    notes: list[str] = []
    traces: list[Any] = []

    def double(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return 2 * x

    program = Program("double", jax.jit(double), ProgramStore(Path(folder), "launch", notes.append), notes.append)
    if when == "load":
        executable_files.load = crash
    program.prepare(jnp.ones(3))
    if when == "use" and program._untried_file is not None:
        program.compiled = crash  # type: ignore[assignment]
    answer = program(jnp.ones(3)).tolist()
    print(json.dumps({"answer": answer, "notes": notes, "traces": len(traces)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
