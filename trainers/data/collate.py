"""Examples of any length become rows of fixed shapes: transformed, cut, filled up, put together. On the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainers.errors import DataError
from trainers.protocol import METRIC

Example = Mapping[str, Any]
Transform = Callable[[Example], Example | None]
"""None: the example is left out. A pure function; called in the loader's threads."""
Truncation = Literal["keep_start", "keep_end"]
Preprocess = Callable[[dict[str, np.ndarray], int], Any]
"""`Hooks.preprocess_batch`."""

LONGEST_GAP = 1000
"""How many examples in a row may be left out before one is found that tells the shapes."""


@dataclass(frozen=True)
class CollateInfo:
    """How a leaf of an example gets the same length in all of them, along its first dimension."""

    length: int
    pad_value: float = 0
    mask: str | None = None
    """The name of a leaf to add: float32[length], 1 where there was something and 0 where it was filled up."""


class Collated:
    """`dataset` by index, with rows of fixed shapes. `weight` is 0 for an example that the transform leaves out, else 1."""

    def __init__(self, dataset: Any, transform: Transform | None, info: Mapping[str, CollateInfo], truncation: Truncation):
        self.dataset, self.transform, self.info, self.truncation = dataset, transform, info, truncation
        self._filler: dict[str, np.ndarray] | None = None
        if hasattr(dataset, "available"):
            self.available = dataset.available

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        example = self.dataset[index]
        made = self._row(example)
        if made is None:
            return {**self._shapes(), "sample_id": example["sample_id"], "weight": np.zeros((), np.float32)}
        return {"weight": np.ones((), np.float32), **made}

    def _row(self, example: Example) -> dict[str, np.ndarray] | None:
        made = example if self.transform is None else self.transform(example)
        if made is None:
            return None
        return collate({"sample_id": example["sample_id"], **made}, self.info, self.truncation)

    def _shapes(self) -> dict[str, np.ndarray]:
        """A row that counts for nothing."""
        if self._filler is None:
            rows = (self._row(self.dataset[index]) for index in range(LONGEST_GAP))
            found = next((row for row in rows if row is not None), None)
            if found is None:
                raise DataError(
                    f"build_data_transform leaves out each of the first {LONGEST_GAP} examples: there is nothing to train"
                )
            self._filler = found
        return dict(self._filler)


def collate(example: Example, info: Mapping[str, CollateInfo], truncation: Truncation) -> dict[str, np.ndarray]:
    """One row: the leaves that `info` names cut or filled up, those it does not name as they are. Raises DataError."""
    if missing := info.keys() - example.keys():
        raise DataError(
            f"build_data_collate_info names {', '.join(sorted(missing))}, absent from one with {', '.join(sorted(example))}"
        )
    row = {name: np.asarray(value) for name, value in example.items()}
    for name, own in info.items():
        row[name], mask = _fit(row[name], own, truncation)
        if own.mask is not None:
            row[own.mask] = mask
    return row


def _fit(value: np.ndarray, info: CollateInfo, truncation: Truncation) -> tuple[np.ndarray, np.ndarray]:
    value = value[: info.length] if truncation == "keep_start" else value[max(len(value) - info.length, 0) :]
    out = np.full((info.length, *value.shape[1:]), info.pad_value, value.dtype)
    out[: len(value)] = value
    return out, (np.arange(info.length) < len(value)).astype(np.float32)


def stack(rows: Sequence[Example], counts: Sequence[bool]) -> dict[str, np.ndarray]:
    """A batch [rows, ...] of rows of equal shapes. `weight` is that of the row (default 1) where it counts, else 0."""
    plain = [{name: np.asarray(value) for name, value in row.items() if name != "weight"} for row in rows]
    try:
        out = {name: np.stack([row[name] for row in plain]) for name in plain[0]}
    except (ValueError, KeyError) as error:
        raise DataError(
            f"the examples of a batch differ in their leaves or shapes ({error}): override build_data_collate_info to cut and "
            "fill up those of varying length"
        ) from error
    weights = [float(row.get("weight", 1.0)) if own else 0.0 for row, own in zip(rows, counts, strict=True)]
    return {**out, "weight": np.array(weights, np.float32)}


def preprocessed(batch: dict[str, np.ndarray], batch_index: int, preprocess: Preprocess) -> dict[str, np.ndarray]:
    """What the hook makes of the rows; metrics that it returns become leaves `metric/NAME`. Raises DataError."""
    num_rows, returned = len(batch["weight"]), preprocess(dict(batch), batch_index)
    made, metrics = returned if isinstance(returned, tuple) else (returned, {})
    rows = {METRIC + name: np.broadcast_to(np.asarray(value, np.float32), (num_rows,)) for name, value in metrics.items()}
    out = {**made, **rows}
    wrong = [f"{name} {np.shape(leaf)}" for name, leaf in out.items() if np.shape(leaf)[:1] != (num_rows,)]
    if wrong or not {"weight", "sample_id"} <= out.keys():
        raise DataError(
            f"preprocess_batch returned {', '.join(wrong) or 'no weight or sample_id'}: expected leaves [{num_rows}, ...], "
            "`weight` and `sample_id` among them"
        )
    return out
