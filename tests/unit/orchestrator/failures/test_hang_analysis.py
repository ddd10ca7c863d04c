"""The samples in `data/stacks` were taken of real processes: three hosts of a gang, one of which was made to hang."""

import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.failures.hang_analysis import WAITING, HostStacks, blame, parse, position_of, short_name
from tests import ROOT

SAMPLES = ROOT / "tests/unit/data/stacks"
USER = "/home/me/run/my_callbacks.py"


def sample(name, hosts=(0, 1, 2), suffix="", **more):
    """The hosts of a sample; `states` and `batches` by host."""
    states, batches = more.get("states", {}), more.get("batches", {})
    return [
        HostStacks(
            host=host,
            text=(SAMPLES / name / f"host-{host}{suffix}.txt").read_text(),
            state=states.get(host, "S (sleeping)"),
            batch_index=batches.get(host),
        )
        for host in hosts
    ]


REAL = {
    "asleep in a user's callback": (
        sample("sleep_in_a_callback"),
        "train",
        (1, "sleep_forever (my_callbacks.py:14)", "it waits for no other host"),
    ),
    "asleep in a user's callback, two hosts": (
        sample("sleep_in_a_callback", (0, 1)),
        "train",
        (1, "sleep_forever (my_callbacks.py:14)", "it waits for no other host"),
    ),
    "asleep in a user's callback, as faulthandler tells it": (
        sample("sleep_in_a_callback", suffix=".faulthandler"),
        "train",
        (1, "sleep_forever (my_callbacks.py:14)", "it waits for no other host"),
    ),
    "stopped by a signal": (
        sample("stopped", states={2: "T (stopped)"}),
        "train",
        (2, "read (trainers/loop/inflight.py:37)", "its process is frozen, in state T (stopped)"),
    ),
    "stopped by a signal, two hosts": (
        sample("stopped", (0, 2), states={2: "T (stopped)"}),
        "train",
        (2, "read (trainers/loop/inflight.py:37)", "its process is frozen, in state T (stopped)"),
    ),
    "alone in an exchange of all hosts": (
        sample("alone_in_a_barrier"),
        "train",
        (1, "on_step_end (my_callbacks.py:24)", "it alone stands there"),
    ),
    "alone in an exchange of all hosts, two hosts": (
        sample("alone_in_a_barrier", (0, 1), batches={0: 6, 1: 4}),
        "train",
        (1, "on_step_end (my_callbacks.py:24)", "it is furthest behind: at batch 4, the others at 6"),
    ),
    "alone in an exchange, two hosts, nothing else known": (
        sample("alone_in_a_barrier", (0, 1)),
        "train",
        (None, None, "could not identify one host"),
    ),
    "a save that never ends": (
        sample("stuck_save"),
        "save",
        (1, "write_never (my_callbacks.py:28)", "it waits for no other host"),
    ),
    "a save that never ends, on the host that leads it": (
        [HostStacks(host=2 - seen.host, text=seen.text) for seen in sample("stuck_save", (1, 2))],
        "save",
        (1, "write_never (my_callbacks.py:28)", "it waits for no other host"),
    ),
    "a save that never ends, as faulthandler tells it": (
        sample("stuck_save", suffix=".faulthandler"),
        "save",
        (1, "write_never (my_callbacks.py:28)", "it waits for no other host"),
    ),
    "a write that never ends, while the loop waits for the save": (
        sample("stuck_write"),
        "train",
        (1, "write_never (my_callbacks.py:28)", "it waits for no other host"),
    ),
    "a storage that does not answer": (
        sample("silent_storage"),
        "save",
        (
            1,
            "write (trainers/checkpoint/array_io.py:41), in join (orbax/checkpoint/_src/futures/future.py:430)",
            "it waits for no other host",
        ),
    ),
    "all wait in the same place": (
        sample("sleep_in_a_callback", (0, 2)),
        "train",
        (None, "read (trainers/loop/inflight.py:37)", "could not identify one host"),
    ),
}


def installed(hosts):
    """The same hosts with our code where pip puts it."""
    here, there = "/home/me/run/trainers/", "/env/lib/python3.11/site-packages/trainers/"
    return [replace(host, text=host.text and host.text.replace(here, there)) for host in hosts]


@pytest.mark.parametrize("name", REAL)
def test_the_guilty_host_and_its_line_in_real_stacks(name):
    hosts, phase, expected = REAL[name]
    for order in (hosts, hosts[::-1], installed(hosts)):
        found = blame(order, phase)
        assert (found.host, found.line, found.why) == expected


def test_equal_stacks_are_reported_once():
    groups = blame(sample("sleep_in_a_callback"), "train").groups
    assert [(group["hosts"], group["line"], group["waits_on"]) for group in groups] == [
        ([0, 2], "read (trainers/loop/inflight.py:37)", "the device"),
        ([1], "sleep_forever (my_callbacks.py:14)", None),
    ]
    assert groups[1]["frames"][:3] == [
        "sleep_forever (my_callbacks.py:14)",
        "on_step_end (my_callbacks.py:22)",
        "call (trainers/callbacks/callback.py:54)",
    ]


def test_both_ways_to_take_stacks_tell_the_same():
    for name in ("sleep_in_a_callback", "stuck_save"):
        one, other = (sample(name, suffix=suffix) for suffix in ("", ".faulthandler"))
        assert blame(one, "save").groups == blame(other, "save").groups


def stack(*frames, name="MainThread", thread="7"):
    return f'Thread {thread} (idle): "{name}"\n' + "".join(f"    {frame}\n" for frame in frames)


DEVICE = stack(
    "wait_for_device (/home/me/run/trainers/parallel/platform.py:43)",
    "Agreed.read (/home/me/run/trainers/loop/inflight.py:37)",
    "Loop.run (/home/me/run/trainers/loop/train_loop.py:77)",
)
AGREE = stack("_get (/home/me/run/trainers/runtime/multihost.py:60)", "restore (/home/me/run/trainers/checkpoint/manager.py:130)")
BUSY = stack("load (/home/me/run/loader.py:5)", f"on_step_begin ({USER}:9)")
SPIN = stack(f"spin ({USER}:3)")


def hosts(*texts, states=(), batches=()):
    rows = [{"host": host, "text": text} for host, text in enumerate(texts)]
    for row, state in zip(rows, states, strict=False):
        row["state"] = state
    for row, batch in zip(rows, batches, strict=False):
        row["batch_index"] = batch
    return [HostStacks(**row) for row in rows]


MADE_UP = {
    "frozen wins over busy": (hosts(DEVICE, BUSY, DEVICE, states=("S (sleeping)", "S", "t (tracing stop)")), 2, "frozen"),
    "two are frozen: both are told": (
        hosts(DEVICE, DEVICE, DEVICE, states=("T (stopped)", "S", "T (stopped)")),
        0,
        "in state T (stopped), like host 2",
    ),
    "frozen, without stacks": (hosts(DEVICE, None, states=("S", "T (stopped)")), 1, "frozen"),
    "in a system call that does not return": (
        hosts(DEVICE, DEVICE, DEVICE, states=("S", "D (disk sleep)", "S")),
        1,
        "waits for no other host",
    ),
    "the only one without a stack": (hosts(DEVICE, "no stacks of process 7", DEVICE), 1, "it alone shows no stack"),
    "one was not looked at, the others wait": (hosts(DEVICE, None, DEVICE), None, "could not identify one host"),
    "one was looked at, and is busy": (hosts(None, BUSY, None), 1, "waits for no other host"),
    "two are busy, one of them elsewhere": (hosts(DEVICE, BUSY, SPIN, DEVICE), 1, "hosts 1, 2 wait for no other host"),
    "two are busy, one is behind": (hosts(DEVICE, BUSY, BUSY, batches=(9, 9, 7)), 2, "furthest behind: at batch 7"),
    "all are busy at the same place": (hosts(BUSY, BUSY, BUSY), None, "could not identify one host"),
    "all are busy, one elsewhere": (hosts(BUSY, SPIN, BUSY), 1, "it alone stands there"),
    "two busy hosts, each elsewhere": (hosts(BUSY, SPIN), None, "could not identify one host"),
    "all wait, one is behind": (
        hosts(DEVICE, DEVICE, DEVICE, batches=(9, 7, 9)),
        1,
        "furthest behind: at batch 7, the others at 9",
    ),
    "all wait, two are behind": (hosts(DEVICE, DEVICE, DEVICE, batches=(7, 7, 9)), None, "could not identify one host"),
    "all wait, each for something else": (hosts(DEVICE, AGREE), None, "could not identify one host"),
    "a single host": (hosts(BUSY), 0, "waits for no other host"),
    "a single host in the device": (hosts(DEVICE), None, "could not identify one host"),
    "nothing is known": (hosts(None, None), None, "could not identify one host"),
    "there are no hosts": ([], None, "could not identify one host"),
}


@pytest.mark.parametrize("name", MADE_UP)
def test_blame(name):
    seen, host, why = MADE_UP[name]
    found = blame(seen, "train")
    assert found.host == host
    assert why in found.why


ORBAX = "/usr/lib/python3.11/site-packages/orbax/checkpoint"
IN_LOOP = stack(
    "EpollSelector.select (/usr/lib/python3.11/selectors.py:468)",
    f"run_sync ({ORBAX}/_src/asyncio_utils.py:150)",
    name="array_type_handler",
    thread="8",
)
ASKING = stack(
    "Thread.join (/usr/lib/python3.11/threading.py:1119)",
    f"CommitFuture.result ({ORBAX}/_src/futures/future.py:497)",
    "ArrayFiles.write (/home/me/run/trainers/checkpoint/array_io.py:40)",
    name="checkpoint",
    thread="9",
)
WAITS_FOR_THREAD = stack(
    "Thread.join (/usr/lib/python3.11/threading.py:1119)",
    "CheckpointManager.wait (/home/me/run/trainers/checkpoint/manager.py:117)",
    "BaseTrainer._save (/home/me/run/trainers/base.py:326)",
)
WAITS_FOR_BATCH = stack(
    "wait (/usr/lib/python3.11/threading.py:327)",
    "result (/usr/lib/python3.11/concurrent/futures/_base.py:451)",
    "StepAddressedLoader.batch (/home/me/run/trainers/data/loader.py:148)",
    "Loop.run (/home/me/run/trainers/loop/train_loop.py:77)",
)
READING = stack(
    *(f"Mine.__getitem__ ({USER}:50)", "StepAddressedLoader._load (/home/me/run/trainers/data/loader.py:120)"),
    *("_worker (/usr/lib/python3.11/concurrent/futures/thread.py:83)",),
    name="loader_0",
    thread="11",
)
USERS_THREAD = stack(f"prefetch ({USER}:40)", name="prefetch", thread="9")
POOL = stack("_worker (/usr/lib/python3.11/concurrent/futures/thread.py:81)", name="checkpoint_pool", thread="9")
JOINING = stack(
    "State.initialize (/usr/lib/python3.11/site-packages/jax/_src/distributed.py:111)",
    "join (/home/me/run/trainers/runtime/distributed.py:47)",
)
IMPORTING = stack(
    "_call_with_frames_removed (<frozen importlib._bootstrap>:241)",
    "main (/home/me/run/trainers/worker.py:57)",
)

STANDINGS = {
    "a save waits for the storage": (DEVICE + IN_LOOP + ASKING, "save", "write (trainers/checkpoint/array_io.py:40)", None),
    "a loop that waits for its save stands where the save does": (
        WAITS_FOR_THREAD + IN_LOOP + ASKING,
        "train",
        "write (trainers/checkpoint/array_io.py:40)",
        None,
    ),
    "beside a save, the main thread tells": (
        DEVICE + IN_LOOP + ASKING,
        "train",
        "read (trainers/loop/inflight.py:37)",
        "the device",
    ),
    "no save is under way on this host": (
        DEVICE + USERS_THREAD,
        "save",
        "read (trainers/loop/inflight.py:37)",
        "the device",
    ),
    "a loop that waits for a batch stands where its data is read": (
        WAITS_FOR_BATCH + POOL + READING,
        "train",
        "__getitem__ (my_callbacks.py:50)",
        None,
    ),
    "a batch that nobody of the user's reads": (WAITS_FOR_BATCH + POOL, "train", "batch (trainers/data/loader.py:148)", None),
    "beside a thread that reads ahead, the main thread tells": (
        DEVICE + READING,
        "train",
        "read (trainers/loop/inflight.py:37)",
        "the device",
    ),
    "a pool without work tells nothing": (DEVICE + POOL, "save", "read (trainers/loop/inflight.py:37)", "the device"),
    "joining the gang": (JOINING, "join", "join (trainers/runtime/distributed.py:47)", "joining"),
    "imports of a library": (IMPORTING, "import", "main (trainers/worker.py:57)", None),
}


@pytest.mark.parametrize("name", STANDINGS)
def test_where_a_host_stands(name):
    text, phase, line, waits_on = STANDINGS[name]
    found = position_of(text, phase)
    assert (found.thread.line, found.waits_on) == (line, waits_on)


TRAIN = ("train (/home/me/run/trainers/trainer/training_run.py:90)", f"Mine.train ({USER}:62)")
READS = ("readinto (/usr/lib/python3.11/socket.py:706)", "read (/usr/lib/python3.11/site-packages/urllib3/response.py:300)")
TOLD = {
    "a library that the user calls": (
        stack(*READS, f"fetch ({USER}:9)", *TRAIN),
        "fetch (my_callbacks.py:9), in read (urllib3/response.py:300)",
        "fetch (my_callbacks.py:9)",
    ),
    "our code that the user calls": (
        stack("encode (/home/me/run/trainers/text/tokenizers.py:5)", f"fetch ({USER}:9)", *TRAIN),
        "encode (trainers/text/tokenizers.py:5), called by fetch (my_callbacks.py:9)",
        "fetch (my_callbacks.py:9)",
    ),
    "our code that no user calls": (
        stack(*READS, "get (/home/me/run/trainers/data/loader.py:5)", *TRAIN),
        "get (trainers/data/loader.py:5), in read (urllib3/response.py:300)",
        None,
    ),
    "the user's data, while the loop waits for a batch": (
        stack("wait (/usr/lib/python3.11/threading.py:1)", "batch (/home/me/run/trainers/data/loader.py:9)", *TRAIN)
        + stack(f"__getitem__ ({USER}:9)", "_load (/home/me/run/trainers/data/loader.py:7)", name="loader_1"),
        "__getitem__ (my_callbacks.py:9)",
        "__getitem__ (my_callbacks.py:9)",
    ),
    "a lock": (
        stack("wait (/usr/lib/python3.11/threading.py:1)", f"f ({USER}:9)"),
        "f (my_callbacks.py:9)",
        "f (my_callbacks.py:9)",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_users_line_and_the_librarys_are_told_beside_each_other(name):
    text, line, user_line = TOLD[name]
    for seen in (hosts(text, DEVICE), installed(hosts(text, DEVICE))):
        found = blame(seen, "train")
        assert (found.host, found.line, found.user_line) == (0, line, user_line)


def test_the_line_at_which_all_hosts_are_is_the_users_if_none_waits_for_others():
    assert blame(hosts(SPIN, SPIN), "train").user_line == "spin (my_callbacks.py:3)"
    waits = stack("wait_for_device (/run/trainers/parallel/platform.py:43)", f"on_step_end ({USER}:9)")
    found = blame(hosts(waits, waits), "train")
    assert (found.line, found.user_line) == ("on_step_end (my_callbacks.py:9)", None)


@pytest.mark.parametrize("text", [None, "", "no stacks of process 7: py-spy: not installed", USERS_THREAD])
def test_a_text_without_a_main_thread_tells_nothing(text):
    assert position_of(text, "train") is None


def test_parse_keeps_names_and_order():
    main, other = parse("Process 7: python\nPython v3.11\n\n" + stack("a.<locals>.b (x.py:1)", "c (y.py:2)") + USERS_THREAD)
    assert (main.name, other.name) == ("MainThread", "prefetch")
    assert [(frame.function, frame.file, frame.line) for frame in main.frames] == [("b", "x.py", 1), ("c", "y.py", 2)]


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/me/run/trainers/data/loader.py", "trainers/data/loader.py"),
        ("/home/me/gangway/gangway/storage/row.py", "gangway/storage/row.py"),
        ("/home/me/gangway/trainers/data/loader.py", "trainers/data/loader.py"),
        ("/usr/lib/python3.11/site-packages/jax/_src/api.py", "jax/_src/api.py"),
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/home/me/run/my_callbacks.py", "my_callbacks.py"),
        ("trainers/loop/train_loop.py", "trainers/loop/train_loop.py"),
        ("<frozen runpy>", "<frozen runpy>"),
    ],
)
def test_files_are_shown_as_people_know_them(file, shown):
    assert short_name(file) == shown


@pytest.mark.parametrize("place", WAITING)
def test_the_functions_that_wait_are_where_the_table_says(place):
    """They are found by name in stacks: one that moves or gets another name would be taken for a host that others wait for."""
    function, file = place.split(" ")
    found = [ROOT / file] if file.startswith("trainers/") else list(Path(sysconfig.get_path("purelib")).glob(f"*/**/{file}"))
    found += [Path(sysconfig.get_path("purelib"), file)]
    assert any(re.search(rf"^ *def {function}\(", path.read_text(), re.M) for path in found if path.is_file())
