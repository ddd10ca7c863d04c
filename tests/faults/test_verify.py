"""`verify` on whole programs: one that can be resumed, and three that cannot, each for another reason."""

from __future__ import annotations

import json

import pytest
import yaml

from orchestrator.faultlab.verify import command as verify
from tests import ROOT

WINGS = ("orchestrator/faultlab", "orchestrator/verify.py", "trainers/checkpoint", "trainers/loop")
AS_USERS_COMPILE = True

pytestmark = pytest.mark.slow("trains each program several times")

STEPS = 16


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def verified(tmp_path, **changes):
    """(exit status, findings)"""
    config = {
        "name": "program",
        "storage": str(tmp_path),
        "task": "tests.programs.tiny:TableTask",
        "global_batch_size": 8,
        "max_num_steps": 1000,
        "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"},
        "optimizer": {"learning_rate": 0.01},
        **changes,
    }
    path = tmp_path / "program.yaml"
    path.write_text(yaml.safe_dump(config))
    status = verify.main([str(path), "--steps", str(STEPS)])
    report = json.loads((tmp_path / "program-verify" / "verify.json").read_text())
    assert report["passed"] == (status == 0) or (status == 1 and report == {"passed": None})  # not judged
    return status, report.get("findings")


def test_a_good_program_passes_and_every_proof_is_reported(tmp_path, capsys):
    status, findings = verified(tmp_path, hosts={"count": 2})
    assert status == 0, json.dumps(findings, indent=1)
    assert [finding["good"] for finding in findings] == [True] * 4
    assert "resumed from step 4" in findings[1]["text"]
    assert "gone on with on 2 then 1 hosts" in findings[2]["claim"]
    assert capsys.readouterr().out.count("✓") == 4
    assert [path.name for path in (tmp_path / "program-verify").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("changes", "at_fault", "told"),
    [
        (
            {"data": {"sequence_length": 8, "dataset": "tests.programs.faulty:unseeded"}},
            "data",
            "data: batch 0 differs in row 0.0 between two undisturbed runs",
        ),
        ({"task": "tests.programs.faulty:Moody"}, "step", "step: first difference at step 4 in ."),
        ({"trainer": "tests.programs.faulty:Forgetful"}, "restore", "after the run was resumed from step 4, on the same batches"),
    ],
    ids=["data", "step", "restore"],
)
def test_what_cannot_be_resumed_is_named(tmp_path, changes, at_fault, told):
    status, findings = verified(tmp_path, **changes)
    assert status == 1
    (bad,) = (finding for finding in findings if finding["good"] is False)
    assert bad["at_fault"] == at_fault
    assert told in bad["text"]
    (path,) = changes.values()
    assert (path if isinstance(path, str) else path["dataset"]) in bad["text"]


def test_data_that_change_while_a_job_is_verified_are_named(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text " * 200)
    changes = {
        "task": "trainers.tasks.causal_lm:CausalLMTask",
        "trainer": "tests.programs.faulty:Writing",
        "data": {"paths": [str(tmp_path / "texts")], "sequence_length": 16},
        "model": {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 32},
    }
    status, findings = verified(tmp_path, **changes)
    assert (status, findings) == (1, None)
    assert "the data of this job changed while it was verified (a.txt): its runs prove nothing" in capsys.readouterr().err


def test_a_folder_that_is_not_of_an_earlier_verify_is_left_alone(tmp_path, capsys):
    (tmp_path / "tiny-verify").mkdir()
    assert verify.main([str(ROOT / "configs" / "tiny.yaml"), f"storage={tmp_path}"]) == 1
    assert "is in the way" in capsys.readouterr().err
