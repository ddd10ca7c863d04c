"""Random models and random files within what is allowed, beside transformers: exports that it loads and computes, and its own
models that are read here. `make parity` runs the three parts; the first and the last need what trains, the second torch.

    python -m tests.parity_random draw FOLDER [COUNT]
    python tests/parity_random.py theirs FOLDER
    python -m tests.parity_random compare FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ROWS, TIME, TOLERANCE = 2, 24, 3e-4
"""The tolerance is of the largest logit: scores as large as some here make rounding larger than in `tests/unit/data/parity`. A
key that is read wrongly makes a difference of a hundredth at least."""


def draw(folder: Path, count: int) -> None:
    """Makes COUNT exports with our logits, and COUNT files `config.json`."""
    from tests import random_models
    from tests.unit.hf_folders import tensors_of
    from trainers.models.hf import config as hf_config

    shutil.rmtree(folder, ignore_errors=True)
    for seed in range(count):
        at = folder / "imports" / f"{seed:03}"
        at.mkdir(parents=True)
        (at / "config.json").write_text(json.dumps(random_models.file(seed), indent=1))
        model, at = random_models.model(seed), folder / "exports" / f"{seed:03}"
        at.mkdir(parents=True)
        (at / "config.json").write_text(json.dumps(hf_config.write(model, max_length=64, dtype="float32"), indent=1))
        params, tokens = _random_parameters(model, seed), _tokens(seed)
        save_file(tensors_of(model, params), at / "model.safetensors", metadata={"format": "pt"})
        save_file({"tokens": tokens, "logits": _logits(model, params, tokens)}, at / "expected.safetensors")


def _tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (ROWS, TIME), np.int32)


def _random_parameters(model: Any, seed: int) -> Any:
    """All of them far from where training begins, so that each of them matters."""
    import jax
    from flax import nnx

    from trainers.models.decoder import Decoder

    shapes = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(Decoder(model, rngs=nnx.Rngs(0)))))
    rng = np.random.default_rng(seed)

    def drawn(path: Any, leaf: Any) -> np.ndarray:
        return (0.25 * rng.standard_normal(leaf.shape) + ("_norm'" in jax.tree_util.keystr(path))).astype(np.float32)

    return jax.tree_util.tree_map_with_path(drawn, shapes)


def _logits(model: Any, params: Any, tokens: np.ndarray) -> np.ndarray:
    import jax
    from flax import nnx

    from trainers.models.decoder import Decoder

    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))

    def logits(params: Any) -> jax.Array:
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(tokens)

    return np.asarray(jax.jit(logits)(params))


def theirs(folder: Path) -> list[str]:
    """Returns the exports that transformers computes otherwise; and gives weights and logits to each file `config.json`."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model.float().eval()(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()

    # The definitions: grouped products want sizes that are multiples of 4.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    wrong = []
    for at in sorted((folder / "exports").iterdir()):
        expected = load_file(at / "expected.safetensors")
        model, about = AutoModelForCausalLM.from_pretrained(at, **eager, output_loading_info=True)
        if unused := [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if about[key]]:
            wrong.append(f"{at}: {', '.join(f'{key} {sorted(about[key])}' for key in unused)}")
        wrong += _apart(at, logits(model, expected["tokens"]), expected["logits"])
    for number, at in enumerate(sorted((folder / "imports").iterdir())):
        found = json.loads((at / "config.json").read_text())
        torch.manual_seed(number)
        config = CONFIG_MAPPING[found["model_type"]].from_dict(found)
        model = AutoModelForCausalLM.from_config(config, **eager).float()
        for parameter in model.parameters():
            parameter.data.add_(0.25 * torch.randn_like(parameter))
        model.save_pretrained(at / "theirs")
        (at / "theirs" / "model.safetensors").rename(at / "model.safetensors")
        tokens = _tokens(number)
        save_file({"tokens": tokens, "logits": np.ascontiguousarray(logits(model, tokens))}, at / "expected.safetensors")
    return wrong


def compare(folder: Path) -> list[str]:
    """Returns the files whose models are computed otherwise here."""
    from tests.unit.hf_folders import nested, parameters_of
    from trainers.models.hf import config as hf_config

    wrong = []
    for at in sorted((folder / "imports").iterdir()):
        model = hf_config.read(json.loads((at / "config.json").read_text()))
        params = nested(parameters_of(at))
        expected = load_file(at / "expected.safetensors")
        wrong += _apart(at, _logits(model, params, expected["tokens"]), expected["logits"])
    return wrong


def _apart(at: Path, found: np.ndarray, expected: np.ndarray) -> list[str]:
    apart = float(np.abs(found - expected).max() / np.abs(expected).max())
    return (
        [] if apart <= TOLERANCE else [f"{at}: logits differ by {apart:.2g} of the largest: {(at / 'config.json').read_text()}"]
    )


def main() -> None:
    part, folder, *rest = sys.argv[1:]
    if part == "draw":
        draw(Path(folder), int(rest[0]) if rest else 50)
        return
    wrong = theirs(Path(folder)) if part == "theirs" else compare(Path(folder))
    print(*wrong, sep="\n")
    total = len(list((Path(folder) / "imports").iterdir()))
    print(f"{len(wrong)} of {total} random {'exports' if part == 'theirs' else 'files'} are computed otherwise")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
