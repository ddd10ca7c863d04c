"""What becomes of the texts of a preview, and of one that fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.training import of
from trainers.callbacks import RunInfo
from trainers.loop.evaluator import Previewer
from trainers.runtime.multihost import StageError

STATE = SimpleNamespace(params="trained", model_state="statistics")
TEXTS = [{"prompt": "a", "text": "b"}]


def made(generate):
    info = RunInfo()
    info.global_step = 7
    return Previewer(generate, lambda state: f"averages of {state.params}", info)


@pytest.mark.parametrize("texts", [TEXTS, []])
def test_host_0_tells_the_texts_of_the_parameters_that_are_evaluated(events, texts):
    given = []
    made(lambda *args: given.append(args) or texts).show(STATE)
    assert given == [("averages of trained", 7, "statistics")]
    assert [event["phase"] for event in of(events, "phase")] == ["preview"]
    assert [(event["step"], event["previews"]) for event in of(events, "preview")] == ([(7, TEXTS)] if texts else [])


def test_a_preview_that_fails_is_noted_and_nothing_else(events):
    def fails(*args):
        raise StageError("host 1: no memory")

    made(fails).show(STATE)
    assert [event["message"] for event in of(events, "note")] == ["no previews at step 7: host 1: no memory"]
    assert not of(events, "preview")


def test_without_prompts_there_is_no_phase_of_previews(events):
    assert made(None).generate(STATE) == []
    assert events == []
