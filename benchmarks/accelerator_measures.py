"""What the accelerator protocol measures, one function each. Each runs in a child process of `benchmarks.accelerator`; most start
training processes of their own (`benchmarks.accelerator_worker`), and touch no device themselves."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.accelerator_sizes import Sizes, arguments, sizes_for
from benchmarks.accelerator_worker import Worker, WorkerFailed, trained
from trainers.config import attention
from trainers.config.arguments import TrainingArguments
from trainers.settings import ARGUMENTS_CLASS

Result = dict[str, Any]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
PLATFORMS = {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}
"""What JAX is asked for: a standby goes by it, which must not look for devices."""
GENERATIONS = (("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6", "v6e"), ("TPU v4", "v4"))
"""Of what JAX calls a device, to what the compiler for TPUs calls its slices."""
WARM_UP_PUBLISHES = 2
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
STEPS_BEFORE, STEPS_LOST, STEPS_AFTER = 4, 3, 4
"""Before a save, after it until the process is killed, and of the process that goes on."""
MOST_STEPS = 100_000
TOP = 8
"""How many kinds of operations are told of a profile."""


@dataclass(frozen=True)
class Context:
    """Where a measurement runs, and on what."""

    small: bool
    overrides: tuple[str, ...]
    folder: Path
    """For what the measurement writes; deleted after it."""
    kept: Path
    """For what stays, such as a profile."""
    device: Mapping[str, Any]
    """The result of `device`; empty while that is measured."""

    @property
    def sizes(self) -> Sizes:
        return sizes_for(self.small, dict(self.device))

    @property
    def platform(self) -> str:
        return self.device["platform"]

    def arguments(self, name: str, length: int, **more: Any) -> TrainingArguments:
        storage = str(self.folder / "runs")
        return arguments(self.sizes, self.device["count"], storage, name=name, length=length, overrides=self.overrides, **more)

    def env(self, flags: str = "") -> dict[str, str]:
        """Returns the environment of training processes: their own folder of compiled programs, and none of JAX's cache."""
        xla = " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), flags)))
        return {
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS") or PLATFORMS[self.platform],
            "GANGWAY_PROGRAMS": str(self.folder / "programs"),
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            **({"XLA_FLAGS": xla} if xla else {}),
        }


@dataclass(frozen=True)
class Measurement:
    name: str
    limit_s: float
    measure: Callable[[Context], Result]


def measurements(small: bool, device: Mapping[str, Any] | None) -> list[Measurement]:
    """Returns all measurements in their order, what matters most first; before the device is known only that it is measured."""
    made = [Measurement("device", 180, of_device)]
    if device is None:
        return made
    sizes = sizes_for(small, dict(device))
    shapes = [(length, packed) for length in sizes.lengths for packed in (False, True)]
    made += [Measurement(f"speed {shape(*one)}", 240, partial(speed, *one)) for one in shapes]
    made.append(Measurement("resume", 300, partial(resume, "")))
    made.append(Measurement("saves", 300, saves))
    for one in shapes:
        for name in kernels_of(device["platform"], sizes, one[0]):
            made.append(Measurement(f"kernel {name} {shape(*one)}", 120, partial(kernel, name, *one)))
    made.append(Measurement("programs", 300, programs))
    if device["platform"] != "tpu":  # there XLA has no such flag: its programs are deterministic
        made.append(Measurement("resume, deterministic", 300, partial(resume, DETERMINISTIC)))
    made.append(Measurement("profile", 180, profile))
    return made + [Measurement(f"plan {shape(*one)}", 300, partial(plan, *one)) for one in shapes]


def shape(length: int, packed: bool) -> str:
    return f"{length}{' packed' if packed else ''}"


def kernels_of(platform_name: str, sizes: Sizes, length: int) -> Iterator[str]:
    """Yields the kernels of attention that the trainer offers for the model on this platform."""
    settings = arguments(sizes, 1, "runs", name="kernels", length=length)
    needs = attention.needs_of(settings.model, length, settings.dtype)
    for name in attention.KERNELS[1:]:
        if not [*attention.check(name, needs), *attention.check_platform(name, platform_name)]:
            yield name


# ---------------------------------------------------------------------------------------------------------------- measurements


def of_device(context: Context) -> Result:
    import jax

    devices = jax.devices()
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    versions = {name: found for name in PACKAGES if (found := version_of(name)) is not None}
    return {
        "platform": "gpu" if devices[0].platform in ("cuda", "rocm", "gpu") else devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "memory_bytes": min(limits) or None,
        "client": devices[0].client.platform_version.splitlines()[0],
        "versions": {"python": platform.python_version(), **versions},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": commit(),
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Returns the commit of this checkout; None without git."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def speed(length: int, packed: bool, context: Context) -> Result:
    """Trains, and returns the medians of what the trainer itself publishes."""
    settings = context.arguments(f"speed-{length}-{'packed' if packed else 'plain'}", length, packed=packed)
    worker = trained(settings, context.folder / "worker.log", context.env())
    published = [event["metrics"] for event in worker.of("metrics") if "tokens_per_s" in event["metrics"]]
    counted = published[WARM_UP_PUBLISHES:]
    needs = attention.needs_of(settings.model, length, settings.dtype)
    return {
        "kernel": attention.choose(settings.model.attention, context.platform, needs).kernel,
        "tokens_per_step": settings.global_batch_size * length,
        **{name: statistics.median(one[name] for one in counted) for name in ("tokens_per_s", "step_time_s")},
        "mfu": statistics.median(one["mfu"] for one in counted) if "mfu" in counted[0] else None,
        # As training ended; the program that takes fingerprints runs after it.
        "peak_bytes": counted[-1].get("device_memory_peak_bytes"),
        "loss": (published[0]["loss"], published[-1]["loss"]),
        "compile_s": worker.phases_s()["compile"],
    }


def plan(length: int, packed: bool, context: Context) -> Result:
    """Compiles the step as `gangway compile` does, without a device; for GPUs also with the compiler of the device itself."""
    settings = context.arguments("plan", length, packed=packed)
    count, off_device = context.device["count"], {"JAX_PLATFORMS": "cpu"}
    if context.platform == "tpu":
        devices = {"kind": "tpu", "count": count, "topology": tpu_topology(context.device["kind"], count)}
        env = {**off_device, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    else:
        devices = {"kind": "cpu", "count": count}
        env = {**off_device, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    result = {"memory": compiled(settings, devices, env)}
    if context.platform == "gpu":
        result["memory_of_device"] = compiled(settings, {"kind": "gpu", "count": count}, context.env())
    return result


def tpu_topology(kind: str, chips: int) -> str:
    """Returns the compiler's name of a slice of so many chips. Raises ValueError for an unknown kind."""
    from cluster.hosts.tpu import topology_name
    from orchestrator.planning.hardware import topology_of

    generation = next((name for known, name in GENERATIONS if kind.startswith(known)), None)
    if generation is None:
        raise ValueError(f"no topology is known for {kind!r}: expected one of {', '.join(known for known, _ in GENERATIONS)}")
    return topology_name(generation, topology_of(generation, chips))


def compiled(settings: TrainingArguments, devices: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, int]:
    """Returns the bytes that a device needs. Raises ValueError with why the step cannot be compiled, or does not fit."""
    asked = {"arguments_class": ARGUMENTS_CLASS, "arguments": asdict(settings), "devices": devices}
    command = [sys.executable, "-m", "trainers.planning.program"]
    done = subprocess.run(
        command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **env}
    )
    answer = json.loads(done.stdout)
    if answer["problems"]:
        raise ValueError("; ".join(answer["problems"]))
    return answer["facts"]["memory"]


def kernel(name: str, length: int, packed: bool, context: Context) -> Result:
    """Times attention with its gradient on one device, and compares it with `blockwise` in exact float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from trainers.config import ModelConfig
    from trainers.models.attention_kernels import attention as attention_of

    sizes = context.sizes
    rows = max(1, sizes.tokens_per_device // length)
    settings = ModelConfig(**sizes.model, attention=name)
    heads = (settings.num_heads, settings.num_kv_heads, settings.num_kv_heads, settings.num_heads)
    keys = jax.random.split(jax.random.key(0), len(heads))
    shapes = [(rows, length, count, settings.channels) for count in heads]
    *inputs, cotangent = (jax.random.normal(key, one, jnp.bfloat16) for key, one in zip(keys, shapes, strict=True))
    # Documents of a few lengths, as packing puts them into rows.
    borders = np.arange(length) // max(1, length // 5)
    segments = jnp.asarray(np.broadcast_to(borders, (rows, length)), jnp.int32) if packed else None

    def backward(asked: str, dtype: str, *given: Any) -> Any:
        mix = attention_of(ModelConfig(**sizes.model, attention=asked), segments, length, dtype)
        out, pull = jax.vjp(lambda *x: mix(None, *x), *given)
        return out, pull(cotangent.astype(out.dtype))

    run = jax.jit(partial(backward, name, "bfloat16"))
    found = jax.block_until_ready(run(*inputs))
    seconds = []
    for _ in range(sizes.kernel_calls):
        began_s = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        seconds.append(time.perf_counter() - began_s)
    with jax.default_matmul_precision("highest"):  # by default products of float32 are rounded to fewer bits, too
        exact = jax.jit(partial(backward, "blockwise", "float32"))(*(x.astype(jnp.float32) for x in inputs))
    # Two products forward and five backward, of the half of all pairs that is causal.
    flops = 7 * 2 * rows * settings.num_heads * length**2 * settings.channels / 2
    return {
        "seconds": statistics.median(seconds),
        "flops_per_s": flops / statistics.median(seconds),
        "largest_difference": max(
            float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        ),
    }


def programs(context: Context) -> Result:
    """Keeps the programs of a run, loads them in a new process, and damages them before a third one."""
    settings = context.arguments("programs", context.sizes.lengths[0], max_num_steps=3, publish_every_steps=1)
    folder, log = context.folder / "programs", context.folder / "worker.log"

    def start() -> Worker:
        shutil.rmtree(settings.run_folder, ignore_errors=True)
        return trained(settings, log, context.env(), program_key="protocol")

    first = start()
    kept = {path: path.stat().st_size for path in sorted(folder.glob("*.xla"))}
    if not kept:
        raise WorkerFailed("no compiled program was kept: " + "; ".join(event["message"] for event in first.of("note")))
    second = start()
    for path in kept:
        flip(path)
    third = start()
    return {
        "files": len(kept),
        "bytes": sum(kept.values()),
        "compiled_s": first.phases_s()["compile"],
        "loaded_s": second.phases_s()["compile"],
        "refused_when_loaded": refused(second),
        "refused_when_damaged": refused(third),
        "same_losses": first.losses() == second.losses() == third.losses(),
    }


def flip(path: Path) -> None:
    """Changes one byte in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def refused(worker: Worker) -> int:
    """Returns how many kept programs a process could not load."""
    return sum("could not be loaded" in event["message"] for event in worker.of("note"))


def resume(flags: str, context: Context) -> Result:
    """Kills a process some steps after a save, lets a standby go on, and compares it with a run that nothing disturbed."""
    length, env = context.sizes.lengths[0], context.env(flags)

    def settings(name: str) -> TrainingArguments:
        checkpoint = {"save_steps": None, "save_at_end": False, "save_total_limit": 1}
        return context.arguments(name, length, max_num_steps=MOST_STEPS, publish_every_steps=1, checkpoint=checkpoint)

    orders = {"program_key": "protocol"}
    with Worker(settings("disturbed"), context.folder / "first.log", env) as first:
        first.start(**orders)
        first.wait_for("metrics", lambda event: event["step"] >= STEPS_BEFORE)
        first.save()
        saved = first.wait_for("saved")
        with Worker(settings("disturbed"), context.folder / "second.log", env) as second:
            second.wait_for("warm")
            lost = first.of("metrics")[-1]["step"] + STEPS_LOST
            first.wait_for("metrics", lambda event: event["step"] >= lost)
            killed_s = time.time()
            first.kill()
            gone_s = time.time()
            last = max(first.losses())
            second.start(**orders, stop_at=last + STEPS_AFTER)
            phases = second.phases_s()
            begun_s = min(event["t"] for event in second.of("phase"))
            first_step = second.wait_for("first_step")
            # Before the digest is taken: nothing is killed here any more.
            result = second.wait_for("done")["result"]
    whole = trained(settings("whole"), context.folder / "whole.log", env, **orders, stop_at=last + STEPS_AFTER)
    expected, resumed = whole.losses(), second.losses()
    return {
        "saved_step": saved["step"],
        "killed_after_step": last,
        "resumed_step": first_step["resumed_step"],
        "same_losses": all(expected[step] == loss for step, loss in {**first.losses(), **resumed}.items()),
        "steps_compared": len(resumed),
        "same_parameters": result["params_digest"] == whole.wait_for("done")["result"]["params_digest"],
        "same_samples": result["samples_digest"] == whole.wait_for("done")["result"]["samples_digest"],
        "recovery_s": first_step["t"] - killed_s,
        "phases_s": {"halt": gone_s - killed_s, "start": max(0.0, begun_s - gone_s), **phases},
    }


def saves(context: Context) -> Result:
    """Returns how long a save of all devices' state keeps training waiting, beside a copy of the same arrays."""
    import jax

    from benchmarks import saves as of_saves

    return of_saves.measured(jax.devices(), context.sizes.saved_millions, context.sizes.save_rounds, str(context.folder))


def profile(context: Context) -> Result:
    """Records some steps, and returns where the profile is and what the device did longest."""
    recorded = {"record_steps": 3, "skip_steps": 3, "folder": str(context.kept.absolute() / "profile")}
    settings = context.arguments("profile", context.sizes.lengths[0], max_num_steps=12, profile=recorded)
    event = trained(settings, context.folder / "worker.log", context.env()).wait_for("profile")
    if event["problem"]:
        raise WorkerFailed(event["problem"])
    files = sorted(Path(event["path"]).rglob("*.xplane.pb"))
    return {
        "folder": os.path.relpath(event["path"], context.kept.absolute()),
        "bytes": sum(path.stat().st_size for path in files),
        "steps": event["last_step"] - event["first_step"] + 1,
        "longest_ms": longest(files),
    }


def longest(files: list[Path]) -> dict[str, float]:
    """Returns the milliseconds of the operations that took most time on the devices, by name; on a CPU those of its threads."""
    from jax.profiler import ProfileData

    totals: Counter[str] = Counter()
    for path in files:
        planes = list(ProfileData.from_file(str(path)).planes)
        for plane in [one for one in planes if one.name.startswith("/device:")] or planes:
            for line in plane.lines:
                if "Steps" not in line.name and "Modules" not in line.name:  # they span the operations
                    totals.update({event.name: 0.0 for event in line.events})
                    for event in line.events:
                        totals[event.name] += event.duration_ns / 1e6
    return {name[:60]: round(ms, 3) for name, ms in totals.most_common(TOP)}
