"""The ceilings of the product (`tests/ceilings.toml`): how large it is, and what an entry that raises one must have."""

import ast
from collections import Counter

import pytest

from tests import PACKAGES, ROOT
from tests.ceilings import (
    FILE,
    Raise,
    assert_none,
    broken_chains,
    entries_changed,
    import_rows,
    in_force,
    lowest,
    off_ceiling,
    overdrawn,
    parse,
    raised_silently,
)
from tests.imports import imported_by, sources, top
from tests.journeys import figures, is_function, table

NUM_RANKS = 6
WHY = "a step also reports the slowest slice"
BASE = {"steps": 20, "files": 5}


def entry(row="steps", old=20, new=22, part="27", why=WHY):
    return Raise(row, old, new, part, why)


@pytest.fixture(scope="module")
def ceilings():
    return parse(FILE.read_text())


def num_statements(nodes):
    """Bare strings are docstrings, or say what a value is: to explain more costs nothing."""
    return sum(isinstance(node, ast.stmt) and not is_bare_string(node) for node in nodes)


def is_bare_string(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def num_imports(nodes, path):
    """The number of modules of ours that a file imports."""
    return len({module for module, _ in imported_by(nodes, path) if top(module) in PACKAGES})


def test_the_product_stays_below_its_ceilings(ceilings):
    imports = Counter()
    found = {"statements": 0, "files": 0}
    for path in [path for package in PACKAGES for path in sources(package)]:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        found["files"] += 1
        found["statements"] += num_statements(nodes)
        imports[str(path.relative_to(ROOT))] = num_imports(nodes, path)
    densest = imports.most_common(NUM_RANKS)
    found |= import_rows(number for _, number in densest)
    places = {row: path for row, (path, _) in zip(import_rows(range(NUM_RANKS)), densest, strict=True)}
    assert_none(off_ceiling(ceilings.of_sources, found, ceilings.lag, places))


def test_entries_of_the_product_are_in_order(ceilings):
    assert_none([*broken_chains(ceilings.base, ceilings.raises), *overdrawn(ceilings.raises, ceilings.allowed)])


def test_what_counts_as_a_statement_and_as_an_import(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""A docstring."""\nimport os\nfrom trainers import errors, runtime\nfrom gangway.errors import UsageError\n'
        'X = 1\n"""A value."""\n'
        'def f():\n    """A docstring."""\n    from cluster.agent import state\n    return [x for x in "ab"]\n'
    )
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    assert num_statements(nodes) == 7
    assert num_imports(nodes, path) == 4


def test_a_figure_may_not_rise_above_its_ceiling():
    (said,) = off_ceiling(BASE, {"steps": 21, "files": 5}, lambda row: 1, {"steps": "gangway/errors.py"})
    assert said == ("steps (gangway/errors.py): found 21, the ceiling is 20: make something go, or add an entry that says why")


def test_what_was_gained_is_kept():
    assert off_ceiling(BASE, {"steps": 17, "files": 5}, lambda row: 3) == []
    (said,) = off_ceiling(BASE, {"steps": 16, "files": 5}, lambda row: 3)
    assert said == "steps: found 16, the ceiling is 20: lower the ceiling to keep what was gained"


def test_each_figure_has_a_ceiling_and_each_ceiling_a_figure():
    assert off_ceiling(BASE, {"steps": 20, "moves": 3}, lambda row: 1) == [
        "files: the ceiling is 5, but nothing was found: remove the row",
        "moves: found 3, but there is no ceiling: add the row",
    ]


def test_an_entry_raises_a_ceiling_from_where_it_was():
    raises = [entry(), entry("files", 5, 6), entry(old=22, new=25)]
    assert broken_chains(BASE, raises) == []
    assert in_force(BASE, raises) == {"steps": 25, "files": 6}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (entry(row="speed"), "there is no such row; expected one of 'steps', 'files'"),
        (entry(old=21), "old is 21, but the ceiling before it is 20: give that as old"),
        (entry(new=20), "new is 20, expected more than 20"),
        (entry(why="it had to be"), "why is 'it had to be', expected a reason of 5 words or more"),
    ],
)
def test_an_entry_that_is_wrong_by_itself(wrong, said):
    (complaint,) = broken_chains(BASE, [wrong])
    assert complaint.startswith(f"the raise of {wrong.row!r} by part '27': {said}")


def test_a_part_may_raise_a_row_by_so_much_and_no_more():
    raises = [entry(), entry(old=22, new=23), entry(old=23, new=26, part="28")]
    assert overdrawn(raises, lambda row, part: 3) == []
    assert overdrawn(raises, lambda row, part: 2 if part == "27" else 3) == [
        "part '27' raises 'steps' by 3, allowed are 2: make something go"
    ]


def test_what_is_allowed_depends_on_the_row_and_the_part():
    table = parse(
        'large_parts = ["25"]\n[size]\nstatements = 1000\nfiles = 100\n[imports]\nmost = [9, 8]\n'
        '[journeys]\n"save" = { files = 10, functions = 30 }\n'
    )
    rows = ("statements", "files", "imports 2", "save: files", "save: functions")
    assert [*table.base] == ["statements", "files", "imports 1", "imports 2", "save: files", "save: functions"]
    assert [table.lag(row) for row in rows] == [20, 2, 1, 1, 3]
    assert [table.allowed(row, "24") for row in rows] == [30, 3, 2, 2, 8]
    assert [table.allowed(row, "25") for row in rows] == [80, 8, 4, 4, 20]
    assert [*table.of_journeys] == ["save: files", "save: functions"]
    assert table.of_sources.keys() | table.of_journeys.keys() == table.rows.keys()


def test_a_ceiling_that_rose_needs_entries_that_lead_there():
    now = {"steps": 25, "files": 5}
    assert raised_silently(BASE, now, [entry(), entry("files", 4, 5), entry(old=22, new=25)]) == []
    assert raised_silently({"steps": 23}, now, [entry(), entry(old=22, new=25)]) == []
    for raises in ([], [entry(old=22, new=25)], [entry(old=20, new=24)], [entry("files", 20, 25)]):
        assert raised_silently(BASE, now, raises) == [
            "the ceiling of 'steps' is 25 and was 20: put back the number, and add an entry (row, old, new, part, why) "
            "from 20 to 25, or make something go"
        ]


def test_a_ceiling_that_fell_or_is_new_is_not_raised():
    assert raised_silently(BASE, {"steps": 19, "files": 5, "moves": 3}, []) == []


def test_a_ceiling_is_compared_with_the_lowest_that_it_has_been():
    assert lowest([{"steps": 20, "files": 5}, {"steps": 18}, {"steps": 19, "moves": 3}]) == {"steps": 18, "files": 5, "moves": 3}


def test_an_entry_is_not_made_to_end_higher():
    assert entries_changed([entry()], [entry(new=21), entry(old=21, new=30, why="something else is reported there")]) == []
    assert entries_changed([entry(), entry(new=21)], [entry()]) == [
        "the raise of 'steps' by part '27' ends at 22 and ended at 21: put that back, and add another entry with its own reason"
    ]


def test_which_frames_a_journey_counts():
    source = """
class C:
    def method(self):
        def nested(): ...
        return (lambda: 1), [x for x in "ab"], (x for x in "ab")

def function(): ...
"""
    waiting, counted = [compile(source, "module.py", "exec")], []
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if hasattr(each, "co_code")]
        counted += [code.co_qualname] * is_function(code)
    assert sorted(counted) == ["C.method", "function"]


def test_the_table_of_journeys():
    rows = figures({"save": ["a.py:f", "a.py:C.g", "b.py:f"]})
    assert rows == {"save": {"files": 2, "functions": 3}}
    assert table(rows).splitlines()[1].split() == ["save", "2", "3"]
