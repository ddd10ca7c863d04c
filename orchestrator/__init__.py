"""The driver: configuration, generations, recovery, ledgers, tracking, commands. Decides, never computes."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Gives `orchestrator.launch`, imported when it is used: the processes of a run import this package for less."""
    if name == "launch":
        from orchestrator.library import launch

        return launch
    raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
