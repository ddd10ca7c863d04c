"""Two commands in turns, each in a process of its own: `trainers.run`, and a loop written by hand.

    python -m benchmarks.two_commands [--rounds 5] [--steps 40] [--torch PYTHON [--compile]]

Told are the seconds until the first step is complete, and the tokens/s of the later steps. Each round starts both commands three
times: with no compiled programs, and twice with those that are kept. Both keep them: the loop by hand in JAX's own cache. The
model and its batches are those of `benchmarks.by_hand`. With `--torch`, the Python of an environment that has torch, the loop by
hand is that of `benchmarks.by_torch`, from the same parameters. It keeps no programs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import by_hand

LAUNCHES = ("first launch", "second launch", "third launch")
BY_TORCH = str(Path(__file__).with_name("by_torch.py"))
RATE = re.compile(r"([\d,]+) tokens/s")


class Found(NamedTuple):
    first_step_s: float
    tokens_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--torch", metavar="PYTHON", help="the loop by hand is in torch, which this Python has")
    parser.add_argument("--compile", action="store_true", help="with --torch: by torch.compile")
    options = parser.parse_args()
    pairs: dict[str, list[tuple[Found, Found]]] = {launch: [] for launch in LAUNCHES}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="two-commands-") as folder:
            for launch, so_far in pairs.items():
                pair = by_hand_in(Path(folder), options), ours(Path(folder), launch, options.steps)
                so_far.append(pair)
                print(f"round {number}, {launch}: {told([pair])}", flush=True)
    for launch, found in pairs.items():
        print(f"{launch}: {told(found)}")


def told(pairs: list[tuple[Found, Found]]) -> str:
    """Returns the medians of both commands, and those of their ratios."""

    def median(name: str, command: int) -> float:
        return statistics.median(getattr(pair[command], name) for pair in pairs)

    def ratio(name: str) -> float:
        return statistics.median(getattr(mine, name) / getattr(theirs, name) for theirs, mine in pairs)

    return (
        f"first step by hand {median('first_step_s', 0):.2f} s, trainers {median('first_step_s', 1):.2f} s, "
        f"ratio {ratio('first_step_s'):.2f}; by hand {median('tokens_per_s', 0):,.0f} tokens/s, "
        f"trainers {median('tokens_per_s', 1):,.0f}, ratio {ratio('tokens_per_s'):.3f}"
    )


def by_hand_in(folder: Path, options: argparse.Namespace) -> Found:
    steps = ["--steps", str(options.steps)]
    if options.torch is None:
        return found(by_hand.FIRST_STEP, [sys.executable, "-m", "benchmarks.by_hand", *steps], folder / "by hand")
    if not (folder / "sizes.json").exists():
        by_hand.write(folder)
    compiled = ["--compile"] * options.compile
    return found(by_hand.FIRST_STEP, [options.torch, BY_TORCH, str(folder), *steps, *compiled], folder / "by hand")


def ours(folder: Path, launch: str, steps: int) -> Found:
    sections = {
        "model": by_hand.model_settings(),
        "data": {"sequence_length": by_hand.TIME},
        "optimizer": {"learning_rate": by_hand.LEARNING_RATE, "max_grad_norm": by_hand.MAX_NORM},
        "evaluation": {"max_batches": 1},
        "checkpoint": {"save_at_end": False},
    }
    keys = {"global_batch_size": by_hand.BATCH, "max_num_steps": steps + 1, "publish_every_steps": 1}
    settings = [f"{section}.{key}={json.dumps(value)}" for section, pairs in sections.items() for key, value in pairs.items()]
    settings += [f"{key}={value}" for key, value in keys.items()]
    settings += [f"storage={folder / 'runs'}", f"name={launch.replace(' ', '-')}"]
    (folder / "config.yaml").write_text("{}\n")
    return found("step 1/", [sys.executable, "-m", "trainers.run", str(folder / "config.yaml"), *settings], folder / "trainers")


def found(line: str, command: list[str], cache: Path) -> Found:
    """Runs a command, which prints this line after its first step. Compiled programs are kept in `cache`."""
    env = {
        **os.environ,
        "GANGWAY_PROGRAMS": str(cache / "programs"),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    began_s = time.perf_counter()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        printed, took_s, rates = [], None, []
        for text in process.stdout or ():
            printed.append(text)
            if took_s is None:
                took_s = time.perf_counter() - began_s if line in text else None
            elif rate := RATE.search(text):
                rates.append(float(rate[1].replace(",", "")))
    if took_s is None or not rates or process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}, and printed:\n{''.join(printed)}")
    return Found(took_s, statistics.median(rates))


if __name__ == "__main__":
    main()
