"""Stands for a training process: speaks its protocol with the agent, computes nothing, imports nothing big.

The preparation says what goes wrong before it is warm, the orders what happens after:
prepare: {"fail": message}, {"exit": code}, {"hang": true}, {"die": times, "folder": where to count}; "tag" comes back with warm
go:      {"steps": n}, {"ignore_sigterm": true}, {"workers": n}, {"apart": true} (workers leave the group),
         {"then": "exit"|"raise"|"abort"|"done"|"wait"}
         With memory for snapshots it tells in a note how many files are its own, and what is in those of earlier processes
orders:  {"cmd": "keep", "text": t} writes into the first of its own;
         {"cmd": "echo", ...} comes back as a note; {"cmd": "emit", ...} as the event itself; {"cmd": "exit", "code": n};
         {"cmd": "stop"} ends it well
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time

EVENTS = os.fdopen(int(os.environ["EVENT_FD"]), "w", buffering=1)


def emit(ev, **fields):
    EVENTS.write(json.dumps({"t": time.time(), "ev": ev, **fields}) + "\n")


def next_line():
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return json.loads(line)


def fail(kind, message):
    print(f"Traceback of {message}", flush=True)
    emit("exception", type="ValueError", message=message, traceback="...", step=None, kind=kind)
    os._exit(1)


def prepare(message):
    emit("phase", phase="import")
    if "fail" in message:
        fail("user", message["fail"])
    if "exit" in message:
        print("last words", flush=True)
        os._exit(message["exit"])
    if message.get("die", 0) > len(os.listdir(message.get("folder", "/"))):
        open(f"{message['folder']}/{os.getpid()}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if message.get("hang"):
        print("hanging in prepare", flush=True)
        time.sleep(1000)
    emit("warm", tag=message.get("tag"))


def start_workers(count, apart):
    """Grandchildren as a data loader has them: in the group, with the event pipe open, deaf to the end of their parent."""
    fd = EVENTS.fileno()
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    return [subprocess.Popen(command, pass_fds=(fd,), start_new_session=apart).pid for _ in range(count)]


def snapshot_files():
    """Its own, and what is in those of earlier processes; None without memory for snapshots."""
    if "SNAPSHOT_FD" not in os.environ:
        return None
    with socket.socket(fileno=int(os.environ["SNAPSHOT_FD"])) as agent:
        own, kept = (socket.recv_fds(agent, 100, 100)[1] for _ in range(2))
    texts = []
    for file in kept:
        texts.append(os.pread(file, 100, 0).decode())
        with contextlib.suppress(PermissionError):
            os.pwrite(file, b"changed", 0)
        texts[-1] += os.pread(file, 100, 0).decode().replace(texts[-1], "")
    emit("note", message=json.dumps([len(own), texts]))
    return own


def end(orders):
    then = orders.get("then", "wait")
    if then == "raise":
        fail("user", "boom")
    if then == "abort":
        os.abort()
    if then == "done":
        emit("done", step=orders.get("steps", 1), stop_reason="max_steps", result={})
        os._exit(0)
    if then == "exit":
        print("leaving", flush=True)
        os._exit(3)


def main():
    with contextlib.suppress(AttributeError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    prepare(next_line())
    orders = next_line()
    os.environ.update(orders.get("env") or {})
    if orders.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    workers = start_workers(orders.get("workers", 0), orders.get("apart", False))
    own = snapshot_files()
    emit("joined", received_at=time.time(), env=dict(os.environ), workers=workers, parent=os.getppid())
    for step in range(1, orders.get("steps", 1) + 1):
        emit("first_step" if step == 1 else "heartbeat", step=step, batch_index=step)
    end(orders)
    while True:
        message = next_line()
        if message["cmd"] == "echo":
            emit("note", message=message["message"])
        elif message["cmd"] == "keep":
            os.pwrite(own[0], message["text"].encode(), 0)
            emit("note", message="kept")
        elif message["cmd"] == "emit":
            emit(**{name: value for name, value in message.items() if name != "cmd"})
        elif message["cmd"] == "exit":
            os._exit(message["code"])
        elif message["cmd"] == "stop":
            emit("done", step=1, stop_reason=message["reason"], result={})
            os._exit(0)


if __name__ == "__main__":
    main()
