"""The ledger of a run of the tests: what each test costs, with the processes that it starts, and what for.

Each process of pytest writes a line for each test into a file of its own in `build/tests/ledger`, as soon as the test has ended:
CPU-seconds by cause, and seconds of the clock. What a fixture of a module or of a session has started is charged to the test that
runs meanwhile: it is there for this test, or for its neighbours in the file. What no test has used is in the lines `shared`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.environment import BUILD, LEDGER
from tests.process_tree import OWN, Meter

FOLDER = Path(os.environ.get(LEDGER) or BUILD / "ledger")
SHARED = "shared"
COMPILE = "compile"
COMPILED_BY_JAX = ("/jax/core/compile/jaxpr_to_mlir_module", "/jax/core/compile/backend_compile")
"""Events of JAX that tell the seconds of a lowering, and of a compilation or of reading what was compiled before. Those of traces
lie within each other: a trace counts as the test's own."""


class Ledger:
    """The writer: a plugin of pytest, in each process that runs tests."""

    def __init__(self, meter: bool = True) -> None:
        """Without a meter it knows the seconds of this process alone: of one that only hands out tests."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._file = (FOLDER / f"{os.getpid()}.jsonl").open("a")
        self._read = Meter().read if meter else lambda: Counter({OWN: time.process_time()})
        self._compiled_s, self._listening = 0.0, False
        self._charged: Counter[str] = Counter()
        self._charged_at_s = time.monotonic()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._charge(SHARED)
        result = yield
        self._charge(item.nodeid, slow=item.get_closest_marker("slow") is not None)
        return result

    def close(self) -> None:
        """Charges what was used since the last test, by fixtures of the session that came to their end."""
        self._charge(SHARED)

    def _charge(self, test: str, **about: bool) -> None:
        """Writes what was used since the last line."""
        self._listen()
        seconds, now_s = self._read(), time.monotonic()
        used, wall_s = Counter(seconds), now_s - self._charged_at_s
        used.subtract(self._charged)
        # JAX tells seconds of the clock, of which a busy machine gives this process a part alone.
        used[COMPILE] = used[OWN] * min(1.0, self._compiled_s / wall_s)
        used[OWN] -= used[COMPILE]
        self._compiled_s = 0.0
        line = {"test": test, **about, "wall_s": round(wall_s, 3)}
        line["cpu_s"] = {cause: round(seconds, 3) for cause, seconds in used.items() if seconds > 0}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._charged, self._charged_at_s = seconds, now_s

    def _listen(self) -> None:
        if self._listening or "jax" not in sys.modules:
            return
        import jax.monitoring

        self._listening = True
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def _compiled(self, event: str, seconds: float, **_: Any) -> None:
        if event.startswith(COMPILED_BY_JAX):
            self._compiled_s += seconds


def file_of(test: str) -> str:
    """Returns the file of a test, by the test's id."""
    return test.partition("::")[0]


def cpu_s(line: Mapping[str, Any]) -> float:
    return sum(line["cpu_s"].values())


def read(folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """Yields the lines that all processes have written."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())
