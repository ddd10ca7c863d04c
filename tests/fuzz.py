"""Large numbers of random cases, each kind by the test that has a sample of them in the suite.

    make fuzz KIND=records COUNT=1000 SEED=7      # python -m tests.fuzz records --count 1000 --seed 7
    make fuzz                                     # the kinds, and how far each has come

It goes round after round, each with a seed of its own, and writes the outcome of each into build/fuzz/KIND.jsonl. A command that
was ended goes on where it was. A round that fails is shown, and can be run again alone: its seed is in its line. What it finds
becomes a fixed case of the suite. `make test-all` draws the sample by the seed of the day."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

from tests import ROOT
from tests.environment import PYTEST

FOLDER = ROOT / "build" / "fuzz"
COUNT, SEED = "TESTS_FUZZ_COUNT", "TESTS_FUZZ_SEED"
CASES_A_ROUND = 100
OF_PROCESSES = 20
"""Cases in a round whose cases are processes that wait: a round ends in time beside other work too."""
OWNERS = "tests/unit/trainers/checkpoint/test_random_owners.py"
DEPLOY = "tests/unit/orchestrator/deploy"
DATA, HF = "tests/unit/trainers/data", "tests/unit/trainers/models/hf"
KINDS = {
    "files": f"{DATA}/test_random_files.py::test_many_files_with_random_defects",
    "records": f"{DATA}/test_random_records.py::test_many_records_are_right_or_refused_by_name",
    "tables": f"{DATA}/test_random_records.py::test_many_records_come_back_from_the_files_of_datasets",
    "templates": f"{DATA}/test_random_templates.py::test_many_templates_are_right_or_refused",
    "configs": f"{HF}/test_random_configs.py::test_many_files_are_read_as_transformers_reads_them_or_refused",
    "models": f"{HF}/test_random_configs.py::test_many_models_are_written_as_transformers_reads_them_or_refused",
    "adapters": f"{HF}/test_peft.py::test_many_adapters_with_patterns_are_read_as_peft_reads_them_or_refused",
    "changed_data": f"{DATA}/test_identity.py::test_each_of_many_random_changes_is_named_and_nothing_else",
    "deployments": f"{DEPLOY}/test_random_deployments.py::test_each_of_many_random_deployments_reads_back_equal_or_is_refused",
    "texts": "tests/unit/orchestrator/test_random_texts.py",
    "documents": "tests/unit/test_damaged_documents.py::test_no_damage_of_many_passes_in_silence",
    "owners_on_disk": f"{OWNERS}::test_many_drivers_take_a_run_on_a_disk_from_each_other",
    "owners_in_bucket": f"{OWNERS}::test_many_drivers_take_a_run_in_a_bucket_from_each_other",
    "power_cuts": f"{OWNERS}::test_many_power_cuts_lose_nothing_that_was_saved",
    "signals": "tests/faults/test_signals.py::test_each_of_many_signals_has_a_true_end_and_leaves_nothing",
    "driver": "tests/unit/orchestrator/driver/test_driver_model.py::test_many_runs_end_as_if_nothing_had_happened",
    "stops": "tests/unit/orchestrator/driver/test_driver_model.py::test_a_stop_in_each_of_many_waits_ends_it",
}


def count(in_suite: int) -> int:
    """Returns how many cases a test tries: so many in the suite."""
    return int(os.environ.get(COUNT) or in_suite)


def seed(in_suite: int) -> int:
    """Returns what its cases are drawn by."""
    return int(os.environ.get(SEED) or in_suite)


def cases_of(kind: str) -> int:
    """Returns how many cases one round has."""
    return OF_PROCESSES if OWNERS in KINDS[kind] or kind == "signals" else CASES_A_ROUND


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    parser.add_argument("--count", type=int, default=1000, help="cases in all")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next one has the next number")
    options = parser.parse_args()
    if options.kind is None:
        print("\n".join(f"{kind:10} {told(outcomes(kind))}" for kind in KINDS))
        return 0
    ended = {line["seed"] for line in outcomes(options.kind)}
    for number in range(-(-options.count // cases_of(options.kind))):
        if options.seed + number not in ended:
            print(json.dumps(run(options.kind, options.seed + number)), flush=True)
    found = outcomes(options.kind)
    print(f"{options.kind}: {told(found)}")
    return any(line["status"] for line in found)


def run(kind: str, number: int) -> dict[str, object]:
    """Runs one round, and keeps its outcome; returns it."""
    environ = {**os.environ, COUNT: str(cases_of(kind)), SEED: str(number)}
    command = (*PYTEST, "-q", KINDS[kind])
    started_s = time.monotonic()
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    line = {"seed": number, "cases": cases_of(kind), "status": ran.returncode, "seconds": round(time.monotonic() - started_s, 1)}
    if ran.returncode:
        print(ran.stdout)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with path_of(kind).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def outcomes(kind: str) -> list[dict[str, int]]:
    path = path_of(kind)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told(lines: list[dict[str, int]]) -> str:
    failed = [line["seed"] for line in lines if line["status"]]
    return f"{len(lines)} rounds, {sum(line['cases'] for line in lines)} cases; failed with the seeds {failed or 'none'}"


def path_of(kind: str) -> Path:
    return FOLDER / f"{kind}.jsonl"


if __name__ == "__main__":
    raise SystemExit(main())
