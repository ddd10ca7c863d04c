"""What a run of the tests shows: a line for each file that has ended, and the tests that cost more than they may."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import PurePath
from typing import Any

import pytest

ALLOWED_S = {"tests/unit": 1.0}
ALLOWED_ELSEWHERE_S = 10.0
"""What a test may cost (CONTRIBUTING.md, "What a test may cost")."""
MUCH = 15.0
"""`--check-costs` fails from so many times what is allowed: below it, a busy machine may be the reason (9 were seen)."""
MARKERS = {
    "slow(why)": "costs more than a test of its folder may, and is left to `make test-all`",
    "costs(why)": "costs more than a test of its folder may, and is worth it in `make test`",
}


class Progress:
    """The lines of a run. Of pytest-xdist, it lives in the process that prints."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._left: Counter[str] = Counter()
        """Tests of each file that have not ended."""
        self._total = 0
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: Counter[str] = Counter()
        self._costs: Counter[str] = Counter()
        """Seconds of each test that has no marker."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for marker in (*item.iter_markers("slow"), *item.iter_markers("costs")):
                if len(marker.args) != 1 or not str(marker.args[0]).strip():
                    raise pytest.UsageError(f'{item.nodeid}: expected @pytest.mark.{marker.name}("why"), found {marker}')

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not self._total:  # every worker collects the same
            self._expect(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if self._config.option.verbose > 0:
            return None
        if report.passed and report.when == "call":
            return "passed", "", ""
        return ("skipped", "", "") if report.skipped and not hasattr(report, "wasxfail") else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.split("::")[0]
        self._seconds[file] += report.duration
        if not any(name in report.keywords for name in ("slow", "costs")):
            self._costs[report.nodeid] += report.duration
        if report.when == "call" or not report.passed:
            self._outcomes[file]["failed" if report.failed else "skipped" if report.skipped else "passed"] += 1
        if report.when == "teardown":
            self._left[file] -= 1
            if not self._left[file]:
                self._show(file)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        costly = [(node, seconds) for node, seconds in self._costs.most_common() if seconds > allowed_s(node)]
        if costly:
            terminalreporter.section("cost more than a test of their folder may, without a marker (CONTRIBUTING.md)", "-")
            for node, seconds in costly:
                terminalreporter.line(f"{seconds:6.1f}s of {allowed_s(node):g}  {node}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        too_much = any(seconds > MUCH * allowed_s(node) for node, seconds in self._costs.items())
        if too_much and exitstatus == 0 and self._config.getoption("check_costs"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _expect(self, ids: list[str]) -> None:
        self._left = Counter(node.split("::")[0] for node in ids)
        self._total = len(self._left)

    def _show(self, file: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or self._config.option.verbose > 0:
            return
        ended = sum(not left for left in self._left.values())
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self._outcomes[file].items()))
        reporter.ensure_newline()
        failed = self._outcomes[file]["failed"] > 0
        reporter.line(f"{ended:4}/{self._total} {file}: {told}, {self._seconds[file]:.1f} s", red=failed)


def allowed_s(node: str) -> float:
    """Returns the seconds that a test may cost without a marker that says why."""
    return ALLOWED_S.get("/".join(PurePath(node.split("::", maxsplit=1)[0]).parts[:2]), ALLOWED_ELSEWHERE_S)
