"""What tests ask about processes."""

import time

import psutil


def is_gone(pid):
    """Dead, or dead and not yet collected by whoever inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


PATIENCE_S = 600.0
"""How long a test waits for what must come: seconds are no matter of a test, and only what hangs takes so many."""


def wait_until(done, timeout_s=PATIENCE_S):
    """True as soon as `done()` is."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := done()):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return answer
