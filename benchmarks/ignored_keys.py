"""Each key of the configuration is ignored, and its declared test must fail: `python -m benchmarks.mutants --ignore-keys`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks import forked_tests

LIMIT_S, HEALTHY_LIMIT_S = 300.0, 3600.0


def main(root: Path, work: Path, names: Iterable[str]) -> None:
    """Prints a line for each key and a table by section. Exits with status 1 if a test does not see that its key is ignored."""
    forked_tests.prepare()
    from tests.unit.config_keys import declared

    tree, rows, missed = forked_tests.copy_tree(root, work), Counter[str](), Counter[str]()
    tests = {name: declared()[name] for name in names or declared()}
    healthy = forked_tests.run(tree, sorted(set(tests.values())), HEALTHY_LIMIT_S)
    if healthy.outcome != "passed":
        sys.exit(f"{healthy.by or healthy.outcome}: this test does not pass with all keys, so it proves nothing")
    for name, test in tests.items():
        outcome = forked_tests.run(tree, [test], LIMIT_S, lambda name=name: _ignore(name)).outcome  # type: ignore[misc]
        # A test that hangs without its key proves nothing about the key.
        seen = outcome == "failed"
        print(f"{'seen' if seen else 'MISSED'}: {name} ({outcome}) {test}", flush=True)
        section = name.rpartition(".")[0] or "(top)"
        rows[section] += 1
        missed[section] += not seen
    print("\n| section | keys | the test fails without the key | it does not |\n|---|---|---|---|")
    for section in sorted(rows):
        print(f"| {section} | {rows[section]} | {rows[section] - missed[section]} | {missed[section]} |")
    print(f"| all | {rows.total()} | {rows.total() - missed.total()} | {missed.total()} |")
    sys.exit(bool(missed.total()))


def _ignore(name: str) -> None:
    """In the fork: the sections are those of the copy."""
    from tests.unit.config_keys import every_key

    every_key()[name].ignore()
