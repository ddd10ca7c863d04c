"""A training process: who may look into its memory, what its orders do, and what it reports at its end."""

import ctypes
import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests import ROOT
from tests.event_schema import check_event
from tests.stores.emulators import environment, fake_gcs
from trainers import runtime, worker

START = {"cmd": "start", "generation": 0, "host": 0, "num_hosts": 1, "coordinator": "127.0.0.1:1"}


class StopHere(Exception):
    """Instead of the preparation."""


def test_a_training_process_lets_its_agent_trace_it_and_nobody_else(monkeypatch):
    calls = []

    def prctl(option, argument, *rest):
        calls.append((option, ctypes.c_ulong(getattr(argument, "value", argument)).value, rest))

    def stop_here():
        raise StopHere

    monkeypatch.setattr(worker.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=prctl))
    monkeypatch.setattr(worker.faulthandler, "register", lambda *args, **kwargs: None)
    monkeypatch.setattr(worker.os, "fdopen", lambda *args: stop_here())
    monkeypatch.setenv("EVENT_FD", "1")
    with pytest.raises(StopHere):
        worker.main()
    assert calls == [(0x59616D61, os.getppid(), (0, 0, 0))]


def test_what_the_orders_say_reaches_the_trainer(monkeypatch):
    seen, sent = {}, []

    class Trainer:
        def train(self):
            host = runtime.current()
            seen.update({name: getattr(host, name) for name in (*orders, "retry_for_s") if name != "generation"})

    monkeypatch.setattr(worker, "listen", lambda host: None)
    monkeypatch.setattr(worker, "join", lambda prepared, orders: Trainer())
    monkeypatch.setattr(worker, "leave", lambda: None)
    before = runtime.current()
    try:
        pipe = SimpleNamespace(send=sent.append)
        orders = {"generation": 0, "time_used_s": 12.5, "stop_at": 7, "skip_batches": [3], "committed_step": 4}
        worker.run(None, orders, pipe)
        assert seen.pop("retry_for_s") == 1800.0
        worker.run(None, {**orders, "retry_for_s": 9.0}, pipe)
    finally:
        runtime.install(before)
    assert seen == {"time_used_s": 12.5, "stop_at": 7, "skip_batches": (3,), "committed_step": 4, "retry_for_s": 9.0}
    assert (sent[-1]["ev"], sent[-1]["stop_reason"]) == ("done", "max_steps")


def test_an_order_that_is_not_understood_is_reported_and_the_next_one_is_obeyed(monkeypatch):
    """The thread that reads orders had ended at the first odd one, and the process could be stopped no more."""
    sent = []
    host = runtime.Runtime(sent.append)
    lines = ["no JSON", "[]", '{"cmd": "stpo"}', '{"cmd": "stop"}', '{"cmd": "stop", "reason": "requested"}']
    ours, agents = os.pipe()
    os.write(agents, "\n".join(lines).encode())
    os.close(agents)
    monkeypatch.setattr(worker, "messages", worker.Messages(ours))

    def finish(code):
        raise StopHere

    monkeypatch.setattr(worker, "finish", finish)
    with pytest.raises(StopHere):
        worker.read_commands(host)
    assert host.stop_reason == "requested"
    told = [event["message"] for event in sent]
    assert len(told) == 4
    assert told[2].startswith(
        "an order is not followed: there is no order 'stpo' at this point: expected stop or save or profile"
    )
    assert "the order 'stop': reason is missing" in told[3]


FORKS = """
import multiprocessing, subprocess, sys, threading, time
from trainers import worker
worker.messages.take_apart()
threading.Thread(target=lambda: print("order", worker.messages.next(), flush=True), daemon=True).start()
time.sleep(0.2)  # it waits for an order
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
print(repr(sys.stdin.read()), subprocess.run(["cat"], capture_output=True).stdout, flush=True)
sys.stdout.write("ready\\n"); sys.stdout.flush()
time.sleep(60)
"""


def test_what_the_users_code_forks_or_reads_takes_no_order_and_no_lock():
    child = subprocess.Popen([sys.executable, "-c", FORKS], stdin=-1, stdout=-1, cwd=ROOT)
    try:
        told = [child.stdout.readline() for _ in range(3)]
        assert told == [b"[1, 2]\n", b"'' b''\n", b"ready\n"]
        child.stdin.write(b'{"cmd": "stop"}\n')
        child.stdin.flush()
        assert child.stdout.readline() == b'order b\'{"cmd": "stop"}\\n\'\n'
    finally:
        child.kill()
        child.wait()


EARLY = {
    "a module": ("SCALE = jax.numpy.ones(3)", ""),
    "a question": ("FIRST = jax.process_index() == 0", ""),
    "data": ("", "key = jax.random.key(0)"),
    "nothing": ("", ""),
}
EARLY_MODULE = """
import jax
import numpy as np
{}

def data(arguments):
    {}
    return [{{"tokens": np.zeros(9, np.int32)}}] * 8, None
"""
PREPARES = """
import json, sys, traceback
from gangway.errors import UsageError, user_frame
from trainers import worker
from trainers.settings import ARGUMENTS_CLASS
for name in json.loads(sys.argv[1]):
    arguments = {"name": name, "max_num_steps": 1, "data": {"dataset": f"early_{name}:data", "sequence_length": 8}}
    try:
        worker.prepare({"cmd": "prepare", "arguments_class": ARGUMENTS_CLASS, "arguments": arguments})
        print(name, "prepared")
    except UsageError as error:
        print(name, user_frame(error))
import jax
print(jax.process_index())
"""


def test_code_that_uses_devices_before_the_hosts_have_joined_is_refused_at_its_line(tmp_path):
    names = [name.replace(" ", "_") for name in EARLY]
    for name, bodies in zip(names, EARLY.values(), strict=True):
        (tmp_path / f"early_{name}.py").write_text(EARLY_MODULE.format(bodies[0], bodies[1] or "pass"))
    command = [sys.executable, "-c", PREPARES, json.dumps(names)]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    assert lines[0].startswith(f"a_module {tmp_path}/early_a_module.py, line 4, in <module>: SCALE = ")
    assert lines[1].startswith(f"a_question {tmp_path}/early_a_question.py, line 4, in <module>: FIRST = ")
    assert lines[2].startswith(f"data {tmp_path}/early_data.py, line 7, in data: key = ")
    assert lines[3:] == ["nothing prepared", "0"]


def test_orders_with_a_misspelled_field_end_the_process_with_its_name(monkeypatch):
    sent, lines = [], iter([{"cmd": "prepare", "arguments_class": "a:B", "arguments": {}}, {**START, "stop_a": 7}])
    monkeypatch.setattr(worker, "next_message", lambda: next(lines))
    monkeypatch.setattr(worker, "prepare_or_explain", lambda message: None)
    monkeypatch.setattr(worker, "EventPipe", lambda stream: SimpleNamespace(send=sent.append))
    monkeypatch.setattr(worker, "let_trace", lambda agent: None)
    monkeypatch.setattr(worker.messages, "take_apart", lambda: sent.append({"ev": "taken apart"}))
    monkeypatch.setattr(worker.faulthandler, "register", lambda *args, **kwargs: None)
    monkeypatch.setattr(worker.os, "fdopen", lambda *args: None)
    monkeypatch.setattr(worker, "shown", lambda stream, **how: stream)
    monkeypatch.setenv("EVENT_FD", "1")

    def finish(code):
        raise StopHere(code)

    monkeypatch.setattr(worker, "finish", finish)
    with pytest.raises(StopHere, match="1"):
        worker.main()
    assert [event["ev"] for event in sent] == ["taken apart", "warm", "exception"]
    assert sent[-1]["type"] == "OrderError"
    assert "the order 'start' has no field 'stop_a'; did you mean stop_at?" in sent[-1]["message"]


def test_a_trainer_without_an_output_ends_as_it_was_asked_to():
    before = runtime.current()
    try:
        runtime.install(host := runtime.Runtime(lambda event: None))
        assert worker.result(object()) == {"stop_reason": "max_steps", "result": {}}
        host.request_stop("time_limit")
        assert worker.result(object()) == {"stop_reason": "time_limit", "result": {}}
    finally:
        runtime.install(before)


def test_a_heartbeat_brings_the_progress_of_the_loop_and_how_much_of_the_machine_it_uses(monkeypatch):
    sent = []
    host = runtime.Runtime(sent.append, clock=lambda: 5.0)
    host.step, host.batch_index, host.busy_s, host.usage = 3, 5, 0.25, {"host_cpu_percent": 50.0}
    host.evaluated_batches = 7

    def stop_here(seconds):
        raise StopHere

    monkeypatch.setattr(worker.time, "sleep", stop_here)
    with pytest.raises(StopHere):
        worker.heartbeat_loop(host)
    progress = {"step": 3, "batch_index": 5, "evaluated_batches": 7, "busy_s": 0.25}
    assert sent == [{"t": 5.0, "ev": "heartbeat", **progress, "usage": {"host_cpu_percent": 50.0}}]
    check_event(sent[0], "process")


# ---------------------------------------------------------------------- processes that the user's code forks


class Left(BaseException):
    """The process has ended."""


def test_a_forked_child_says_nothing_for_its_host(monkeypatch):
    lines = io.StringIO()
    pipe = worker.EventPipe(lines)
    pipe.send({"ev": "warm"})
    monkeypatch.setattr(worker.os, "getpid", lambda: 0)
    pipe.send({"ev": "done", "step": 3})
    assert [json.loads(line)["ev"] for line in lines.getvalue().splitlines()] == ["warm"]


@pytest.mark.parametrize(
    ("end", "code"), [(SystemExit(0), 0), (SystemExit(), 0), (SystemExit(3), 3), (SystemExit("no"), 1), (ValueError(), 1)]
)
def test_a_forked_child_ends_as_python_would_end_it(monkeypatch, capsys, end, code):
    ended = []

    def finish(code):
        ended.append(code)
        raise Left

    monkeypatch.setattr(worker, "finish", finish)
    with pytest.raises(Left):
        worker.end_of_child(end)
    assert ended == [code]


def test_an_output_that_says_nothing_useful_ends_no_training(events):
    output = SimpleNamespace(stop_reason="because", metrics={"a": object()}, checkpoint_path=None)
    assert worker.result(SimpleNamespace(output=output)) == {"stop_reason": "max_steps", "result": {}}
    assert "the trainer's output: TypeError: object is nothing that JSON can hold" in events[0]["message"]
    output = SimpleNamespace(stop_reason="because", metrics={}, checkpoint_path=None)
    assert worker.result(SimpleNamespace(output=output))["stop_reason"] == "max_steps"
    assert "'because' is not a valid StopReason" in events[1]["message"]


def test_an_exception_that_cannot_say_its_message_is_reported():
    class Mute(Exception):
        def __str__(self):
            raise KeyError

    event = worker.exception_event(Mute())
    check_event(event, "process")
    assert event["message"] == "(Mute.__str__ raises KeyError)"


@pytest.mark.slow("two processes that train")
@pytest.mark.parametrize("is_in_bucket", [False, True])
def test_a_warm_process_goes_on_from_a_checkpoint_without_another_import(tmp_path, is_in_bucket):
    """Of psutil it was a tenth of a recovery, and of the clients of a bucket, 835 modules, half a second."""
    made = {
        "name": "a",
        "storage": "gs://bucket/warm" if is_in_bucket else str(tmp_path),
        "global_batch_size": 8,
        "task": "trainers.tasks.causal_lm:CausalLMTask",
        "model": {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24},
        "data": {"paths": [__file__], "sequence_length": 16},
        "max_num_steps": 2,
    }
    (tmp_path / "arguments.json").write_text(json.dumps(made))
    command = [sys.executable, "-m", "tests.programs.warm", str(tmp_path / "arguments.json")]
    env = {**os.environ, "GANGWAY_PROGRAMS": str(tmp_path / "programs"), "JAX_PLATFORMS": "cpu"}
    with fake_gcs() if is_in_bucket else nullcontext() as url:
        env |= environment("gs", url) if is_in_bucket else {}
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
            assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # A module of fsspec's own, which it imports to open the first object.
    assert found == {"imported": ["fsspec.prefetcher"] if is_in_bucket else [], "from_step": 2}
