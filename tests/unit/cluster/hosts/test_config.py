import re
from pathlib import Path

import jax
import pytest

from cluster.hosts.capacity import Node, explain_missing, find_slices, whole_slices
from cluster.hosts.config import (
    NODE_ID_LABEL,
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    WORKER_ID_LABEL,
    HostsConfig,
    bundle_resources,
    chips_per_host,
    devices_per_host,
    max_slices,
    min_hosts,
    min_slices,
    num_devices,
    num_hosts,
    pod_type,
    slice_bundle_labels,
    slice_of,
    slots_of_slices,
    slots_of_whole_slices,
    strategy,
)
from cluster.hosts.process_env import megascale_env, process_env
from cluster.hosts.tpu import generation, topology_dims, topology_name
from gangway.surroundings import CPU_THREADS_PER_DEVICE, IN_ORDER

TPU = {"kind": "tpu", "accelerator": "v4", "topology": "2x2x2"}
TWO_SLICES = HostsConfig(**TPU, slices=2)


def node(name, total, free=None, **labels):
    return Node(node_id=name, ip="10.0.0.1", total=total, free=total if free is None else free, labels=labels)


def tpu_node(slice_name, worker, free_tpu=4.0, kind="v4-16"):
    labels = {SLICE_NAME_LABEL: slice_name, WORKER_ID_LABEL: str(worker), POD_TYPE_LABEL: kind}
    return node(f"{slice_name}/{worker}", {"CPU": 8.0, "TPU": 4.0}, {"CPU": 8.0, "TPU": free_tpu}, **labels)


def test_cpu_hosts_default_to_one_with_one_device():
    config = HostsConfig()
    assert (num_hosts(config), devices_per_host(config), num_devices(config)) == (1, 1, 1)
    assert bundle_resources(config) == {"CPU": 1.0}
    assert strategy(config) == "PACK"


def test_hosts_times_devices():
    config = HostsConfig(kind="gpu", count=4, devices_per_host=8, cpus_per_host=16)
    assert num_devices(config) == 32
    assert bundle_resources(config) == {"CPU": 16, "GPU": 8}
    assert strategy(config) == "STRICT_SPREAD"
    assert slice_of(config, 3) == 0
    assert strategy(HostsConfig(count=2, spread=True)) == "STRICT_SPREAD"


@pytest.mark.parametrize(
    ("accelerator", "topology", "hosts", "chips", "devices", "kind"),
    [
        ("v4", "2x2x1", 1, 4, 4, "v4-8"),
        ("v4", "2x2x2", 2, 4, 4, "v4-16"),
        ("v5p", "4x4x4", 16, 4, 4, "v5p-128"),
        ("v5e", "1x1", 1, 1, 1, "v5litepod-1"),
        ("v5e", "2x4", 1, 8, 8, "v5litepod-8"),
        ("v5litepod", "4x4", 4, 4, 4, "v5litepod-16"),
        ("TPU-V6E", "16x16", 64, 4, 4, "v6e-256"),
        ("v3", "4x4", 4, 4, 8, "v3-32"),
        ("v7x", "2x2x2", 2, 4, 8, "v7x-16"),
    ],
)
def test_tpu_hosts_follow_from_the_topology(accelerator, topology, hosts, chips, devices, kind):
    config = HostsConfig(kind="tpu", accelerator=accelerator, topology=topology)
    assert (num_hosts(config), chips_per_host(config), devices_per_host(config)) == (hosts, chips, devices)
    assert pod_type(config) == kind
    assert bundle_resources(config)["TPU"] == chips


def test_hosts_of_several_slices_are_counted_slice_by_slice():
    assert num_hosts(TWO_SLICES) == 4
    assert [slice_of(TWO_SLICES, host) for host in range(4)] == [0, 0, 1, 1]
    labels = slice_bundle_labels(TWO_SLICES, ["b", "a"])
    assert [(each[SLICE_NAME_LABEL], each[WORKER_ID_LABEL]) for each in labels] == [
        ("b", "0"),
        ("b", "1"),
        ("a", "0"),
        ("a", "1"),
    ]


def test_a_slice_of_one_host_is_known_by_its_type_alone():
    config = HostsConfig(kind="tpu", accelerator="v6e", topology="2x4")
    assert slice_bundle_labels(config, [None]) == [{POD_TYPE_LABEL: "v6e-8", WORKER_ID_LABEL: "0"}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "count = 0: expected a whole number of at least 1"),
        ({"spares": -1}, "spares = -1: expected a whole number of at least 0"),
        ({"devices_per_host": 0}, "devices_per_host = 0: expected a whole number of at least 1"),
        ({"cpus_per_host": 0}, "cpus_per_host = 0: expected more than 0"),
        ({"start_timeout_s": -1}, "start_timeout_s = -1: expected more than 0"),
        ({"replacement_timeout_s": 0}, "replacement_timeout_s = 0: expected more than 0"),
        ({"wait_for_max_s": -1}, "wait_for_max_s = -1: expected at least 0"),
        ({"min": 0, "max": 2}, "min = 0: expected a whole number of at least 1"),
        ({"min": 3, "max": 2}, "min = 3: expected at most max, which is 2"),
        ({"min": 3}, "min = 3: give max too, or count instead"),
        ({"max": 3}, "max = 3: give min too, or count instead"),
        ({"count": 2, "min": 1, "max": 3}, "count = 2, min = 1, max = 3: give either count, or min and max"),
        ({"topology": "2x2"}, "topology = 2x2: only TPU hosts have one; set kind: tpu, or leave topology out"),
        ({"slices": 2}, "slices = 2: only TPU hosts have one; set kind: tpu, or leave slices out"),
        ({"kind": "tpu"}, "kind: tpu needs accelerator (such as v5e) and topology (such as 4x4)"),
        ({"kind": "tpu", "accelerator": "v4"}, "kind: tpu needs accelerator (such as v5e) and topology (such as 4x4)"),
        ({"kind": "tpu", "accelerator": "v4", "topology": "2x0"}, "topology = '2x0': expected two or three sizes such as 4x4"),
        ({"kind": "tpu", "accelerator": "v5", "topology": "4x4"}, "accelerator = 'v5': not a TPU generation; known: v2, v3, "),
        ({"kind": "tpu", "accelerator": "v4", "topology": "2by2"}, "topology = '2by2': expected two or three sizes such as 4x4"),
        ({"kind": "tpu", "accelerator": "v4", "topology": "3x3x3"}, "27 chips do not fill hosts of 4 chips each"),
        (
            {"kind": "tpu", "accelerator": "v4", "topology": "2x2x2", "count": 4},
            "count = 4: 1 slice(s) 2x2x2 of v4 have 2; leave it out",
        ),
        ({**TPU, "min_slices": 0, "max_slices": 2}, "min_slices = 0: expected a whole number of at least 1"),
        ({**TPU, "min_slices": 3, "max_slices": 2}, "min_slices = 3: expected at most max_slices, which is 2"),
        ({**TPU, "max_slices": 2}, "max_slices = 2: give min_slices too, or slices instead"),
        (
            {**TPU, "slices": 2, "min_slices": 1, "max_slices": 3},
            "slices = 2, min_slices = 1, max_slices = 3: give either slices, or min_slices and max_slices",
        ),
        ({"min_slices": 1}, "min_slices = 1: only TPU hosts have one; set kind: tpu, or leave min_slices out"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HostsConfig(**fields)


def test_tpu_hosts_are_as_many_as_the_slice_has():
    message = (
        "min = 1: a TPU run grows and shrinks by whole slices; set min_slices instead\n"
        "max = 2: a TPU run grows and shrinks by whole slices; set max_slices instead"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        HostsConfig(kind="tpu", accelerator="v4", topology="2x2x2", min=1, max=2)


def test_a_tpu_run_counts_in_whole_slices():
    config = HostsConfig(**TPU, min_slices=2, max_slices=3, spares=1)
    assert (min_slices(config), max_slices(config)) == (2, 3)
    assert (min_hosts(config), num_hosts(config)) == (4, 6)
    assert (min_hosts(TWO_SLICES), num_hosts(TWO_SLICES)) == (4, 4)
    assert slots_of_whole_slices(config, [0, 2, 3, 5, 6, 7]) == {2, 3, 6, 7}
    assert slots_of_slices(config, [3, 4]) == {2, 3, 4, 5}


def test_other_runs_count_single_hosts():
    config = HostsConfig(min=1, max=4)
    assert slots_of_whole_slices(config, [0, 3]) == slots_of_slices(config, [0, 3]) == {0, 3}


def test_everything_that_is_wrong_is_reported_at_once():
    with pytest.raises(ValueError, match="spares") as error:
        HostsConfig(count=0, spares=-1, start_timeout_s=0, topology="2x2", min=2)
    assert [line.split(" = ")[0] for line in str(error.value).splitlines()] == [
        "count",
        "spares",
        "start_timeout_s",
        "topology",
        "count",
    ]
    with pytest.raises(ValueError, match="not a TPU generation") as error:
        HostsConfig(kind="tpu", accelerator="v5", topology="2by2", min=1)
    assert [line.split(" = ")[0] for line in str(error.value).splitlines()] == ["min", "accelerator", "topology"]


def test_a_run_of_any_number_of_hosts_between_two():
    config = HostsConfig(min=2, max=4, devices_per_host=2)
    assert (min_hosts(config), num_hosts(config), num_devices(config)) == (2, 4, 8)
    assert (min_hosts(HostsConfig(count=3)), min_hosts(HostsConfig()), min_hosts(TWO_SLICES)) == (3, 1, 4)
    text = explain_missing(HostsConfig(min=2, max=9), [node("a", {"CPU": 1.0})])
    assert "asked for 2 hosts" in text
    assert "set hosts.min to at most 1" in text


def test_the_compiler_has_names_of_its_own_for_some_topologies():
    assert [topology_name(name, "2x2x2") for name in ("v5p", "v7x", "tpu7x")] == ["v5p:2x2x2", "tpu7x:2x2x2", "tpu7x:2x2x2"]
    assert topology_name("v5litepod", "4x4") == "v5e:4x4"


def test_names_of_generations():
    assert [generation(name) for name in ("v5e", "TPU-V5P", "tpu7x")] == ["v5litepod", "v5p", "v7x"]
    with pytest.raises(ValueError, match="did you mean v6e"):
        generation("v66e")
    assert topology_dims("2X2x4") == (2, 2, 4)


def test_environment_of_a_cpu_process():
    config = HostsConfig(count=2, devices_per_host=4, env={"XLA_FLAGS": "--xla_dump_to=d", "NAME": "value"})
    env = process_env(config, 1, "cache")
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["XLA_FLAGS"] == f"{IN_ORDER} --xla_dump_to=d --xla_force_host_platform_device_count=4"
    assert env["JAX_COMPILATION_CACHE_DIR"] == "cache/host-0001"
    assert env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert env["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] == "-1"
    assert env["NAME"] == "value"
    assert env["NPROC"] == "16"  # threads for four devices that wait for each other, on however few cores
    assert "NPROC" not in process_env(HostsConfig(count=2), 0, "cache")
    assert process_env(HostsConfig(devices_per_host=4, env={"NPROC": "5"}), 0, "cache")["NPROC"] == "5"


def test_these_tests_have_threads_for_all_their_devices():
    """With a thread for each, devices that wait for each other beside each other lock up, and XLA ends the whole test run."""
    threads = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
    assert threads.count("tf_XLAEigen") >= CPU_THREADS_PER_DEVICE * jax.device_count() > CPU_THREADS_PER_DEVICE


def test_environment_of_accelerators():
    env = process_env(TWO_SLICES, 3, "cache")
    assert env["JAX_COMPILATION_CACHE_DIR"] == "cache"
    assert env["JAX_PLATFORMS"] == "tpu,cpu"
    assert "XLA_FLAGS" not in env
    assert process_env(HostsConfig(kind="gpu", env={"JAX_PLATFORMS": "rocm"}), 0, "cache")["JAX_PLATFORMS"] == "rocm"


def test_slices_find_each_other():
    assert megascale_env(0, 1, "10.0.0.1") == {}
    assert megascale_env(1, 2, "10.0.0.1", 9000) == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_PORT": "9000",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }


def test_missing_hosts_are_explained():
    nodes = [node("a", {"CPU": 4.0}, {"CPU": 1.0}), node("b", {"CPU": 4.0})]
    text = explain_missing(HostsConfig(count=6, cpus_per_host=2), nodes)
    assert text == (
        "asked for 6 hosts with CPU 2 each; CPU: 12 needed, the cluster has 8, 5 free: 7 missing; "
        "2 machine(s): room for 4 hosts when idle, for 2 hosts now; "
        "add machines to the cluster, or set hosts.count to at most 4, or hosts.cpus_per_host lower"
    )


def test_machines_that_are_in_use_are_worth_waiting_for():
    nodes = [node("a", {"CPU": 4.0, "GPU": 8.0}, {"CPU": 4.0, "GPU": 0.0}), node("b", {"CPU": 4.0, "GPU": 8.0})]
    text = explain_missing(HostsConfig(kind="gpu", count=2, devices_per_host=8), nodes)
    assert "asked for 2 hosts with CPU 1, GPU 8 each, on different machines" in text
    assert "GPU: 16 needed, the cluster has 16, 8 free: 8 missing" in text
    assert text.endswith("wait for the machines that are in use, or ask for less")


def test_one_big_machine_is_not_two_machines():
    text = explain_missing(HostsConfig(count=2, spread=True), [node("a", {"CPU": 16.0}, **{NODE_ID_LABEL: "a"})])
    assert "room for 1 host when idle" in text
    assert "set hosts.count to at most 1" in text


def test_avoided_machines_do_not_count():
    text = explain_missing(HostsConfig(count=1), [node("a", {"CPU": 16.0})], avoid_nodes=["a"])
    assert "CPU: 1 needed, the cluster has 0, 0 free: 1 missing; 0 machine(s) (1 more avoided)" in text


def test_slices_that_are_whole_broken_busy():
    nodes = [tpu_node("a", 1), tpu_node("a", 0), tpu_node("b", 1), tpu_node("c", 0, free_tpu=0.0), tpu_node("c", 1)]
    nodes.append(tpu_node("other", 0, kind="v4-32"))
    states = {state.name: (state.missing_workers, state.busy) for state in find_slices(TWO_SLICES, nodes)}
    assert states == {"a": ((), False), "b": ((0,), False), "c": ((), True)}
    assert whole_slices(TWO_SLICES, nodes) == ["a"]
    assert whole_slices(TWO_SLICES, nodes, avoid_nodes=["a/1"]) == []
    text = explain_missing(TWO_SLICES, nodes)
    assert "asked for 2 slice(s) 2x2x2 of v4 (type v4-16: 2 hosts with CPU 1, TPU 4 each)" in text
    assert "the cluster has 3 (a: free, b: worker 0 missing, c: in use); 1 slice(s) missing" in text
    assert "a: has a host to avoid" in explain_missing(TWO_SLICES, nodes, avoid_nodes=["a/1"])


def test_no_slice_of_the_type():
    text = explain_missing(TWO_SLICES, [tpu_node("other", 0, kind="v4-32"), node("a", {"CPU": 1.0})])
    assert "the cluster has none; TPU types it has: v4-32; add such slices, or change topology" in text


@pytest.mark.parametrize("path", ["/", "//", "/.", ".", "", "logs", "~", "~/", "~/.", "~/x/..", "gs://bucket/logs"])
def test_a_folder_that_holds_other_things_than_logs_is_refused(path):
    with pytest.raises(ValueError, match=r"^log_dir = .*expected a folder for logs alone, such as ~/.cache/gangway/logs"):
        HostsConfig(log_dir=path)


def test_folders_above_the_home_folder_and_links_to_it_are_refused_too(tmp_path, monkeypatch):
    (tmp_path / "homes" / "me" / "logs").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "homes" / "me"))
    (tmp_path / "link").symlink_to(tmp_path / "homes" / "me")
    for path in (tmp_path, tmp_path / "homes", tmp_path / "link"):
        with pytest.raises(ValueError, match="which holds other things than logs"):
            HostsConfig(log_dir=str(path))
    assert HostsConfig(log_dir="~/logs").log_dir == "~/logs"
    assert HostsConfig(log_dir=str(tmp_path / "scratch")).log_dir == str(tmp_path / "scratch")
