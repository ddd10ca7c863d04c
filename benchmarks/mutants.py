"""Do the tests hold? Puts one fault at a time into a copy of a module, and runs the tests that belong to it.

    python -m benchmarks.mutants [MODULE ...] [--count 5] [--seed 1] [--rings 3]
                                [--without-slow] [--results build/mutants/results.jsonl] [--report]
    python -m benchmarks.mutants --ignore-keys [KEY ...]
    python -m benchmarks.mutants --hand-made [MODULE ...]

A module's faults are drawn by the seed. The first ring of tests is the module's own file and those that import the module. A
mutant that survives it meets the second ring, all tests of its wing, and then the third, those beside the wings of its package,
which may take minutes: `--rings 2` leaves them out, so that some that they would kill count as survivors. A run that was ended
goes on where it was: `--results` has a line for each mutant of the present text, whatever its rings. Mutants that change nothing
stand in benchmarks/equivalent_mutants.toml.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import forked_tests, ignored_keys
from benchmarks.mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
DEFAULT = ("gangway", "trainers", "cluster/hosts", "cluster/agent/watchdog.py", "orchestrator/failures", "orchestrator/policies")
"""All of the training program, and what decides without Ray."""
LEAST_LIMIT_S, LIMIT_FACTOR = 60.0, 5.0
OUTCOMES = ("killed", "timeout", "survived", "equivalent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="files and folders of the tree; with --ignore-keys, keys")
    parser.add_argument("--count", type=int, default=5, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rings", type=int, default=3, choices=(1, 2, 3), help="how many rings of tests a mutant meets")
    parser.add_argument("--without-slow", action="store_true", help="only with the tests of `make test`")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to measure, which is copied")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants" / "results.jsonl")
    parser.add_argument("--ignore-keys", action="store_true", help="ignore each key of the configuration: does its test fail?")
    parser.add_argument("--hand-made", action="store_true", help="put in the faults of tests/data/one_line_faults.toml")
    parser.add_argument("--report", action="store_true", help="run nothing; print the table of the results that there are")
    options = parser.parse_args()
    root, results = options.root.resolve(), options.results.resolve()
    results.parent.mkdir(parents=True, exist_ok=True)
    if options.ignore_keys:
        ignored_keys.main(root, results.parent, options.modules)
    if options.hand_made:
        chosen = hand_made(root, options.modules)
    else:
        chosen = [
            m for path in modules(root, options.modules or DEFAULT) for m in sample(root, path, options.count, options.seed)
        ]
    if not options.report:
        forked_tests.prepare()
        tests = Tests(forked_tests.copy_tree(root, results.parent), ("-m", "not slow") if options.without_slow else ())
        for mutant, line in try_all(root, chosen, results, tests, options.rings):
            print(f"{line['outcome']:9} {mutant.path}:{mutant.line}: {mutant.change}", line["by"], flush=True)
    text = report(root, chosen, read(results))
    results.with_suffix(".md").write_text(text)
    print(text)


def modules(root: Path, names: Iterable[str]) -> list[str]:
    """Returns the modules that files and folders name, as paths from the root."""
    found = [path for name in names for path in ([root / name] if name.endswith(".py") else sorted((root / name).rglob("*.py")))]
    return [str(path.relative_to(root)) for path in found]


def sample(root: Path, path: str, count: int, seed: int) -> list[Mutant]:
    """Returns `count` mutants of a module, or all if there are fewer. The same seed and text give the same ones, and a larger
    count the same and more."""
    everything = mutants_of(path, (root / path).read_text())
    random.Random(f"{seed} {path}").shuffle(everything)
    return sorted(everything[:count], key=lambda mutant: mutant.line)


def hand_made(root: Path, names: Sequence[str]) -> list[Mutant]:
    """Returns the faults that people have written down, of the modules and folders that are named; of all if none is."""
    rows = tomllib.loads((root / "tests" / "data" / "one_line_faults.toml").read_text())["fault"]
    made = []
    for row in rows:
        if not names or row["path"].startswith(tuple(names)):
            text = (root / row["path"]).read_text()
            line = text[: text.index(row["old"])].count("\n") + 1
            made.append(Mutant(row["path"], line, "by hand", row["id"], row["what"], text.replace(row["old"], row["new"])))
    return made


def try_all(
    root: Path, chosen: Sequence[Mutant], results: Path, tests: Tests, num_rings: int = 3
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Tries the mutants that have no result yet. Yields each with the line that was added to `results`."""
    known, equivalent = read(results), equivalents(EQUIVALENT)
    for mutant in chosen:
        if mutant.key in known or is_equivalent(mutant, root, equivalent):
            continue
        about = {"key": mutant.key, "path": mutant.path, "line": mutant.line, "change": mutant.change}
        line = about | _try(tests, mutant, num_rings)
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        yield mutant, line


def _try(tests: Tests, mutant: Mutant, num_rings: int) -> dict[str, Any]:
    """Returns the outcome of the first ring that kills the mutant in the tree."""
    seconds, path = 0.0, tests.tree / mutant.path
    for ring in rings_of(tests.tree, mutant.path)[:num_rings]:
        files, limit_s = tests.healthy(ring)  # only now: most mutants never meet the later rings
        if not files:
            continue
        whole = path.read_text()
        path.write_text(mutant.source)
        try:
            result = tests.run(files, limit_s)
        finally:
            path.write_text(whole)
        seconds += result.seconds
        if result.outcome != "passed":
            outcome = "timeout" if result.outcome == "timeout" else "killed"
            return {"outcome": outcome, "by": result.by, "seconds": seconds}
    return {"outcome": "survived", "by": "", "seconds": seconds}


class Tests:
    """The tests of a tree; `options` of pytest choose some of them. A file that fails without a mutant would kill everything: it
    is left out, and named. So is one that has none of those that are chosen."""

    def __init__(self, tree: Path, options: Sequence[str] = ()):
        self.tree, self._options = tree, options
        self._seconds: dict[str, float] = {}

    def run(self, files: Sequence[str], limit_s: float) -> forked_tests.Result:
        return forked_tests.run(self.tree, [*self._options, *files], limit_s)

    def healthy(self, ring: Sequence[str]) -> tuple[list[str], float]:
        """Returns the files of a ring that pass, the shortest first, and the limit of a run of all."""
        for file in ring:
            if file not in self._seconds:
                result = self.run([file], 600.0)
                self._seconds[file] = result.seconds if result.outcome == "passed" else float("inf")
                if result.outcome != "passed":
                    print(f"left out: {file} fails without a mutant ({result.outcome}: {result.by})", flush=True)
        passing = sorted((file for file in ring if self._seconds[file] < float("inf")), key=lambda file: self._seconds[file])
        return passing, max(LEAST_LIMIT_S, LIMIT_FACTOR * sum(self._seconds[file] for file in passing))


def rings_of(root: Path, path: str) -> list[list[str]]:
    """Returns the test files that a mutant of a module meets: those of the module, then the others of its wing, then those
    beside the wings of its package."""
    package, *middle, name = Path(path).with_suffix("").parts
    tests = {str(test.relative_to(root)): test for test in sorted((root / "tests" / "unit").rglob("test_*.py"))}
    mirror = "/".join(["tests/unit", package, *middle, f"test_{name}.py"])
    own = [test for test, file in tests.items() if test == mirror or imports(file.read_text(), [package, *middle, name])]
    wing, whole = ("/".join(["tests/unit", package, *part]) for part in (middle[:1], []))
    rings = [own, *([test for test in tests if str(Path(test).parent) == folder] for folder in (wing, whole))]
    return [[test for test in ring if not any(test in sooner for sooner in rings[:number])] for number, ring in enumerate(rings)]


def imports(text: str, module: Sequence[str]) -> bool:
    """Says whether a test imports the module, or names it with its dots."""
    if re.search(rf"\b{re.escape('.'.join(module))}\b", text):
        return True
    froms = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    return any(node.module == ".".join(module[:-1]) and any(alias.name == module[-1] for alias in node.names) for node in froms)


def read(results: Path) -> dict[str, dict[str, Any]]:
    """Returns the results by the key of the mutant."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def equivalents(path: Path) -> set[tuple[str, str, str]]:
    """Returns (module, text of the line, change) of mutants that change nothing that can be seen."""
    rows = tomllib.loads(path.read_text()).get("equivalent", []) if path.exists() else []
    return {(row["path"], row["line"], row["change"]) for row in rows}


def is_equivalent(mutant: Mutant, root: Path, known: set[tuple[str, str, str]]) -> bool:
    line = (root / mutant.path).read_text().splitlines()[mutant.line - 1].strip()
    return (mutant.path, line, mutant.change) in known


def report(root: Path, chosen: Sequence[Mutant], known: dict[str, dict[str, Any]]) -> str:
    """Returns the table by module and wing, and the survivors, in Markdown."""
    equivalent = equivalents(EQUIVALENT)
    rows: dict[str, Counter[str]] = {}
    survivors = []
    for mutant in chosen:
        outcome = (
            "equivalent" if is_equivalent(mutant, root, equivalent) else known.get(mutant.key, {}).get("outcome", "not tried")
        )
        wing = "/".join(Path(mutant.path).parts[:2])
        for name in dict.fromkeys((mutant.path, f"**{wing}**")):
            rows.setdefault(name, Counter())[outcome] += 1
        if outcome == "survived":
            survivors.append(f"- {mutant.path}:{mutant.line}: `{mutant.change}` ({mutant.operator})")
    table = ["| module | mutants tried | killed | timed out | survived | equivalent |", "|---|---|---|---|---|---|"]
    for name, row in sorted(rows.items(), key=lambda item: (item[0].strip("*"), item[0])):
        table.append(f"| {name} | {sum(row[key] for key in OUTCOMES)} | " + " | ".join(str(row[key]) for key in OUTCOMES) + " |")
    return "\n".join([*table, "", "Survivors:", "", *(survivors or ["- none"])]) + "\n"


if __name__ == "__main__":
    main()
