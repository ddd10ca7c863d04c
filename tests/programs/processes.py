"""What tests ask about processes."""

import time

import psutil


def is_gone(pid):
    """Dead, or dead and not yet collected by whoever inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(done, timeout_s=60.0):
    """True as soon as `done()` is."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := done()):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return answer
