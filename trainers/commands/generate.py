"""Continues texts with a trained model, in this one process, on its devices.

    python -m trainers.generate RUN_OR_FOLDER --prompt "Once upon" [--prompt ...] [--max-new-tokens N] [--temperature T] ...
    python -m trainers.generate RUN_OR_FOLDER --image FILE [--image ...] --prompt "What is this?" [...]

RUN_OR_FOLDER is a run's folder (its newest whole checkpoint), RUN/best, a checkpoint, what `save_pretrained` wrote, or a folder
of Hugging Face. One prompt is shown as a stream. Without a temperature the likeliest token is taken each time. Standard output
has the texts alone. A text ends at a token that `generation_config.json` or the tokenizer says, at a `--stop`, or when it is long
enough.
Images are for a model that reads them: one for each prompt, one for all of them, or several for one prompt. They come where the
prompt has the model's text for an image, such as `<start_of_image>`, or else at its beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangway import program, user_modules
from gangway.errors import TransientError, UsageError
from gangway.first_line import say
from gangway.surroundings import allow_for_forced_devices

if TYPE_CHECKING:  # the first line is there before they are imported
    import numpy as np

    from trainers.checkpoint.weights import Weights
    from trainers.config.arguments import TrainingArguments
    from trainers.data.image_prompts import ImagePrompts
    from trainers.evaluation.generation import Continuation, Generator
    from trainers.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class Opened:
    """A model on storage, and how to speak with it."""

    found: Weights
    arguments: TrainingArguments
    task: Any
    texts: Any
    """What encodes and decodes texts: the task, if it can."""
    tokenizer: Tokenizer
    window: int
    """The longest text that the model was made for, in tokens."""
    images: ImagePrompts | None
    """None: the model reads texts alone."""


@program.command(UsageError, TransientError, ValueError, OSError, interrupted="", is_read=True)
def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    allow_for_forced_devices(os.environ)
    texts = prompts_of(options)
    tell(f"reading {options.source}")
    # Whoever made the run or the folder has written what it names.

    with user_modules.named_by_data(options.source, options.trust_code):
        return run(options, texts)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program.parser("trainers.generate", __doc__, example='runs/quickstart --prompt "def main" --max-new-tokens 40')
    parser.add_argument("source", metavar="RUN_OR_FOLDER")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: the checkpoint of this step; default: the newest")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; -: standard input")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="may be given several times")
    parser.add_argument("--chat", action="store_true", help="each prompt is a message to the model, by its chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest token")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that together have this probability")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be given several times")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn; default: 0")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts at once; default: 16")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the computation; default: the run's")
    parser.add_argument(
        "--trust-code",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="code of your own that the run names, such as mine.tasks:Task; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="one list of JSON, in place of the texts")
    return parser.parse_args(argv)


def prompts_of(options: argparse.Namespace) -> list[str]:
    """Returns the prompts. Raises UsageError for options that contradict each other."""
    texts = list(options.prompt)
    if options.prompts_file is not None:
        # By new lines alone: others that Unicode has may stand within a prompt.
        texts += [line.removesuffix("\r") for line in _text_of(options.prompts_file).split("\n") if line.strip()]
    problems = []
    if not texts:
        problems.append("there is no prompt: give --prompt TEXT, or --prompts-file FILE with one a line")
    if options.system is not None and not options.chat:
        problems.append("--system is a part of a chat: add --chat")
    if options.temperature == 0 and (options.top_k is not None or options.top_p is not None):
        problems.append("--top-k and --top-p draw tokens, and --temperature 0 draws none: give a --temperature, such as 0.7")
    problems += [
        f"--{name.replace('_', '-')} {getattr(options, name)}: expected 1 or more"
        for name in ("max_new_tokens", "batch_size")
        if getattr(options, name) < 1
    ]
    if "" in options.stop:
        problems.append("--stop '': expected at least one character")
    if problems:
        raise UsageError("\n".join(problems))
    return texts


def _text_of(path: str) -> str:
    from trainers.data.sources.access import text_of

    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return text_of(content)
    except ValueError as error:
        raise UsageError(f"--prompts-file {path}: {error}") from error


def images_of(options: argparse.Namespace, num_prompts: int) -> list[list[str]]:
    """Returns the files of the images of each prompt. Raises UsageError if it is not clear which are whose."""
    paths = options.image
    if num_prompts == 1 or len(paths) <= 1:
        return [paths] * num_prompts
    if len(paths) != num_prompts:
        raise UsageError(
            f"--image is given {len(paths)} times, and there are {num_prompts} prompts: expected one image for each prompt, one "
            "for all of them, or several for one prompt"
        )
    return [[path] for path in paths]


def run(options: argparse.Namespace, texts: Sequence[str]) -> int:
    from trainers.config import PreviewConfig

    begun_s = time.perf_counter()
    sampling = PreviewConfig(
        prompts=(),
        num_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    opened = open_model(options.source, options.step, options.dtype)
    # Before the weights are read, which may take minutes: a prompt may be wrong.
    files = images_of(options, len(texts))
    prompts = [encoded(opened, text, options, len(paths)) for text, paths in zip(texts, files, strict=True)]
    images = [opened.images.read(paths) for paths in files] if opened.images is not None and options.image else []
    generator = load(opened, sampling, options, rows=min(options.batch_size, len(prompts)))
    tell(f"{opened.found.path}: read in {time.perf_counter() - begun_s:.1f} s; the first token comes after compiling")
    begun_s = time.perf_counter()
    if len(prompts) == 1 and not options.json:
        results = [stream(generator, prompts[0], images)]
    else:
        results = list(generator.all(prompts, images))
        print(as_json(texts, results) if options.json else as_text(texts, results))
    total, seconds = sum(len(result.tokens) for result in results), time.perf_counter() - begun_s
    tell(f"{total} tokens in {seconds:.1f} s, compiling included")
    return 0


def open_model(source: str, step: int | None = None, dtype: Any = None) -> Opened:
    """Returns what is at `source`, without its weights. Raises UsageError, CheckpointError or CheckpointUnavailableError."""
    from trainers.commands.saved_models import arguments_of, files_of, look
    from trainers.data import image_prompts
    from trainers.evaluation.previews import can_generate
    from trainers.models.hf import vision_config
    from trainers.tasks.causal_lm import CausalLMTask
    from trainers.tasks.image_text import ImageTextTask
    from trainers.text import tokenizers

    found = look(source, step)
    arguments = arguments_of(found)
    arguments = replace(arguments, dtype=dtype or _dtype(found, arguments))
    task = user_modules.load_object(arguments.task)(arguments)
    reads_images = isinstance(task, ImageTextTask)
    texts = CausalLMTask(arguments) if reads_images and not can_generate(task) else task
    if not can_generate(texts):
        raise UsageError(f"the task {arguments.task} has no encode and decode: it cannot generate")
    folders = (files_of(found) or Path(), Path(arguments.data.tokenizer or ""))
    window = next(filter(None, map(vision_config.context, folders)), arguments.data.sequence_length)
    tokenizer, vision = tokenizers.of(arguments), arguments.vision if reads_images else None
    images = None if vision is None else image_prompts.of(vision, tokenizer, files_of(found))
    return Opened(found, arguments, task, texts, tokenizer, window, images)


def _dtype(found: Weights, arguments: TrainingArguments) -> Any:
    import jax

    if found.folder is None or jax.default_backend() == "cpu":  # where bfloat16 is slow
        return arguments.dtype
    return next(iter(found.parameters.values())).dtype


def encoded(opened: Opened, text: str, options: argparse.Namespace, num_images: int = 0) -> list[int]:
    """Returns the tokens of a prompt with so many images. Raises UsageError if it has none, or more than there is room for, or if
    the model reads no images."""
    images = opened.images
    if num_images and images is None:
        raise UsageError(f"--image: {opened.found.path} is a model of texts alone: expected one that reads images; leave it out")
    marked, mark = (text, None) if images is None else (images.marked(text, num_images), images.mark)
    if options.chat:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        tokens = opened.tokenizer.chat([*system, {"role": "user", "content": marked}], mark)
    else:
        tokens = list(opened.texts.encode(marked if mark is None else marked.replace(*mark)))
    tokens = tokens if images is None else images.with_images(tokens, num_images)
    if not tokens:
        raise UsageError(f"the prompt {text!r} has no tokens: expected at least one to continue from")
    room, total = opened.arguments.model.num_positions, len(tokens) + options.max_new_tokens
    if room is not None and total > room:
        raise UsageError(
            f"the prompt has {len(tokens)} tokens, and --max-new-tokens is {options.max_new_tokens}: expected at most {room} "
            "together, for the model has no more positions"
        )
    if total > opened.window:
        tell(f"past {opened.window} tokens, which the model was made for, each token sees the last {opened.window} alone")
    return tokens


def stop_texts(opened: Opened, options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the texts that end a continuation: those of `--stop`, and of a chat what ends a turn where that is no token."""
    asked = [text for text in options.stop if _stop_id(opened.tokenizer, text) is None]
    return (*asked, *(opened.tokenizer.stop_texts() if options.chat else ()))


def stop_ids(opened: Opened, options: argparse.Namespace) -> tuple[int, ...]:
    """Returns the tokens that end a continuation: those of the model, and of `--stop` each text that is a special token."""
    asked = [_stop_id(opened.tokenizer, text) for text in options.stop]
    return (*opened.tokenizer.stop_ids(), *(token for token in asked if token is not None))


def _stop_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Returns the special token that a text is; None if it has none. Raises UsageError for one with more: no continuation
    has it, for special tokens are not shown."""
    (tokens,) = tokenizer.encode_documents([text])
    if tokenizer.decode(tokens) == tokenizer.raw(tokens):
        return None
    if len(tokens) > 1:
        raise UsageError(f"--stop {text!r} has a special token and more: expected one special token, or a text without them")
    return tokens[0]


def load(opened: Opened, sampling: Any, options: argparse.Namespace, rows: int) -> Generator:
    """Reads the weights. Raises CheckpointError if they do not fit the model."""
    import jax

    from trainers.checkpoint import weights
    from trainers.config import MeshConfig
    from trainers.evaluation.generation import Generator
    from trainers.optim.param_groups import parameter_path
    from trainers.parallel import mesh as meshes
    from trainers.step.loss import in_mode
    from trainers.step.state import abstract_model

    arguments, task = opened.arguments, opened.task
    parts, shapes, axes = abstract_model(task, arguments.seed)
    mesh = meshes.make_mesh(MeshConfig(data=1, tensor=-1))
    places = jax.tree.map(lambda leaf, names: meshes.parameter_sharding(mesh, names, leaf.shape), shapes, axes)

    def wanted(path: Any, leaf: Any, place: Any) -> Any:
        # The router computes in float32.
        dtype = leaf.dtype if parameter_path(path).endswith("router") else arguments.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place)

    # Adapters are merged: a cache computes each of its products once for each token.
    found = opened.found if arguments.lora is None else weights.open_whole(opened.found.path)
    return Generator(
        merge=lambda params: in_mode(parts.merge(params), training=False),
        params=weights.load(found, jax.tree_util.tree_map_with_path(wanted, shapes, places)),
        mesh=mesh,
        decode=opened.texts.decode,
        sampling=sampling,
        window=opened.window,
        stop_ids=stop_ids(opened, options),
        stop=stop_texts(opened, options),
        seed=options.seed,
        rows=rows,
    )


def stream(generator: Generator, prompt: Sequence[int], images: Sequence[np.ndarray]) -> Continuation:
    """Shows the text as it comes."""
    parts: Iterator[Any] = generator.stream(prompt, images)
    for part in parts:
        if not isinstance(part, str):
            print(flush=True)
            return part
        print(part, end="", flush=True)
    raise AssertionError("a stream ends with its continuation")


def as_text(prompts: Sequence[str], results: Sequence[Continuation]) -> str:
    return "\n\n".join(f"> {prompt}\n{result.text}" for prompt, result in zip(prompts, results, strict=True))


def as_json(prompts: Sequence[str], results: Sequence[Continuation]) -> str:
    rows = [
        {"prompt": prompt, "text": result.text, "finish": result.finish, "num_tokens": len(result.tokens)}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False)


def tell(line: str) -> None:
    """Standard output carries the texts alone."""
    say(line, stream=sys.stderr)
