"""Exports a trained model from a checkpoint on disk to files that other programs read; on one host, without a mesh.

    python -m trainers.export RUN_OR_CHECKPOINT OUT --format huggingface

`safetensors`: all parameters, and the model's other state such as batch statistics, in one file, under their own names
(`layers.query`), with the arguments of the run; the model's
assets go to a folder beside it, which ends in `.assets`.
`huggingface`: a folder with `config.json`, files of weights and the assets (a tokenizer), as `transformers` reads models of the
families of `model.family`. One parameter is in memory at a time. A run that began with a folder of Hugging Face gives its
`config.json` back.
`mlflow`: a folder that `mlflow.pyfunc.load_model` loads where Gangway is installed: texts in; texts out, or the labels of a
classifier.
RUN_OR_CHECKPOINT is a run's folder (its newest whole checkpoint), RUN/best, a checkpoint, or what `save_pretrained` wrote. It and
OUT may lie in a bucket (`gs://`, `s3://`); an export for a bucket is made in a temporary folder of this machine first.

Of a run with `lora`, the adapters are merged with their base. `--adapter` writes the adapters alone: as `huggingface`, a folder
of the library PEFT; as `safetensors`, one file under their own names.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from typing import Any

from gangway.errors import CheckpointError, TransientError, UsageError
from gangway.first_line import say
from gangway.program import Parser, command
from gangway.storage.documents import is_url
from trainers.checkpoint.export import FORMATS


@command(UsageError, TransientError, OSError)
def main(argv: list[str] | None = None) -> int:
    parser = Parser("trainers.export", __doc__.splitlines()[0], example="runs/spirals model --format huggingface")
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", metavar="OUT", help="a new file (safetensors) or folder (huggingface, mlflow)")
    parser.add_argument("--format", choices=FORMATS, default="safetensors")
    parser.add_argument("--adapter", action="store_true", help="the adapters of a run with lora alone, not merged")
    parser.add_argument("--base", metavar="PATH", help="where the base of a run with lora is now, if it was moved")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", type=size, help="of one file of huggingface, such as 500MB; default: 5GB"
    )
    options = parser.parse_args(argv)
    say(f"reading {options.source}", stream=sys.stderr)
    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators are left to the processes that train
    # After the first line: it imports JAX.
    from trainers.checkpoint import export, weights

    checkpoint = weights.find(options.source)
    if checkpoint.name.endswith(weights.FILE_SUFFIX):
        raise CheckpointError(f"{checkpoint} is a file: expected a run or a checkpoint")
    more: dict[str, Any] = {"adapter": options.adapter, "base": options.base}
    if options.max_shard_size is not None:
        if options.format != "huggingface":
            raise UsageError("--max-shard-size: safetensors is one file; leave it out, or add --format huggingface")
        more["max_file_bytes"] = options.max_shard_size
    write = partial(FORMATS[options.format], checkpoint, **more)
    if is_url(options.out):
        export.to_bucket(options.out, write)
    else:
        write(options.out)
    print(f"{options.out}: {options.format} of {'the adapters of ' if options.adapter else ''}{checkpoint}")
    return 0


def size(text: str) -> int:
    """Returns the number of bytes that `500MB` or `5GB` stands for. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    num_bytes = int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if num_bytes < 1:
        raise ValueError(text)  # argparse says: invalid size value
    return num_bytes
