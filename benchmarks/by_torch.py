"""The loop of `benchmarks.by_hand` in PyTorch, in its best form. It needs torch and numpy, and nothing else.

    python benchmarks/by_torch.py FOLDER [--compile]

FOLDER holds what `by_hand.write` has written: sizes, first parameters, batches. So both loops compute the same losses.
It has flat activations, fused attention, norms, cross-entropy and AdamW of torch, clipping, and batches that lie ready.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compile", action="store_true", help="by torch.compile, which needs a compiler of C++")
    options = parser.parse_args()
    written = InTorch(options.folder, options.compile)
    print(f"{written.sizes['first_step']} {written.step(0).item():.4f}", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for k in range(int(line)):
            written.step(k)
        print(f"{written.sizes['took']} {time.perf_counter() - start}", flush=True)


class InTorch:
    def __init__(self, folder: Path, compiled: bool):
        self.sizes: dict[str, Any] = json.loads((folder / "sizes.json").read_text())
        loaded = np.load(folder / "arrays.npz")
        self.params = {name: torch.nn.Parameter(torch.from_numpy(loaded[name])) for name in loaded.files if name != "batches"}
        self.batches = list(torch.from_numpy(loaded["batches"]).long())
        decayed = [value for value in self.params.values() if value.ndim > 1]
        others = [value for value in self.params.values() if value.ndim == 1]
        groups = [{"params": decayed, "weight_decay": self.sizes["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        how = {name: self.sizes[name] for name in ("lr", "betas", "eps")}
        self._optimizer = torch.optim.AdamW(groups, fused=True, **how)
        self._loss = torch.compile(self._mean_loss) if compiled else self._mean_loss
        channels = self.sizes["width"] // self.sizes["num_heads"]
        frequencies = self.sizes["rope_theta"] ** (-torch.arange(0, channels, 2) / channels)
        turned = torch.arange(self.sizes["time"])[:, None] * frequencies
        self._cos, self._sin = torch.cos(turned), torch.sin(turned)

    def step(self, k: int) -> torch.Tensor:
        """Returns the loss of a step, on batch k."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.batches[k % len(self.batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params.values(), self.sizes["max_norm"], foreach=True)
        self._optimizer.step()
        return loss.detach()

    def _mean_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        of = self.params
        x = F.embedding(tokens[:, :-1], of["embed"]).flatten(0, 1)
        for n in range(self.sizes["num_layers"]):
            layer = {name: of[f"layers.{n}.{name}"] for name in self.sizes["layer"]}
            x = x + self._attention(self._norm(x, layer["attention_norm"]), layer)
            y = self._norm(x, layer["mlp_norm"])
            x = x + (F.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
        return F.cross_entropy(self._norm(x, of["final_norm"]) @ of["unembed"], tokens[:, 1:].reshape(-1))

    def _attention(self, x: torch.Tensor, layer: dict[str, torch.Tensor]) -> torch.Tensor:
        def heads(name: str) -> torch.Tensor:
            # [B * T, D] -> [B, heads, T, channels].
            split = (x @ layer[name]).view(-1, self.sizes["time"], self.sizes["num_heads"], self._cos.shape[-1] * 2)
            return split.transpose(1, 2)

        query, key = self._rotate(heads("query")), self._rotate(heads("key"))
        attended = F.scaled_dot_product_attention(query, key, heads("value"), is_causal=True)
        return attended.transpose(1, 2).reshape(x.shape) @ layer["out"]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * self._cos - second * self._sin, second * self._cos + first * self._sin), -1)

    def _norm(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.sizes["width"],), scale, self.sizes["norm_eps"])


if __name__ == "__main__":
    main()
