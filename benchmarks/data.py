"""How fast data is made and read, in one process without a model: tokens made on the fly, tokens read, and lines of JSON indexed.

    python benchmarks/data.py [--megabytes 32] [--lines 10000000] [--sequence-length 256]

The text is that of the standard library, again and again, as lines of JSON; the tokenizer is a BPE of 8,192 tokens, trained on
it.
*On the fly* is the first start of a run: records read, tokenized, kept, and every example read once in the order of the training.
*Prepared* is every later one. Rates count tokens of examples. The index is made in a process of its own, whose memory is told.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from trainers.config import DataConfig, ModelConfig  # noqa: E402
from trainers.config.arguments import TrainingArguments  # noqa: E402
from trainers.config.data import SourceConfig  # noqa: E402
from trainers.data import bpe, kept, preparing  # noqa: E402
from trainers.data.sources.records import open_records  # noqa: E402

VOCAB_SIZE = 8192
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=32, help="of text to tokenize")
    parser.add_argument("--lines", type=int, default=10_000_000, help="lines of JSON to index")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--index-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.index_of:
        index(options.index_of)
        return
    with tempfile.TemporaryDirectory() as folder:
        # Nothing that is kept on this machine is used, and nothing stays.
        os.environ["HOME"] = folder
        measure_tokens(Path(folder), options.megabytes << 20, options.sequence_length)
        measure_index(Path(folder), options.lines)


def measure_tokens(folder: Path, num_bytes: int, sequence_length: int) -> None:
    path = folder / "text.jsonl"
    write_lines(path, num_bytes)
    source = SourceConfig(paths=(str(path),))
    begun_s = time.perf_counter()
    bpe.train([source], VOCAB_SIZE, folder / "tokenizer")
    print(f"tokenizer of {VOCAB_SIZE:,} trained in {time.perf_counter() - begun_s:.1f} s")
    tokenizers = {"bytes": "bytes", "tokenizer.json": f"{folder}/tokenizer/tokenizer.json", "a folder": f"{folder}/tokenizer"}
    for name, tokenizer in tokenizers.items():
        for packing in (None, "fit"):
            arguments = arguments_of(source, tokenizer, sequence_length, packing)
            kept.FOLDER = str(folder / f"kept-{name}-{packing}")  # nothing is there yet
            for what in ("on the fly", "prepared"):
                begun_s = time.perf_counter()
                num_tokens = read_all(arguments)
                rate(f"{what}, packed" if packing else what, name, num_tokens, time.perf_counter() - begun_s)
        made = preparing.Source(arguments.data, arguments, preparing.encoder_of(arguments.data, arguments, ["text"]))
        begun_s = time.perf_counter()
        preparing.make(made, folder / name, num_workers=2)
        rate("prepare, 2 workers", name, num_tokens, time.perf_counter() - begun_s)


def arguments_of(source: SourceConfig, tokenizer: str, sequence_length: int, packing: Any) -> TrainingArguments:
    more = {"packing": packing, "overlong": "split" if packing else "cut"}
    data = DataConfig(**dataclasses.asdict(source), **more, tokenizer=tokenizer, sequence_length=sequence_length, eval_fraction=0)
    return TrainingArguments(name="benchmark", max_num_steps=1, data=data, model=ModelConfig(vocab_size=VOCAB_SIZE))


def read_all(arguments: TrainingArguments) -> int:
    """Reads an epoch as the trainer does, batch by batch to the device. Returns the number of tokens."""
    import jax

    from trainers.data.loader import StepAddressedLoader
    from trainers.data.sources.text import text_windows
    from trainers.parallel.mesh import make_mesh

    train, _ = text_windows(arguments)
    loader = StepAddressedLoader(train, BATCH, make_mesh(arguments.mesh))
    num_tokens = 0
    for batch in loader.epoch():
        num_tokens += int((np.asarray(batch["segments"]) > 0).sum()) if "segments" in batch else batch["tokens"].size
    jax.block_until_ready(batch)
    loader.close()
    return num_tokens


def rate(what: str, tokenizer: str, num_tokens: int, seconds: float) -> None:
    print(
        f"{what:<22} {tokenizer:<24} {num_tokens / 1e6:6.1f} M tokens in {seconds:6.2f} s: {num_tokens / seconds:12,.0f} tokens/s"
    )


def measure_index(folder: Path, num_lines: int) -> None:
    path = folder / "lines.jsonl"
    with open(path, "wb") as file:
        for start in range(0, num_lines, 10_000):
            lines = (
                f'{{"id": {number}, "text": "{"some text of a record " * (1 + number % 6)}"}}\n'
                for number in range(start, start + 10_000)
            )
            file.write("".join(lines).encode())
    print(f"{num_lines:,} lines of JSON, {path.stat().st_size / 1e9:.2f} GB")
    for what in ("made", "kept"):
        command = [sys.executable, __file__, "--index-of", str(path)]
        about = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        memory = f"{about['peak_mb']:.0f} MB of memory at most, {about['before_mb']:.0f} before"
        print(f"index {what}: {about['seconds']:.2f} s, {memory}")
    path.unlink()


def index(path: str) -> None:
    before = memory_mb()
    begun_s = time.perf_counter()
    records = open_records(SourceConfig(paths=(path,)))
    last: Any = records[len(records) - 1]
    seconds = time.perf_counter() - begun_s
    assert last["id"] == len(records) - 1
    print(json.dumps({"seconds": seconds, "before_mb": before, "peak_mb": memory_mb()}))


def memory_mb() -> float:
    """Returns the most memory that this process has had. `getrusage` would tell that of its parent, too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def write_lines(path: Path, num_bytes: int) -> None:
    with open(path, "w") as file:
        for text in texts():
            file.write(json.dumps({"text": text}) + "\n")
            if file.tell() >= num_bytes:
                return


def texts() -> Iterator[str]:
    """Yields pieces of the standard library's sources, without an end."""
    while True:
        for record in open_records(SourceConfig()):
            text = record["text"]
            yield from (text[start : start + 4000] for start in range(0, len(text), 4000))


if __name__ == "__main__":
    main()
