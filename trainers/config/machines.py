"""The keys of the sections that concern machines, for the commands of `trainers`: they use none of them, and still refuse a wrong
one. Each key has the type that it has in its class in `cluster` or `orchestrator`; a test compares them. What else such a class
checks is checked where there are machines. Free of JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Literal


def _section(name: str, *keys: tuple[str, Any]) -> type:
    """Returns a section with these keys: names of one type, with spaces between them, and the type."""
    fields = [(each, hint, field(default=None)) for names, hint in keys for each in names.split()]
    return dataclasses.make_dataclass(name, fields, frozen=True, kw_only=True)


HOSTS = _section(
    "Hosts",
    ("kind", Literal["cpu", "gpu", "tpu"]),
    ("count min max", int | None),
    ("spares", int),
    ("wait_for_max_s", float),
    ("devices_per_host", int | None),
    ("cpus_per_host", float),
    ("accelerator topology", str | None),
    ("slices", int),
    ("min_slices max_slices", int | None),
    ("spread", bool),
    ("start_timeout_s", float),
    ("replacement_timeout_s", float | None),
    ("notice_file", str | None),
    ("metadata", Literal["none", "gce"]),
    ("log_dir", str),
    ("env", dict[str, str]),
    ("compiler_flags", bool),
    ("private_files", bool),
)
WATCHDOG = _section(
    "Watchdog",
    ("import_s join_s restore_s compile_s first_step_s step_floor_s step_factor save_s evaluate_s preview_s finish_s", float),
    ("silent_s", float | None),
    ("stacks_before_s", float),
)
DRIVER = _section(
    "Driver",
    ("address", str | None),
    ("supervise dashboard", bool),
    ("console_hosts", Literal["all"] | tuple[int, ...]),
    ("agent_lease_s", float),
    ("replay", str | None),
    ("precompile", bool | None),
    ("watchdog", WATCHDOG),
    (
        "restart",
        _section(
            "Restart",
            ("max_failures max_preemptions", int),
            ("retry_for_s backoff_initial_s backoff_max_s", float),
        ),
    ),
    (
        "quarantine",
        _section("Quarantine", ("max_failures_per_host max_device_errors_per_host", int), ("window_s", float)),
    ),
    (
        "elasticity",
        _section("Elasticity", ("grow", Literal["when_it_repays", "at_once", "never"]), ("restart_cost_s horizon_s", float)),
    ),
    ("stragglers", _section("Stragglers", ("factor share", float), ("windows", int), ("window_s", float))),
)
TRACKING = _section(
    "Tracking", ("mlflow", bool), ("uri", str | None), ("experiment", str), ("report", bool), ("register_model", str | None)
)

NOTIFY = _section(
    "Notify",
    ("command", tuple[str, ...]),
    ("webhook", str | None),
    ("events", tuple[str, ...]),
    ("goodput_below", float | None),
)

KEYS: dict[str, type] = {"hosts": HOSTS, "driver": DRIVER, "tracking": TRACKING, "notify": NOTIFY}
"""The sections by their names. An object of them means nothing, but that the section could be read."""
