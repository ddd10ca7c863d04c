"""Which tests are run, the dearest file first, and what a run shows: a line for each file that has ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests import costs
from tests.ledger import file_of

MARKERS = {
    "slow(why)": "is left to `make test-changed` and `make test-all`: why a cheaper test in `make test` is enough there",
    "sampled(number)": "so many of the cases are run in `make test`, spread over all of them; the others are slow",
}

MESSAGE_CHARACTERS = 400


class Progress:
    """The order of a run, and its lines. With a pool it lives in the process that prints."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._left: Counter[str] = Counter()
        """Tests of each file that have not ended."""
        self._total = 0
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_all_but_a_sample(items)
        for item in items:
            for marker in item.iter_markers("slow"):
                if len(marker.args) != 1 or not str(marker.args[0]).strip():
                    raise pytest.UsageError(f'{item.nodeid}: expected @pytest.mark.{marker.name}("why"), found {marker}')
        if chosen := self._config.getoption("slow_of"):
            self._leave_out(items, Path(chosen).read_text().splitlines())
        slow = {file_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
        expected_s = costs.expected_s(slow)
        # Else one worker would begin the dearest file when all others have ended. The order within a file stays.
        items.sort(key=lambda item: (-expected_s(file_of(item.nodeid)), file_of(item.nodeid)))

    def _leave_out(self, items: list[pytest.Item], chosen: list[str]) -> None:
        out = [item for item in items if item.get_closest_marker("slow") and file_of(item.nodeid) not in chosen]
        left_out = set(out)
        items[:] = [item for item in items if item not in left_out]
        self._config.hook.pytest_deselected(items=out)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if self._config.option.verbose > 0:
            return None
        if report.passed and report.when == "call":
            return "passed", "", ""
        return ("skipped", "", "") if report.skipped and not hasattr(report, "wasxfail") else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._seconds[file] += report.duration
        if report.when == "call" or not report.passed:
            self._outcomes[file]["failed" if report.failed else "skipped" if report.skipped else "passed"] += 1
        if report.failed:
            self._tell(f"     {report.nodeid} failed in its {report.when}: {message(report)}")
        if report.when == "teardown":
            self._left[file] -= 1
            if not self._left[file]:
                self._show(file)

    def _expect(self, ids: list[str]) -> None:
        self._left = Counter(map(file_of, ids))
        self._total = len(self._left)

    def _show(self, file: str) -> None:
        ended = sum(not left for left in self._left.values())
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self._outcomes[file].items()))
        failed = self._outcomes[file]["failed"] > 0
        self._tell(f"{ended:4}/{self._total} {file}: {told}, {self._seconds[file]:.1f} s", red=failed)

    def _tell(self, line: str, red: bool = True) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and self._config.option.verbose <= 0:
            reporter.ensure_newline()
            reporter.line(line, red=red)


def message(report: pytest.TestReport) -> str:
    """Returns what a failure says, in one line. A run that is stopped before its end has told it then."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else report.longreprtext).split())[:MESSAGE_CHARACTERS]


def mark_all_but_a_sample(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        (number,) = of_one_test[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = {round(index * (len(of_one_test) - 1) / max(1, number - 1)) for index in range(number)}
        for index, item in enumerate(of_one_test):
            if index not in kept:
                item.add_marker(pytest.mark.slow("another case of the same test is run in `make test`"))
