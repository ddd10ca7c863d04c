"""The arithmetic of a plan, beside published figures."""

from __future__ import annotations

import pytest

from orchestrator.planning import hardware, roofline
from orchestrator.planning.hardware import DEVICES
from tests import ROOT

PUBLISHED = [
    # (device, parameters, devices, tokens of a step and device, published MFU): MaxText's and AXLearn's tables.
    ("v5p", 70e9, 512, 8192, 0.654),
    ("v5p", 70e9, 1024, 8192, 0.680),
    ("v5p", 70e9, 1024, 8192, 0.644),
    ("v5p", 32e9, 128, 16384, 0.7147),
    ("v5e", 32e9, 256, 16384, 0.6686),
    ("v5e", 32e9, 8192, 16384, 0.604),
    ("v6e", 70e9, 256, 8192, 0.5033),
    ("v6e", 8e9, 256, 8192, 0.4546),
    ("v6e", 405e9, 256, 8192, 0.3855),
    ("h100", 70e9, 512, 8192, 0.400),
    ("h100", 70e9, 512, 8192, 0.472),
    ("h100", 405e9, 16384, 8192, 0.43),
]
FURTHER = [("h100", 7e9, 64, 8192, 0.547), ("h100", 7e9, 64, 8192, 0.542), ("h100", 405e9, 16384, 8192, 0.38)]
"""Published too, and further away: on H100 they differ more from each other. The range that a plan tells has them."""


def expected(name, parameters, devices, tokens):
    work = roofline.Work(6 * parameters * tokens, 12 * parameters / devices, 6 * parameters)
    return roofline.utilization(work, DEVICES[name])


@pytest.mark.parametrize(("name", "parameters", "devices", "tokens", "published"), PUBLISHED)
def test_the_utilization_is_within_fifteen_percent_of_what_was_published(name, parameters, devices, tokens, published):
    assert expected(name, parameters, devices, tokens) == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("name", "parameters", "devices", "tokens", "published"), [*PUBLISHED, *FURTHER])
def test_the_range_has_what_was_published(name, parameters, devices, tokens, published):
    low, high = DEVICES[name].spread
    assert low - 0.01 <= published <= high + 0.01


def test_the_table_of_the_benchmarks_is_what_is_computed_here():
    text = (ROOT / "docs" / "benchmarks.md").read_text().split("## What a plan predicts", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("| ")][1:]
    told = [
        (row[0], float(row[2]) * 1e9, *(int(cell.replace(",", "")) for cell in row[3:5]), float(row[5]) / 100) for row in rows
    ]
    assert told == [(name, *rest, pytest.approx(published)) for name, *rest, published in [*PUBLISHED, *FURTHER]]
    for row, (*about, published) in zip(rows, told, strict=True):
        assert float(row[6]) == pytest.approx(100 * expected(*about), abs=0.05)
        assert int(row[7]) == round(100 * (expected(*about) / published - 1))
    assert sum(abs(int(row[7])) > 15 for row in rows) == 2  # as the text says


def test_the_slowest_part_counts_and_is_named():
    device = DEVICES["h100"]
    products = roofline.Work(1e15, 1e9, 1e9)
    assert roofline.step_time(products, device).bound_by == "products"
    memory = roofline.step_time(roofline.Work(1e9, 60e9, 1e6), device)
    assert (memory.bound_by, memory.seconds) == ("memory", pytest.approx(2 * 60e9 / 3350e9))
    within = roofline.step_time(roofline.Work(1e9, 1e6, 90e9), device)
    beyond = roofline.step_time(roofline.Work(1e9, 1e6, 0, network_bytes=90e9), device)
    assert (within.bound_by, within.seconds, beyond.seconds) == ("exchanges", 0.2, 1.8)
    both = roofline.step_time(roofline.Work(1e9, 1e6, 90e9, network_bytes=90e9), device)
    assert both.seconds == pytest.approx(2.0)


def test_gradients_are_summed_over_slices_in_two_passes():
    assert roofline.summed_over_slices(8e9, 2) == 8e9
    assert roofline.summed_over_slices(8e9, 4) == 12e9
    assert roofline.summed_over_slices(8e9, 1) == 0


def test_goodput_falls_with_failures_and_with_rare_saves():
    alone = roofline.expected_goodput(8, 600.0)
    many = roofline.expected_goodput(16384, 600.0)
    assert alone > 0.999
    assert many == pytest.approx(3.05 * 3600 / (3.05 * 3600 + 360), abs=0.005)  # a failure in some three hours
    assert roofline.expected_goodput(16384, 60.0) > many > roofline.expected_goodput(16384, 3600.0)
    assert roofline.expected_goodput(8, 600.0, hours_between_failures=1.0) == pytest.approx(3600 / 3960)
    # By hand: a failure in 50,000 / 16,384 hours, and the root of 2 * 10 s * 10,986 s.
    assert roofline.best_save_interval_s(16384, 10.0) == pytest.approx(469, abs=2)


@pytest.mark.parametrize(
    ("name", "topology"),
    [("v5e-256", "16x16"), ("v5e-8", "2x4"), ("v6e-4", "2x2"), ("v5p-512", "8x8x8"), ("v5p-16", "2x2x4"), ("v4-4", "2x2x1")],
)
def test_a_slice_has_the_most_square_topology(name, topology):
    settings = hardware.overrides_for(name)
    assert f"hosts.topology={topology}" in settings
    assert f"hosts.accelerator={name.partition('-')[0]}" in settings


def test_slices_and_machines_by_name():
    assert "hosts.slices=4" in hardware.overrides_for("v5p-512x4")
    assert hardware.overrides_for("h100-8x16") == ["hosts.kind=gpu", "hosts.count=16", "hosts.devices_per_host=8"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-100", "expected a power of two of chips"),
        ("h100-64", "expected a name such as h100-8x16"),
        ("v5f-256", "did you mean v5"),
        ("tesla", "known: v4, v5e, v5p, v6e, a100, h100, h200"),
    ],
)
def test_another_name_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        hardware.overrides_for(name)


def test_there_are_no_figures_for_a_cpu():
    assert hardware.of("cpu", None, None) is None
    assert hardware.of("tpu", "v5litepod", None).name == "v5e"
    assert hardware.of("gpu", None, "h100-8x16").name == "h100"
    assert hardware.of("gpu", None, None) is None
