"""Training from Python, and the ground of all packages: storage, configuration, what processes tell each other. Free of JAX.

    from gangway import Training, launch

The names of PUBLIC are imported when they are used: the command `gangway` needs none of them.
"""

from __future__ import annotations

import importlib
from typing import Any

PUBLIC = {
    "BaseTrainer": "trainers.base",
    "Callback": "trainers.callbacks",
    "LaunchError": "orchestrator.library",
    "Result": "trainers.library",
    "Training": "trainers.library",
    "TrainingArguments": "trainers.config.arguments",
    "UsageError": "gangway.errors",
    "launch": "orchestrator.library",
    "read": "trainers.settings",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'gangway' has no attribute {name!r}: expected one of {', '.join(PUBLIC)}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
