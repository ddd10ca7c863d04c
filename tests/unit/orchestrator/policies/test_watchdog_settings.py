"""One table of phases: what processes say, what is watched, what is counted and what is shown are all in it."""

import dataclasses
import json
import re

from gangway.wire.limits import FIRST_PHASE, FIRST_STEP, PHASES, STEPS
from gangway.wire.orders import agent_start
from orchestrator.policies.watchdog import WatchdogConfig
from orchestrator.run_state.goodput import CATEGORIES
from tests import ROOT

NO_PHASE = {"silent_s", "step_floor_s", "step_factor", "stacks_before_s", f"{FIRST_STEP}_s"}


def test_every_phase_that_training_tells_is_in_the_table():
    texts = [path.read_text() for path in (ROOT / "trainers").rglob("*.py")]
    told = {name for text in texts for name in re.findall(r"\.phase\(\"(\w+)\"\)", text)}
    assert told | {"import"} == set(PHASES)  # The agent begins with `import`: the process cannot tell yet.


def test_every_limit_of_a_phase_is_a_setting_and_every_setting_is_used():
    limits = {phase.limit for phase in PHASES.values() if phase.limit is not None}
    assert limits == {field.name for field in dataclasses.fields(WatchdogConfig)} - NO_PHASE
    assert [name for name, phase in PHASES.items() if phase.limit is None] == [STEPS, "hold"]
    assert next(iter(PHASES)) == FIRST_PHASE


def test_the_limits_travel_by_the_names_of_the_phases():
    orders = WatchdogConfig(compile_s=40, silent_s=None).orders()
    assert orders["phases"].keys() == PHASES.keys() - {STEPS, "hold"}
    assert (orders["phases"]["diagnose"], orders["silent_s"]) == (40, None)
    _, limits = agent_start({"generation": 0, "limits": json.loads(json.dumps(orders))})
    assert limits == WatchdogConfig(compile_s=40, silent_s=None).limits()


def test_the_time_of_every_phase_is_counted_in_a_category_of_the_ledger():
    assert {phase.category for phase in PHASES.values()} <= set(CATEGORIES)
