"""The message with which a run ends."""

import pytest

from orchestrator.driver import halt
from orchestrator.driver.halt import final_error
from orchestrator.failures.classify import Failure, FailureKind


def failure(**exception) -> Failure:
    raised = {"type": "KeyError", "message": "'text'", "traceback": "Traceback ...\nKeyError: 'text'\n", **exception}
    return Failure(kind=FailureKind.USER_ERROR, host=1, evidence={"summary": "host 1: KeyError", "exception": raised})


@pytest.mark.parametrize(
    ("raised", "whole", "own"),
    [
        (
            {"kind": "user", "deterministic": False},
            "\n\nTraceback ...\nKeyError: 'text'",
            "\n\nmine\n(lines of your own code alone; the whole traceback is in runs/a/logs)",
        ),
        # Their message says it all: a traceback would hide it, and the line in the user's code is shown all the same.
        ({"kind": "user", "deterministic": True}, "", ""),
        ({"kind": "data", "deterministic": False}, "", ""),
    ],
)
def test_the_sentence_comes_first_and_the_lines_of_the_users_code_next(raised, whole, own):
    text = final_error(failure(user_traceback="mine\n", **raised), "it happened twice", "runs/a/logs")
    assert text == f"host 1: KeyError\ngiving up: it happened twice{own}"
    text = final_error(failure(user_traceback="", **raised), "it happened twice", "runs/a/logs")
    assert text == f"host 1: KeyError\ngiving up: it happened twice{whole}"


def test_the_stacks_of_old_incidents_go_and_a_users_folder_beside_them_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(halt, "KEPT_STACKS", 1)
    incidents = tmp_path / "incidents"
    for name, file in (("0001", "host-0000.txt"), ("0002", "thesis.tex"), ("0003", "host-0001.txt")):
        (incidents / name).mkdir(parents=True)
        (incidents / name / file).touch()
    halt.write_stacks(halt.stacks_folder(str(tmp_path), 4), {0: "stacks"})
    assert sorted(path.name for path in incidents.iterdir()) == ["0002", "0004"]
