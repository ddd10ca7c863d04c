"""The time from a command to the end of its first step: `trainers.run`, and a loop written by hand, in turns.

    python -m benchmarks.first_step [--rounds 5]

Each round starts both commands three times: with no compiled programs, and twice with those that are kept. Both keep them: the
loop by hand in JAX's own cache. The model and its batches are those of `benchmarks.by_hand`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import by_hand

LAUNCHES = ("first launch", "second launch", "third launch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
            for launch in LAUNCHES:
                for name, seconds in (("by hand", hand_s(Path(folder))), ("trainers", ours_s(Path(folder), launch))):
                    found.setdefault((launch, name), []).append(seconds)
                theirs, ours = (found[launch, name][-1] for name in ("by hand", "trainers"))
                print(f"round {number}, {launch}: by hand {theirs:.2f} s, trainers {ours:.2f} s, {ours / theirs:.2f}", flush=True)
    for launch in LAUNCHES:
        theirs, ours = (found[launch, name] for name in ("by hand", "trainers"))
        ratio = statistics.median(b / a for a, b in zip(theirs, ours, strict=True))
        print(f"{launch}: by hand {statistics.median(theirs):.2f} s, trainers {statistics.median(ours):.2f} s, ratio {ratio:.2f}")


def hand_s(folder: Path) -> float:
    return seconds_to(by_hand.FIRST_STEP, ["benchmarks.by_hand", "--steps", "1"], folder / "by hand")


def ours_s(folder: Path, launch: str) -> float:
    model = {**by_hand.MODEL._asdict(), "num_kv_heads": by_hand.MODEL.num_heads, "tie_embeddings": False}
    sections = {
        "model": model,
        "data": {"sequence_length": by_hand.TIME},
        "optimizer": {"learning_rate": by_hand.LEARNING_RATE, "max_grad_norm": by_hand.MAX_NORM},
        "evaluation": {"max_batches": 1},
        "checkpoint": {"save_at_end": False},
    }
    keys = {"global_batch_size": by_hand.BATCH, "max_num_steps": 2, "publish_every_steps": 1, "storage": folder, "name": launch}
    settings = [f"{section}.{key}={json.dumps(value)}" for section, pairs in sections.items() for key, value in pairs.items()]
    settings += [f"{key}={str(value).replace(' ', '-')}" for key, value in keys.items()]
    (folder / "config.yaml").write_text("{}\n")
    return seconds_to("step 1/", ["trainers.run", str(folder / "config.yaml"), *settings], folder / "trainers")


def seconds_to(line: str, command: list[str], cache: Path) -> float:
    """Returns the seconds from the start of a module until it prints this line. Compiled programs are kept in `cache`."""
    env = {
        **os.environ,
        "GANGWAY_PROGRAMS": str(cache / "programs"),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    began_s = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        printed, took_s = [], None
        for text in process.stdout or ():
            printed.append(text)
            if took_s is None and line in text:
                took_s = time.perf_counter() - began_s
    if took_s is None or process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}, and printed:\n{''.join(printed)}")
    return took_s


if __name__ == "__main__":
    main()
