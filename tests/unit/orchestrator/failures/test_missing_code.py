"""What Ray tells of a machine that lacks code, in words of ours."""

from __future__ import annotations

import pytest

from gangway.errors import HOW_TO_SHIP
from orchestrator.failures.classify import explain_missing_code

TEXT = "The actor died. (pid=7, ip=10.0.0.9)\n  ModuleNotFoundError: No module named 'my.models'"


@pytest.mark.parametrize(
    ("text", "where"),
    [(TEXT, "on the machine 10.0.0.9"), (TEXT.replace(", ip=10.0.0.9", ""), "on one of the machines of the cluster")],
)
def test_the_module_and_the_machine_are_named_with_what_to_do(text, where):
    assert explain_missing_code(text) == f"no module named 'my.models' {where}: {HOW_TO_SHIP}"


def test_a_text_of_something_else_is_no_missing_code():
    assert explain_missing_code("The actor died. (pid=7, ip=10.0.0.9)\n  ValueError: No module") is None
