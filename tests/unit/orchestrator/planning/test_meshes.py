"""Which meshes are tried, and which one is proposed. The compiler has its own tests."""

from __future__ import annotations

import pytest

from orchestrator.config.job import ConfigError, load
from orchestrator.planning import meshes
from tests import ROOT

TINY = ROOT / "configs" / "tiny.yaml"


def job(tmp_path, *settings):
    return load(TINY, [f"storage={tmp_path}", "global_batch_size=16", "hosts.count=4", *settings])


def test_the_configured_mesh_is_the_first_and_none_comes_twice(tmp_path):
    heads = ("model.num_heads=4", "model.num_kv_heads=4")
    found = meshes.candidates(job(tmp_path, *heads, "mesh.data=2", "mesh.fsdp=2"))
    assert [tuple(each.values()) for each in found] == [
        *[(2, 2, 1), (1, 4, 1), (4, 1, 1)],
        *[(1, 2, 2), (2, 1, 2), (1, 1, 4)],
    ]


def test_what_the_devices_cannot_share_is_not_tried_and_other_axes_stay(tmp_path):
    assert {each["tensor"] for each in meshes.candidates(job(tmp_path, "model.mlp_width=65"))} == {1}
    of_two_slices = job(tmp_path, "mesh.slice=2", "model.mlp_width=65")
    assert [tuple(each.values()) for each in meshes.candidates(of_two_slices)] == [(2, 1, 1), (1, 2, 1)]
    assert meshes.changed(of_two_slices, {"data": 1, "fsdp": 2, "tensor": 1}).training.mesh.slice == 2


def test_a_configured_mesh_that_fits_no_devices_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="does not fit 4 devices"):
        meshes.candidates(job(tmp_path, "mesh.data=3"))


def plans(step_s, exchanged=1e6, peak=1e6):
    return {
        "fits": True,
        "step_s": step_s,
        "bound_by": "products",
        "exchanged": {"all-reduce": exchanged},
        "memory": {"peak": peak},
    }


def compared(tmp_path, of_fsdp):
    def planned(config):
        found = of_fsdp[config.training.mesh.fsdp]
        if isinstance(found, str):
            raise ConfigError("tiny", [found])
        return found

    return meshes.compared(job(tmp_path, "model.mlp_width=65"), planned)


def test_the_fastest_step_that_fits_is_proposed_and_of_equal_ones_that_with_the_fewest_exchanges(tmp_path):
    too_large = {"fits": False, "problem": "the step does not fit in the memory of a device: 20G exceeds 15.75G"}
    found = compared(tmp_path, {1: too_large, 2: plans(0.5), 4: plans(0.25, 3e6)})
    assert found["fits"]
    assert found["proposed"] == {"data": 1, "fsdp": 4, "tensor": 1}
    assert found["why"] == "the fastest step of the 2 that fit (0.25 s, bound by products, 3 MB exchanged by a device)"
    assert list(meshes.lines(found)) == [
        "mesh                                memory   exchanged        step",
        f"{'data 4 x fsdp 1 x tensor 1':<32}  {too_large['problem']}",
        f"{'data 1 x fsdp 4 x tensor 1':<32}      1 MB        3 MB      0.25 s *",
        f"{'data 2 x fsdp 2 x tensor 1':<32}      1 MB        1 MB       0.5 s",
        f"proposed         mesh.data=1 mesh.fsdp=4 mesh.tensor=1: {found['why']}",
    ]
    equal = compared(tmp_path, {1: plans(0.25, 5e6), 2: plans(0.25, 2e6), 4: plans(0.25, 3e6)})
    assert equal["proposed"]["fsdp"] == 2


def test_where_no_time_is_known_the_fewest_exchanges_count(tmp_path):
    unknown = {"step_s": None, "not_predicted": "there are no figures for this hardware (--on NAME)"}
    found = compared(tmp_path, {1: plans(0.0, 5e6) | unknown, 2: plans(0.0, 2e6) | unknown, 4: plans(0.0, 3e6) | unknown})
    assert found["proposed"]["fsdp"] == 2
    assert found["why"].endswith(f"the time of a step is not known: {unknown['not_predicted']}")
    assert list(meshes.lines(found))[1].endswith("not known")


def test_where_none_fits_all_say_why(tmp_path):
    found = compared(tmp_path, dict.fromkeys((1, 2, 4), "hosts.count = 4: too few"))
    assert (found["fits"], found["proposed"]) == (False, None)
    assert [line.split("  ")[-1].strip() for line in meshes.lines(found)][1:] == [
        *["hosts.count = 4: too few"] * 3,
        "none of them fits: take more devices",
    ]
