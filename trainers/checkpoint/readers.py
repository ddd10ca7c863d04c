"""Checkpoints that this process is reading (an export, say); they are not deleted meanwhile. Without JAX."""

from __future__ import annotations

import os
import threading
from collections import Counter

from gangway.storage.store import Place

_lock = threading.Lock()
_reading: Counter[str] = Counter()
"""How many readers each checkpoint has, by absolute path. (Of an URL it is no path, but a name as good as another.)"""


def begin(checkpoint: Place | str) -> None:
    """Protects a checkpoint until as many calls of `end`. On host 0, which deletes old checkpoints."""
    with _lock:
        _reading[os.path.abspath(str(checkpoint))] += 1


def end(checkpoint: Place | str) -> None:
    with _lock:
        _reading[os.path.abspath(str(checkpoint))] -= 1


def is_read(checkpoint: Place | str) -> bool:
    with _lock:
        return _reading[os.path.abspath(str(checkpoint))] > 0
