"""Faults around the command of a run: its terminal is closed, nobody reads what it prints, the disk is full as it ends, it gets a
signal as it starts, its data are others.

Where the command has ended because of it, it is run again as a user would. What it said last, and its exit status, must be what
is on the disk.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gangway.storage import ours
from gangway.storage.store import Place
from orchestrator.faultlab.chaos.injectors import Details, Fault, Injection, Testbed, needed
from orchestrator.faultlab.testbed.live_run import Run, RunError, step_of
from orchestrator.run_state.launch import STATE
from orchestrator.run_state.lease import LEASE_KIND, RENEW_EVERY_S, TTL_S
from orchestrator.run_state.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_REFUSED, EXIT_STOPPED

FULL_S = 15.0
"""How long the disk stays full. A run whose last save has failed tries again meanwhile."""
SUPERSEDED_S = 180.0
"""The most that a second command may need to take a run over, and the first one to end."""
START_S = 5.0
"""About as long as a command needs until its gang trains."""
LAST_STRETCH_S = 600.0
"""The most that a run may need from its last fault but one to its end."""
WHERE_RUNS_ARE = ours.with_any_of("a run", STATE)
EARLY = """import jax.numpy as jnp

SCALE = jnp.ones(3)


class Scaled: ...
"""
STOPPED_AT = re.compile(r"^stopped at (\d+); (?:saved at (\d+)|nothing is saved)", re.MULTILINE)


def close_terminal(testbed: Testbed, fault: Fault) -> Details:
    said_before = len(testbed.run.console())
    testbed.run.screen.close_terminal()
    return {"said_before": said_before}


def stop_reading(testbed: Testbed, fault: Fault) -> Details:
    testbed.run.screen.stop_reading()
    return {}


def fill_disk_at_end(testbed: Testbed, fault: Fault) -> Details:
    """Before the last save, or as soon as that is complete: then what is left to write is how the run has ended."""
    run, disk, end = testbed.run, needed(testbed.disk), needed(testbed.max_steps)
    before_last_save = bool(fault.salt % 2)
    wanted = end - (testbed.save_steps or 0) if before_last_save else end
    run.full_speed()
    run.wait(lambda: newest_saved(run) >= wanted, f"its checkpoint of step {wanted}", LAST_STRETCH_S)
    said_before = len(run.console())
    disk.fill()
    return {"before_last_save": before_last_save, "said_before": said_before, "until_s": time.time() + FULL_S}


def supersede(testbed: Testbed, fault: Fault) -> Details:
    """The driver sleeps until the same command, run once more, has taken the run over. Then it wakes up and would go on writing
    where it was."""
    run = testbed.run
    asleep, command = run.driver(), run.process
    run.tree()  # what is below the first command: nobody could find it any more
    os.kill(asleep.pid, signal.SIGSTOP)
    try:
        time.sleep(TTL_S + RENEW_EVERY_S)  # until then the run is in use
        run.start()
        if not run.wait(lambda: run.driver().pid != asleep.pid, "another driver", SUPERSEDED_S):
            raise RunError(f"the command that was to take the run over has ended; see {run.output}")
    finally:
        os.kill(asleep.pid, signal.SIGCONT)
    return {"pid": asleep.pid, "status": command.wait(SUPERSEDED_S)}


def strike_a_start(testbed: Testbed, fault: Fault) -> Details:
    """Wherever it is in its start: Ray starts, the model is checked, the gang is made."""
    run, rng = testbed.run, random.Random(fault.salt)
    stop_command(run)
    number, delay_s = rng.choice([signal.SIGINT, signal.SIGTERM]), rng.uniform(0, START_S)
    run.start()
    time.sleep(delay_s)
    run.process.send_signal(number)
    details = {"signal": number.name, "delay_s": round(delay_s, 2), "status": run.process.wait(SUPERSEDED_S)}
    if details["status"] not in (128 + number, -number, EXIT_STOPPED):
        raise RunError(
            f"{number.name} {delay_s:.1f} s after its start: the command ended with {details['status']}; see {run.output}"
        )
    return details


def print_to_a_full_disk(testbed: Testbed, fault: Fault) -> Details:
    command = [sys.executable, "-m", "orchestrator.gangway", "status", testbed.run.run_dir.url, "--json"]
    with open("/dev/full", "w") as full:
        told = subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, check=False, timeout=SUPERSEDED_S)
    if told.returncode != EXIT_FAILED:
        raise RunError(f"`gangway status` to a full disk ended with {told.returncode}, expected {EXIT_FAILED}")
    return {"status": told.returncode}


def change_data(testbed: Testbed, fault: Fault) -> Details:
    """One file, in one of five ways."""
    run, rng = testbed.run, random.Random(fault.salt)
    stop_command(run)
    data = needed(testbed.data)
    file = rng.choice(sorted(data.glob("*.txt")))
    text, how = file.read_text(), rng.choice(["longer", "shorter", "a letter", "gone", "new"])
    said_before, place = len(run.console()), rng.randrange(len(text))
    away, changed = data.with_name(f"away-{file.name}"), file
    match how:
        case "longer":
            file.write_text(f"{text}more")
        case "shorter":
            file.write_text(text[: place or 1])
        case "a letter":
            file.write_text(f"{text[:place]}{'~' if text[place] != '~' else '-'}{text[place + 1 :]}")
        case "gone":
            file.rename(away)
        case "new":
            changed = file.with_name(f"new-{file.name}")
            changed.write_text(text)
    run.start()
    status, said = run.process.wait(SUPERSEDED_S), run.console()[said_before:]
    if how == "new":
        changed.rename(away)
    elif how == "gone":
        away.rename(file)
    else:
        file.write_text(text)
    if status != EXIT_REFUSED or changed.name not in said:
        raise RunError(
            f"{changed.name}, {how}: the command ended with {status}, expected a refusal that names it; see {run.output}"
        )
    return {"file": file.name, "how": how, "status": status}


def stop_a_wait(testbed: Testbed, fault: Fault) -> Details:
    """That of a launch for the driver of another machine, which has not released the run and gives no sign of life."""
    run, lease = testbed.run, testbed.run.run_dir / LEASE_KIND.name
    stop_command(run)
    LEASE_KIND.write(lease, {**(LEASE_KIND.read(lease) or {}), "machine": "another", "released": False})
    said_before, delay_s = len(run.console()), random.Random(fault.salt).uniform(0, TTL_S / 2)
    run.start()
    run.wait(lambda: "has not released it" in run.console()[said_before:], "its wait for another driver")
    time.sleep(delay_s)
    asked_s = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    status, waited_s = run.process.wait(SUPERSEDED_S), time.monotonic() - asked_s
    if status != EXIT_STOPPED or waited_s > TTL_S / 2 or "before the run went on" not in run.console()[said_before:]:
        raise RunError(f"a stop in a wait: the command ended with {status} after {waited_s:.0f} s; see {run.output}")
    return {"delay_s": round(delay_s, 2), "status": status, "waited_s": round(waited_s, 2)}


def use_jax_early(testbed: Testbed, fault: Fault) -> Details:
    """In a module of the user's, as it is imported: on the hosts it would be before they have joined."""
    run = testbed.run
    stop_command(run)
    said_before = len(run.console())
    with tempfile.TemporaryDirectory(prefix="gangway-chaos-") as folder:
        module = Path(folder, "early.py")
        module.write_text(EARLY)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        run.start(f"trainer={module.stem}:Scaled", PYTHONPATH=path)
        status, said = run.process.wait(SUPERSEDED_S), run.console()[said_before:]
    if status != EXIT_REFUSED or module.name not in said:
        raise RunError(f"JAX used too early: the command ended with {status}, expected a refusal of the file; see {run.output}")
    return {"status": status}


def move_run(testbed: Testbed, fault: Fault) -> Details:
    """To another place of the same storage, where the same command saves once; and back."""
    run, before = testbed.run, testbed.run.run_dir
    stop_command(run)
    there = before.parent / f"{before.name}-chaos-moved" / before.name
    move(before, there)
    run.run_dir = there
    since_s = run.now_s()
    run.start(f"storage={there.parent.url}")
    if not run.wait(lambda: run.saved_after(since_s), "a checkpoint where it was moved to"):
        raise RunError(f"the run was moved to {there.url}, and the command has ended; see {run.output}")
    stop_command(run)
    move(there, before)
    if there.store.is_local:
        ours.delete_empty(there.parent.path)
    run.run_dir = before
    return {"there": there.url}


def move(here: Place, there: Place) -> None:
    if here.store.is_local:
        os.makedirs(there.parent.path, exist_ok=True)
        os.rename(here.path, there.path)
        return
    for entry in here.list():
        (there / entry.name).put((here / entry.name).content())
    ours.delete_folder(here, WHERE_RUNS_ARE)


def stop_command(run: Run) -> None:
    """Asks the command to stop, as Ctrl-C does, and waits until it has saved and stopped."""
    run.tree()
    run.process.send_signal(signal.SIGINT)
    if (status := run.process.wait(SUPERSEDED_S)) != EXIT_STOPPED:
        raise RunError(f"the command was asked to stop, and ended with {status}; see {run.output}")


def start_again(testbed: Testbed, injection: Injection) -> None:
    testbed.run.start()


def was_refused(testbed: Testbed, injection: Injection) -> None:
    if injection.details["status"] != EXIT_FAILED:
        injection.problem = f"the driver that was superseded ended with status {injection.details['status']}"


def never(testbed: Testbed, injection: Injection) -> bool:
    """What is waited for is the end of the command."""
    return False


def go_on(testbed: Testbed, injection: Injection) -> None:
    """Runs the command again, which was to stop with its last step saved."""
    status, saved = testbed.run.process.wait(), newest_saved(testbed.run)
    said = last_words(testbed.run, injection)
    if (status, said) != (EXIT_STOPPED, (saved, saved)):
        injection.problem = f"exit status {status}, {shown(said)}; saved at {saved}, expected to stop there with {EXIT_STOPPED}"
    testbed.run.start()


def free_disk_and_go_on(testbed: Testbed, injection: Injection) -> None:
    """Makes room, and runs the command again if it has ended. Then it must not have reported a whole training that is not saved,
    or the other way about."""
    if testbed.run.running():
        needed(testbed.disk).free()
        return
    status, saved = testbed.run.process.wait(), newest_saved(testbed.run)
    said = last_words(testbed.run, injection)
    finished = saved == testbed.max_steps
    true = status == EXIT_FINISHED if finished else status == EXIT_FAILED and said is not None and said[1] == saved
    if not true:
        injection.problem = f"exit status {status}, {shown(said)}; saved at {saved} of {testbed.max_steps}"
    injection.details |= {"status": status, "saved": saved}
    needed(testbed.disk).free()
    testbed.run.start()


def newest_saved(run: Run) -> int:
    return step_of(run.checkpoints()[-1]) if run.checkpoints() else 0


def last_words(run: Run, injection: Injection) -> tuple[int, int] | None:
    """Returns where the command said last that it stopped, and what it said is saved; None if it said neither since the fault."""
    found = STOPPED_AT.findall(run.console()[injection.details["said_before"] :])
    return (int(found[-1][0]), int(found[-1][1] or 0)) if found else None


def shown(said: tuple[int, int] | None) -> str:
    return "nothing said of where it stopped" if said is None else f"said: stopped at {said[0]}; saved at {said[1]}"
