"""A change runs the slow tests that it can reach, and five changes in a row run all of them."""

import re

import pytest

from tests import ROOT, costs, reach, run

SLOW = [file for file in reach.test_files() if re.search(r"pytest\.mark\.slow\(", reach.text_of(file))]


@pytest.fixture(autouse=True)
def nothing_has_failed(tmp_path, monkeypatch):
    """In the last run of all tests, but for what a test says of it."""
    monkeypatch.setattr(reach, "PROVED", tmp_path / "proved.toml")


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("orchestrator/deploy/refusals.py", "tests/unit/orchestrator/deploy/test_kubernetes.py"),
        ("trainers/step/train_step.py", "tests/unit/trainers/step/test_loss.py"),  # through trainers.base
        ("trainers/tasks/reward.py", "tests/unit/trainers/tasks/test_scoring.py"),  # named by a text
        ("tests/unit/training.py", "tests/unit/trainers/step/test_adapted.py"),
        ("tests/conftest.py", "tests/unit/trainers/step/test_adapted.py"),
        ("tests/multihost/conftest.py", "tests/multihost/test_hosts.py"),
        ("requirements.lock", "tests/faults/test_chaos.py"),
        ("configs/tiny.yaml", "tests/faults/test_kills.py"),
        ("orchestrator/tracking/mlflow_shipper.py", "tests/faults/test_tracking.py"),  # a wing that it names
        ("tests/programs/tiny.py", "tests/faults/test_limits.py"),
        ("tests/programs/table.yaml", "tests/faults/test_chaos.py"),
        ("tests/unit/data/parity/gemma/config.json", "tests/unit/trainers/models/hf/test_parity.py"),
        ("tests/weed.txt", "tests/faults/test_buckets.py"),
        ("tests/tpu.txt", "tests/unit/orchestrator/test_compile.py"),
    ],
)
def test_what_a_change_can_reach(file, test):
    assert (ROOT / file).exists()
    assert (ROOT / test).exists()
    assert reach.reaches(test, [file])


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("orchestrator/deploy/refusals.py", "tests/unit/trainers/step/test_loss.py"),
        ("trainers/tasks/reward.py", "tests/faults/test_kills.py"),  # a whole job, about something else
        ("tests/unit/trainers/step/test_loss.py", "tests/unit/trainers/step/test_adapted.py"),
        ("tests/ray/conftest.py", "tests/multihost/test_hosts.py"),
        ("README.md", "tests/multihost/test_hosts.py"),
        ("tests/costs.json", "tests/faults/test_chaos.py"),
        ("tests/reach.py", "tests/faults/test_chaos.py"),
        ("tests/data/real_sizes.json", "tests/faults/test_chaos.py"),
        ("tests/unit/data/parity/gemma/config.json", "tests/unit/trainers/step/test_loss.py"),
        # What runs the tests knows the commands of processes by their names, and starts none of them.
        ("trainers/worker.py", "tests/unit/gangway/storage/test_documents.py"),
        ("orchestrator/run_state/requests.py", "tests/unit/trainers/step/test_loss.py"),
        ("trainers/evaluation/previews.py", "tests/unit/orchestrator/driver/test_driver.py"),
    ],
)
def test_what_it_cannot_reach(file, test):
    assert (ROOT / file).exists()
    assert not reach.reaches(test, [file])


def test_five_changes_in_a_row_run_all_slow_tests_whatever_they_change():
    turns = [reach.chosen(["LICENSE"], turn) for turn in range(reach.TURNS)]
    assert sorted(file for turn in turns for file in turn) == reach.test_files()


def test_a_change_that_reaches_more_than_one_run_can_carry_is_run_in_parts_that_have_all(capsys):
    slow = costs.slow_s(reach.test_files())
    number = len(costs.parts(reach.test_files(), run.SLOW_BUDGET_S))
    turns = [run.affordable(reach.test_files(), (), turn) for turn in range(number)]
    assert sorted(file for turn in turns for file in turn) == reach.test_files()
    assert number > 1
    assert f"part {number} of {number} is run" in capsys.readouterr().out
    for turn in turns:
        assert sum(slow.get(file, 0.0) for file in turn) < 1.1 * run.SLOW_BUDGET_S
    dearest = max(slow, key=lambda file: slow[file])
    assert all(dearest in run.affordable(reach.test_files(), [dearest], turn) for turn in range(number))
    capsys.readouterr()
    assert run.affordable([dearest, "tests/unit/test_docs.py"], (), 7) == [dearest, "tests/unit/test_docs.py"]
    assert capsys.readouterr().out == ""


def test_what_failed_when_all_were_run_is_run_with_every_change(tmp_path, monkeypatch):
    monkeypatch.setattr(reach, "git", lambda *command: "" if "status" in command else "1234567890abcdef\n")
    turn = reach.turn_of("tests/faults/test_chaos.py") + 1
    assert (reach.proved(), reach.unproved()) == (None, [])
    assert reach.prove([]) == "tests/proved.toml names 1234567890ab now: commit it"
    assert (reach.proved(), reach.unproved()) == ("1234567890abcdef", [])
    assert "tests/faults/test_chaos.py" not in reach.chosen(["LICENSE"], turn)
    told = reach.prove(["tests/ray/test_gang.py", "tests/faults/test_chaos.py"])
    assert told == "tests/proved.toml names 1234567890ab now, and what failed: commit it"
    assert reach.unproved() == ["tests/faults/test_chaos.py", "tests/ray/test_gang.py"]
    chosen = reach.chosen(["LICENSE"], turn)
    assert "tests/faults/test_chaos.py" in chosen
    # Whatever part of a large change has its turn.
    assert all("tests/faults/test_chaos.py" in run.affordable(SLOW, [], turn) for turn in range(5))


def test_a_tree_that_is_no_commit_is_not_named(tmp_path, monkeypatch):
    monkeypatch.setattr(reach, "git", lambda *command: " M a.py" if "status" in command else "1234567890abcdef\n")
    assert "stays as it is" in reach.prove([])
    assert not reach.PROVED.exists()


def test_a_change_that_nobody_knows_runs_everything():
    assert reach.chosen(None) == reach.test_files()


def test_each_file_of_whole_jobs_names_the_wings_that_it_is_about():
    wrong = []
    for file in SLOW:
        wings = reach.wings_of(file)
        if not wings and not file.startswith("tests/unit/"):
            wrong.append(
                f"{file} has slow tests of whole jobs or hosts: name the wings of the product that they are about, WINGS = (...)"
            )
        wrong += [f"{file}: WINGS has {wing}, which is not there" for wing in wings if not (ROOT / wing).exists()]
    assert wrong == []


@pytest.mark.parametrize(
    ("changed", "alone"),
    [(["docs/how_to.md", "README.md"], True), (["docs/how_to.md", "trainers/base.py"], False), ([], False), (None, False)],
)
def test_a_change_of_documents_alone_runs_the_tests_of_documents(changed, alone):
    assert reach.documents_alone(changed) == alone
    chosen = run.selected(["test", "changed"], changed) if alone else ()
    assert ("tests/unit/test_code_blocks.py" in chosen) == alone
    assert "tests/unit/trainers/test_base.py" not in chosen


def test_the_dotted_name_of_a_function_leads_to_its_module():
    assert "trainers/commands/run.py" in reach.files_of("trainers.commands.run.train")
    assert reach.files_of("os.path") == ()
