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


def wait_until(done, timeout_s=PATIENCE_S, every_s=0.01):
    """True as soon as `done()` is."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := done()):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(every_s)
    return answer


def wait_while_running(condition, process, said):
    """Waits until `condition()` is true. Fails with `said()` if the process has ended before, or if it takes too long."""

    def has_come():
        if condition():
            return True
        assert process.poll() is None, said()
        return False

    assert wait_until(has_come, every_s=0.1), said()
