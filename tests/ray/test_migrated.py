"""The scripts of docs/migrating.md: each trains on two hosts, is killed once, and ends bit for bit like an undisturbed run."""

from __future__ import annotations

import pytest

from gangway.storage.opening import place_of
from orchestrator.config.job import load, to_dict
from tests import ROOT
from tests.ray.jobs import run_job
from tests.ray.machines import own_ray
from tests.saved import saved
from tests.strikes import Folder
from trainers.checkpoint import manifest

WINGS = ("orchestrator/library.py", "trainers/library.py", "trainers/callbacks", "trainers/evaluation")

FOLDER = ROOT / "examples" / "migrated"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with own_ray(4):
            yield


def run(name, storage, **hosts):
    """The first 70 steps of a script as its configuration stands; where it is stored and tracked is another place."""
    made = to_dict(load(FOLDER / f"{name}.yaml", [f"storage={storage}", "tracking.mlflow=false", "max_num_steps=70"]))
    made["checkpoint"]["save_steps"] = 20
    made["hosts"] |= hosts
    return run_job(made)


@pytest.mark.slow("trains a script twice")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_migrated_script_that_is_killed_once_ends_like_an_undisturbed_run(tmp_path, name):
    faults = Folder(tmp_path / "faults")
    faults.order(1, "kill", at=50)
    killed = run(name, tmp_path / "killed", env=faults.env)
    undisturbed = run(name, tmp_path / "undisturbed")
    assert (killed["status"], undisturbed["status"]) == ("finished", "finished")
    assert (killed["num_incidents"], killed["generations"]) == (1, 2)
    assert (undisturbed["num_incidents"], undisturbed["lineage"][0]["num_hosts"]) == (0, 2)
    for equal in ("params_digest", "samples_digest", "samples", "tokens", "train_loss", "steps"):
        assert killed[equal] == undisturbed[equal], equal
    assert killed["samples_digest"] is not None
    assert [{part["num_hosts"] for part in job["lineage"]} for job in (killed, undisturbed)] == [{2}, {2}]
    # Of every array of the state, the moments of the optimizer included.
    assert fingerprints(tmp_path / "killed", name) == fingerprints(tmp_path / "undisturbed", name)


def fingerprints(storage, name):
    folder = saved(storage / load(FOLDER / f"{name}.yaml").training.name, 70)
    return manifest.read_meta(place_of(folder))["fingerprints"]


@pytest.mark.slow("starts a gang")
def test_each_system_has_a_script():
    assert SCRIPTS == ["easydel_sft", "fairseq2_recipe", "veomni_trainer"]
