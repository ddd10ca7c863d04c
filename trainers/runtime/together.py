"""Work that may fail without ending training, done by all hosts or by none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainers.checkpoint.commit import first_problem, one_line
from trainers.errors import CoordinatorError
from trainers.runtime import multihost

PATIENCE_S = 60.0
"""Of a host that has failed, for the others: they wait for it in a collective if they have not failed too."""


def in_stages(topic: str, *stages: Callable[[Any], Any]) -> tuple[Any, str]:
    """(what the last stage returned, ""), or (None, what went wrong on the first host that failed).

    Each stage gets what the one before it returned, and begins when no host has failed in that one. All hosts must call this.
    What may fail on one host alone belongs in another stage than a collective. Where a collective itself fails on one host, the
    others can never know: that host raises its error.
    """
    value: Any = None
    for number, stage in enumerate(stages):
        failure: Exception | None = None
        try:
            value = stage(value)
        except Exception as error:  # whatever it is: the caller reports it, and training goes on
            failure = error
        if problem := _problem_of_all(f"{topic}, stage {number}", failure):
            return None, problem
    return value, ""


def _problem_of_all(topic: str, failure: Exception | None) -> str:
    if failure is None:
        return first_problem(multihost.all_hosts(topic, ""))
    try:
        return first_problem(multihost.all_hosts(topic, one_line(failure), PATIENCE_S))
    except CoordinatorError:
        raise failure from None
