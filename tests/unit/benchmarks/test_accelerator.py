"""The accelerator protocol: which measurements there are, what is kept of each, and the table. Whether they run is seen in
tests/multihost/test_accelerator.py."""

import json

import pytest

from benchmarks import accelerator, accelerator_table
from benchmarks.accelerator import DONE, FAILED, TIMED_OUT, OfSomethingElse, Results, measure_all
from benchmarks.accelerator_measures import Context, flip, measurements, tpu_topology
from benchmarks.accelerator_sizes import LARGE, LITTLE_MEMORY, SMALL, arguments, sizes_for

H100 = {
    **{"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 1, "memory_bytes": 78e9, "client": "cuda 12"},
    **{"versions": {"jax": "0.10"}, "xla_flags": "", "commit": "abc"},
}
SETTINGS = {"small": False, "overrides": []}


def names_on(platform, **changes):
    return [one.name for one in measurements(False, {**H100, "platform": platform, **changes})]


def test_each_platform_has_the_kernels_that_it_can_run():
    of_gpu = {name.split()[1] for name in names_on("gpu") if name.startswith("kernel ")}
    of_tpu = {name.split()[1] for name in names_on("tpu") if name.startswith("kernel ")}
    assert of_gpu == {"xla", "blockwise", "cudnn"}
    assert of_tpu == {"xla", "blockwise", "splash"}


def test_deterministic_flags_are_those_of_a_gpu_so_a_tpu_has_one_resume():
    assert [name for name in names_on("gpu") if name.startswith("resume")] == ["resume", "resume, deterministic"]
    assert [name for name in names_on("tpu") if name.startswith("resume")] == ["resume"]


def test_both_lengths_are_measured_packed_and_not():
    expected = ["speed 2048", "speed 2048 packed", "speed 8192", "speed 8192 packed"]
    assert [name for name in names_on("gpu") if name.startswith("speed ")] == expected
    assert [name.replace("plan", "speed") for name in names_on("gpu") if name.startswith("plan ")] == expected


def test_the_limits_of_what_must_be_measured_first_leave_time_for_the_rest():
    first = [one for one in measurements(False, H100) if one.name.startswith(("device", "speed"))]
    assert sum(one.limit_s for one in first) < 25 * 60


def test_a_device_with_little_memory_gets_fewer_tokens_and_computes_activations_again():
    assert sizes_for(False, H100) is LARGE
    assert sizes_for(False, {**H100, "memory_bytes": 16e9}) is LITTLE_MEMORY
    assert sizes_for(False, {**H100, "memory_bytes": None}) is LITTLE_MEMORY
    assert sizes_for(True, H100) is SMALL


def test_the_run_is_a_llama_of_1b_in_bfloat16_with_as_many_rows_as_devices_need():
    made = arguments(LARGE, 4, "runs", name="one", length=8192, packed=True, overrides=("model.remat=full",))
    assert (made.dtype, made.data.packing, made.model.remat) == ("bfloat16", "concat", "full")
    assert made.global_batch_size == 4 * 16_384 // 8192
    assert (made.model.width, made.model.num_layers, made.model.vocab_size) == (2048, 16, 128_256)
    assert arguments(LARGE, 1, "runs", name="one", length=2048).data.packing is None


def test_flags_are_added_to_those_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    env = Context(False, (), tmp_path, tmp_path, H100).env("--xla_b=2")
    assert env["XLA_FLAGS"] == "--xla_a=1 --xla_b=2"
    assert env["JAX_PLATFORMS"] == "cuda,cpu"


def test_a_topology_is_named_as_the_compiler_names_it():
    assert tpu_topology("TPU v5 lite", 8) == "v5e:2x4"
    assert tpu_topology("TPU v5p", 4) == "v5:1x2x2" or tpu_topology("TPU v5p", 4).startswith("v5")
    with pytest.raises(ValueError, match="no topology is known for 'TPU v99': expected one of TPU v5 lite, "):
        tpu_topology("TPU v99", 1)


def test_a_flipped_byte_is_one_byte(tmp_path):
    path = tmp_path / "program"
    path.write_bytes(b"abcde")
    flip(path)
    assert path.read_bytes() == b"ab" + bytes([ord("c") ^ 0xFF]) + b"de"


# -------------------------------------------------------------------------------------------------------------- what is kept


class Machine:
    """Stands for the processes that measure: says what it is told to, and remembers what it was asked."""

    def __init__(self, path=None, device=H100, **records):
        self.path, self.device, self.records, self.asked = path, device, records, []
        self.now_s, self.each_s, self.kept_before = 0.0, 1.0, []

    def __call__(self, measurement, limit_s):
        self.asked.append(measurement.name)
        self.now_s += self.each_s
        if self.path is not None and self.path.exists():
            self.kept_before.append(list(json.loads(self.path.read_text())["measurements"]))
        if measurement.name == "device":
            return {"status": DONE, "result": self.device}
        return dict(self.records.get(measurement.name.replace(" ", "_"), {"status": DONE, "result": {}}))

    def measure(self, results, deadline_s=1e9):
        return measure_all(False, results, self, deadline_s=deadline_s, clock=lambda: self.now_s)


def test_each_result_is_in_the_file_before_the_next_measurement_begins(tmp_path):
    path = tmp_path / "results.json"
    machine = Machine(path)
    assert machine.measure(Results(path, SETTINGS)) == []
    assert machine.kept_before == [machine.asked[:number] for number in range(1, len(machine.asked))]


def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path):
    machine = Machine(speed_2048={"status": FAILED, "error": "exit status 1: broken"})
    results = Results(tmp_path / "results.json", SETTINGS)
    assert machine.measure(results) == []
    assert results.records["speed 2048"]["status"] == FAILED
    assert results.records["plan 8192 packed"]["status"] == DONE


def test_a_second_start_measures_what_is_missing_and_on_request_what_failed(tmp_path):
    path = tmp_path / "results.json"
    first = Machine(speed_2048={"status": FAILED, "error": "exit status 1: broken"})
    left = first.measure(Results(path, SETTINGS), deadline_s=24.0)
    assert left
    assert left[0] not in first.asked
    second = Machine()
    assert second.measure(Results(path, SETTINGS)) == []
    assert second.asked == ["device", *left]
    again = Results(path, SETTINGS)
    again.forget_failed()
    third = Machine()
    third.measure(again)
    assert third.asked == ["device", "speed 2048"]


def test_what_the_end_of_the_time_cut_short_is_measured_anew_and_what_its_own_limit_ended_is_not(tmp_path):
    timed_out = {"status": TIMED_OUT, "error": "not done"}
    machine = Machine(speed_2048=timed_out, speed_8192=timed_out)
    machine.each_s = 200.0
    results = Results(tmp_path / "results.json", SETTINGS)
    left = machine.measure(results, deadline_s=750.0)  # of the 240 s of the third, 150 are left
    assert results.records["speed 2048"]["status"] == TIMED_OUT
    assert left[0] == "speed 8192"
    assert "speed 8192" not in results.records


def test_without_a_device_nothing_else_is_tried(tmp_path):
    results = Results(tmp_path / "results.json", SETTINGS)

    def run(measurement, limit_s):
        assert measurement.name == "device"
        return {"status": FAILED, "error": "no GPU"}

    assert measure_all(False, results, run, deadline_s=1e9) == []
    assert list(results.records) == ["device"]


def test_results_of_other_settings_or_another_device_are_refused(tmp_path):
    path = tmp_path / "results.json"
    Machine().measure(Results(path, SETTINGS))
    with pytest.raises(OfSomethingElse, match=r"results of \{'small': False.*these would be of \{'small': True.*another --out"):
        Results(path, {**SETTINGS, "small": True})
    with pytest.raises(OfSomethingElse, match=r"results of kind = 'NVIDIA H100 80GB HBM3', and here it is 'NVIDIA H200'"):
        Machine(device={**H100, "kind": "NVIDIA H200"}).measure(Results(path, SETTINGS))


def test_an_override_without_a_value_is_refused(capsys):
    with pytest.raises(SystemExit):
        accelerator.parse(["model.remat"])
    assert "model.remat: expected settings as key=value" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------------ the table


def speed_of(rate, mfu, peak):
    figures = {"kernel": "cudnn", "tokens_per_s": rate, "step_time_s": 0.3, "mfu": mfu, "peak_bytes": peak}
    return {"status": DONE, "result": figures}


RECORDS = {
    "device": {"status": DONE, "result": H100},
    "speed 2048": speed_of(50_000.0, 0.56, 40e9),
    "speed 2048 packed": speed_of(47_000.0, 0.53, 40e9),
    "speed 8192": {"status": "out of memory", "error": "exit status 1: much\nRESOURCE_EXHAUSTED: 9 | 8 GB"},
    "plan 2048": {"status": DONE, "result": {"memory": {"peak": 43e9}}},
    "plan 2048 packed": {"status": DONE, "result": {"memory": {"peak": 45e9}, "memory_of_device": {"peak": 41e9}}},
    "resume": {
        "status": DONE,
        "result": {
            **{"saved_step": 5, "killed_after_step": 9, "resumed_step": 5, "steps_compared": 8, "recovery_s": 5.2},
            **{"same_losses": True, "same_parameters": False, "same_samples": True, "phases_s": {"halt": 0.2, "restore": 5.0}},
        },
    },
}


def test_each_goal_is_met_not_met_or_not_known():
    found = {goal: (shown, is_met) for goal, shown, is_met in accelerator_table.goals(RECORDS)}
    assert found["MFU at 2048 at least 55.0 %"] == ("56.0 %", True)
    assert found["MFU at 2048 packed at least 55.0 %"] == ("53.0 %", False)
    assert found["MFU at 8192 at least 55.0 %"] == ("not known", None)
    assert found["packed at 2048 at least 95.0 % of not packed"] == ("94.0 %", False)
    assert found["packed at 8192 at least 95.0 % of not packed"] == ("not known", None)
    assert found["plan at 2048 within 10.0 % of the measured memory"] == ("+7.5 %", True)
    assert found["plan at 2048 packed within 10.0 % of the measured memory"] == ("+12.5 %", False)
    assert found["kill to next step at most 5 s"] == ("5.20 s", False)


def test_the_table_tells_figures_and_what_failed():
    lines = accelerator_table.table(RECORDS).splitlines()
    assert lines[0].startswith("1 x NVIDIA H100 80GB HBM3 (gpu), 78 GB each; cuda 12; jax 0.10; commit abc; XLA_FLAGS: none.")
    assert "| 2048 | cudnn | 50,000 | 300 ms | 56.0 % | 40 GB | 43 GB | 1.07 | as planned |" in lines
    assert "| 2048 packed | cudnn | 47,000 | 300 ms | 53.0 % | 40 GB | 45 GB | 1.12 | 41 GB |" in lines
    assert "| 8192 | out of memory |  |  |  |  |  |  |  |" in lines
    assert "| speed 8192 | out of memory: RESOURCE_EXHAUSTED: 9 / 8 GB |" in lines
    assert "| resume | 0.20 | 5.00 | **5.20** |" in lines
    (resumed,) = (line for line in lines if line.startswith("| killed and resumed "))
    assert "losses of 8 steps the same, bit for bit, parameters **not the same**, samples the same" in resumed
