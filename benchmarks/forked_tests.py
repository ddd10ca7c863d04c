"""Runs of pytest on a copy of the tree, each in a fork of this process, which has imported JAX and touched no device.

A fork begins at once, where a new process would import JAX for seconds. `prepare` comes before anything else is imported: JAX and
NumPy read their settings then, and a process with threads cannot be forked.
"""

from __future__ import annotations

import importlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import environment

IMPORTED = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "hypothesis", "pydantic", "pytest", "yaml")
COPIED = (
    "trainers",
    "cluster",
    "orchestrator",
    "tests",
    "benchmarks",
    "configs",
    "examples",
    "docs",
    "pyproject.toml",
    "Makefile",
)


@dataclass(frozen=True)
class Result:
    outcome: str
    """`passed`, `failed` or `timeout`."""
    by: str
    """The first test that failed."""
    seconds: float


def prepare() -> None:
    """Imports what every test imports. Raises RuntimeError if a thread was started by it."""
    # Here, and not in each fork: a fork ends without the clean-up of its folders.
    environment.prepare(os.environ)
    os.environ.update(JAX_PLATFORMS="cpu", OPENBLAS_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    for name in IMPORTED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a fork may copy a lock that another thread holds: an import of benchmarks.forked_tests started one")


def copy_tree(root: Path, work: Path) -> Path:
    """Copies what the tests need from `root` to a new folder in `work`, and returns that folder."""
    tree = work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in (*COPIED, *(path.name for path in root.glob("*.md"))):
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            tree.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tree / name)
    return tree


def run(tree: Path, tests: Sequence[str], limit_s: float, before: Callable[[], None] = lambda: None) -> Result:
    """Runs the tests until the first one fails. `before` is called in the fork, in the tree, before pytest starts."""
    log, started = tree.parent / "log.txt", time.monotonic()
    pid = os.fork()
    if not pid:
        _become_pytest(tree, tests, log, before)
    fd = os.pidfd_open(pid)
    try:
        ended = bool(select.select([fd], [], [], limit_s)[0])
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(fd)
    seconds = round(time.monotonic() - started, 1)
    if not ended:
        return Result("timeout", "", seconds)
    failed = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED ", "ERROR "))]
    by = failed[0].split(" - ")[0].split(" ", 1)[1] if failed else ""
    return Result("passed" if status == 0 else "failed", by or (f"exit status {status}" if status else ""), seconds)


def _become_pytest(tree: Path, tests: Sequence[str], log: Path, before: Callable[[], None]) -> None:
    status = 70
    try:
        os.setsid()
        out, null = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((null, 0), (out, 1), (out, 2)):
            os.dup2(fd, number)
        os.chdir(tree)
        # What this program has imported of the tree that is measured would be found instead of the copy.
        for name in [name for name in sys.modules if name.split(".")[0] in COPIED]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path[1:] if path not in ("", os.environ.get("PWD")))]
        # The same programs are compiled by most runs.
        os.environ["TESTS_COMPILE_CACHE"] = str(tree.parent / "compiled")
        before()
        import pytest

        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--basetemp", str(tree.parent / "tmp")]
        status = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)
