"""The results of the accelerator protocol in markdown, with the goals beside the figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Records = Mapping[str, Mapping[str, Any]]
LEAST_MFU, LEAST_PACKED, MOST_OFF_PLAN, MOST_RECOVERY_S = 0.55, 0.95, 0.10, 5.0
UNKNOWN = "not known"


def table(records: Records) -> str:
    """Returns the document. What was not measured is not in it; what failed is, with why."""
    parts = [_machine, _speed, _kernels, _exactness, _recovery, _saves, _profile, _goals, _failures]
    sections = ["\n".join(part(records)) for part in parts]
    return "\n\n".join(section for section in sections if section) + "\n"


def result_of(records: Records, name: str) -> Any:
    """Returns what was measured; None if it was not, or failed."""
    return records.get(name, {}).get("result")


def _named(records: Records, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields what comes after the kind in the names of measurements, with their records."""
    for name, record in records.items():
        if name.startswith(f"{kind} "):
            yield name.removeprefix(f"{kind} "), record


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def _gigabytes(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 1e9:.3g} GB"


def _machine(records: Records) -> Iterator[str]:
    if (found := result_of(records, "device")) is None:
        return
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    yield (
        f"{found['count']} x {found['kind']} ({found['platform']}), {_gigabytes(found['memory_bytes'])} each; {found['client']}; "
        f"{versions}; commit {found['commit'] or UNKNOWN}; XLA_FLAGS: {found['xla_flags'] or 'none'}."
    )


def _speed(records: Records) -> Iterator[str]:
    rows = list(_named(records, "speed"))
    if rows:
        yield from _head(
            "tokens of a row", "attention", "tokens/s", "step", "MFU", "memory", "plan", "plan / memory", "device's compiler"
        )
    for shape, record in rows:
        found = record.get("result")
        if found is None:
            yield _row(shape, record["status"], *[""] * 7)
            continue
        memory = result_of(records, f"plan {shape}") or {}
        planned, here = memory.get("memory", {}).get("peak"), memory.get("memory_of_device", {}).get("peak")
        off = off_plan(records, shape)
        yield _row(
            *(shape, found["kernel"], f"{found['tokens_per_s']:,.0f}", f"{1000 * found['step_time_s']:.0f} ms"),
            *(_share(found["mfu"]), _gigabytes(found["peak_bytes"]), _gigabytes(planned)),
            *(UNKNOWN if off is None else f"{1 + off:.2f}", _gigabytes(here) if here else "as planned" if planned else UNKNOWN),
        )


def off_plan(records: Records, shape: str) -> float | None:
    """Returns by which share of the measured memory the plan is off; None if either is not known."""
    measured = (result_of(records, f"speed {shape}") or {}).get("peak_bytes")
    planned = (result_of(records, f"plan {shape}") or {}).get("memory", {}).get("peak")
    return None if not measured or not planned else planned / measured - 1


def _kernels(records: Records) -> Iterator[str]:
    rows = list(_named(records, "kernel"))
    if rows:
        yield "Attention of one layer with its gradient, on one device:"
        yield ""
        yield from _head("kernel and tokens of a row", "time", "TFLOP/s of causal work", "largest difference to float32")
    for name, record in rows:
        if (found := record.get("result")) is None:
            yield _row(name, record["status"], "", "")
        else:
            rate = f"{found['flops_per_s'] / 1e12:.3g}"
            yield _row(name, f"{1000 * found['seconds']:.2f} ms", rate, f"{found['largest_difference']:.2g}")


def _exactness(records: Records) -> Iterator[str]:
    found, resumes = result_of(records, "programs"), [name for name in records if name.startswith("resume")]
    if found is None and not resumes:
        return
    yield from _head("what", "found")
    if found is not None:
        yield _row(
            "compiled programs, kept, loaded, damaged",
            f"{found['files']} files, {found['bytes'] / 1e6:.3g} MB; compiled in {found['compiled_s']:.2f} s, loaded in "
            f"{found['loaded_s']:.2f} s; {found['refused_when_loaded']} refused when sound, {found['refused_when_damaged']} when "
            f"damaged; losses {_same(found['same_losses'])}",
        )
    for name in resumes:
        if (one := result_of(records, name)) is not None:
            yield _row(
                f"killed and resumed{name.removeprefix('resume')}",
                f"saved at step {one['saved_step']}, killed after step {one['killed_after_step']}, gone on from step "
                f"{one['resumed_step']}; losses of {one['steps_compared']} steps {_same(one['same_losses'])}, parameters "
                f"{_same(one['same_parameters'])}, samples {_same(one['same_samples'])}",
            )


def _same(is_same: bool) -> str:
    return "the same, bit for bit" if is_same else "**not the same**"


def _recovery(records: Records) -> Iterator[str]:
    rows = [(name, found) for name in records if name.startswith("resume") and (found := result_of(records, name)) is not None]
    if rows:
        yield "From SIGKILL to the end of the next first step, by phases, in seconds, with a warm standby:"
        yield ""
        phases = list(rows[0][1]["phases_s"])
        yield from _head("run", *phases, "all")
    for name, found in rows:
        yield _row(name, *(f"{found['phases_s'].get(phase, 0.0):.2f}" for phase in phases), f"**{found['recovery_s']:.2f}**")


def _saves(records: Records) -> Iterator[str]:
    if (found := result_of(records, "saves")) is None:
        return
    size = found["bytes"]
    yield from _head(
        "state", "training waits", "a copy of all arrays", "wait / copy", "fingerprints", "raw Orbax", "committed", "restored"
    )
    yield _row(
        *(_gigabytes(size), f"{found['ours_held']:.3g} s ({size / found['ours_held'] / 1e9:.3g} GB/s)"),
        *(f"{found['copy']:.3g} s ({size / found['copy'] / 1e9:.3g} GB/s)", f"{found['ours_held'] / found['copy']:.2f}"),
        *(
            f"{found['fingerprints']:.3g} s",
            f"{found['orbax_held']:.3g} s",
            f"{found['complete']:.3g} s",
            f"{found['restored']:.3g} s",
        ),
    )


def _profile(records: Records) -> Iterator[str]:
    if (found := result_of(records, "profile")) is None:
        return
    size = f"{found['bytes'] / 1e6:.3g} MB"
    yield f"The profile of {found['steps']} steps is in `{found['folder']}` ({size}). What took longest:"
    yield ""
    yield from _head("operation", "ms")
    for name, ms in found["longest_ms"].items():
        yield _row(f"`{name}`", f"{ms:.3g}")


def _goals(records: Records) -> Iterator[str]:
    yield from _head("goal", "found", "met")
    for goal, found, is_met in goals(records):
        yield _row(goal, found, {True: "yes", False: "**no**", None: UNKNOWN}[is_met])


def goals(records: Records) -> Iterator[tuple[str, str, bool | None]]:
    """Yields each goal, what was found, and whether it is met; None: it is not known."""
    speeds = {shape: record.get("result") for shape, record in _named(records, "speed")}
    for shape, found in speeds.items():
        mfu = found["mfu"] if found else None
        yield _goal(f"MFU at {shape} at least {_share(LEAST_MFU)}", mfu, _share, lambda value: value >= LEAST_MFU)
    for shape, found in speeds.items():
        if not shape.endswith(" packed"):
            packed = speeds.get(f"{shape} packed")
            ratio = packed["tokens_per_s"] / found["tokens_per_s"] if packed and found else None
            yield _goal(
                f"packed at {shape} at least {_share(LEAST_PACKED)} of not packed",
                ratio,
                _share,
                lambda value: value >= LEAST_PACKED,
            )
    for shape in speeds:
        yield _goal(
            f"plan at {shape} within {_share(MOST_OFF_PLAN)} of the measured memory",
            off_plan(records, shape),
            lambda value: f"{100 * value:+.1f} %",
            lambda value: abs(value) <= MOST_OFF_PLAN,
        )
    recovery_s = (result_of(records, "resume") or {}).get("recovery_s")
    yield _goal(
        f"kill to next step at most {MOST_RECOVERY_S:g} s",
        recovery_s,
        lambda value: f"{value:.2f} s",
        lambda value: value <= MOST_RECOVERY_S,
    )


def _goal(
    goal: str, value: float | None, shown: Callable[[float], str], is_met: Callable[[float], bool]
) -> tuple[str, str, bool | None]:
    return (goal, UNKNOWN, None) if value is None else (goal, shown(value), is_met(value))


def _failures(records: Records) -> Iterator[str]:
    failed = {name: record for name, record in records.items() if "result" not in record}
    if failed:
        yield from _head("not measured", "why")
    for name, record in failed.items():
        lines = record.get("error", "").strip().splitlines() or [""]
        yield _row(name, f"{record['status']}: {lines[-1][:200].replace('|', '/')}")
