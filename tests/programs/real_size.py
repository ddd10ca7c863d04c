"""`python -m trainers.planning.program` for `test_compile.py`: it does not compile a step that was compiled before.

`tests/data/real_sizes.json` holds what the compiler told of the step of each configuration of a real size, with a digest of
all that it was given: the lowered program, the flags and the versions. `python -m tests.programs.real_size keep` writes there
what the tests have compiled since."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any
from unittest import mock

import jax

from tests import ROOT
from tests.environment import BUILD, QUICK_TO_COMPILE
from trainers.planning import estimate, program

KEPT = ROOT / "tests" / "data" / "real_sizes.json"
NEW = BUILD / "real_sizes"
TOLD = ("digest", "memory", "exchanged", "exchanged_over")
DIGEST = "TESTS_KNOWN_DIGEST"
"""Names the digest of the step that need not be compiled."""
WAS_COMPILED = "it was compiled before"
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_EXEC_TIME_OPTIMIZATION_EFFORT")


class Known:
    """In place of a lowered step."""

    def compile(self) -> None:
        # After this one the program answers with all that it knows without the compiler.
        raise jax.errors.JaxRuntimeError(f"{program.NO_MEMORY}: {WAS_COMPILED}")


def digest(lowered: jax.stages.Lowered) -> str:
    flags = (" ".join(flag for flag in os.environ.get(name, "").split() if flag not in QUICK_TO_COMPILE) for name in FLAGS)
    versions = (version("jax"), version("jaxlib"), (ROOT / "tests" / "tpu.txt").read_text())
    return hashlib.sha256("\0".join((lowered.as_text(), *flags, *versions)).encode()).hexdigest()


def compiled(*args: Any) -> tuple[list[str], program.Facts]:
    """As `program.compiled`, with the digest of the step. Of one that is known the compiler has told nothing."""
    found: list[str] = []

    def lower(*args: Any) -> jax.stages.Lowered | Known:
        lowered = lower_really(*args)
        found.append(digest(lowered))
        return Known() if found[0] == os.environ[DIGEST] else lowered

    lower_really = program.lower
    with mock.patch.object(program, "lower", lower):
        problems, facts = compile_really(*args)
    return [problem for problem in problems if WAS_COMPILED not in problem], {**facts, "digest": found[0]}


def known() -> dict[str, dict[str, Any]]:
    return json.loads(KEPT.read_text())


def write(name: str, facts: Mapping[str, Any]) -> None:
    NEW.mkdir(parents=True, exist_ok=True)
    (NEW / f"{name}.json").write_text(json.dumps({each: facts[each] for each in TOLD}))


def keep() -> None:
    every = {**known(), **{path.stem: json.loads(path.read_text()) for path in NEW.glob("*.json")}}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(every[name])}" for name in sorted(every))
    KEPT.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.programs.real_size", description=__doc__)
    parser.add_argument(
        "keep", nargs="?", choices=("keep",), help="without it: a request of orchestrator.commands.compile is read"
    )
    if parser.parse_args().keep:
        keep()
    else:
        # The text of a kernel has the places of its lines, which are others in another clone.
        jax.config.update("jax_traceback_in_locations_limit", 0)
        compile_really = program.compiled
        with mock.patch.object(program, "compiled", compiled):
            estimate.answer(program.asked)
