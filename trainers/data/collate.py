"""Turns examples of any length into rows of fixed shapes: transformed, truncated, padded and stacked. On the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from gangway.errors import DataError, UsageError
from trainers.protocol import METRIC, SKIPPED, Ids

Example = Mapping[str, Any]
Transform = Callable[[Example], Example | None]
"""A pure function, called in the loader's threads. It returns None for an example to leave out."""
Truncation = Literal["keep_start", "keep_end"]
Collator = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
"""A pure function from examples to a batch [examples, ...], called in the loader's threads with some of the rows of a global
batch. The shapes of its leaves must not depend on the examples."""
Preprocess = Callable[[dict[str, np.ndarray], int], Any]
"""`BaseTrainer.preprocess_batch`."""

WIDE = tuple(map(np.dtype, ("int64", "uint64", "float64")))
"""Types of which a device has half the bits."""
NUMBERS = "biufcV"
"""The kinds of NumPy's types that a device can hold."""
LONGEST_GAP = 1000
"""How many examples are searched for one that is not left out, and so shows the shapes."""


@dataclass(frozen=True)
class CollateInfo:
    """How a leaf is brought to the same length in all examples, along one dimension."""

    length: int
    pad_value: float = 0
    mask: str | None = None
    """The name of a leaf to add: float32[length], 1 for a value of the example and 0 for padding."""
    dim: int = 0
    """The dimension that is cut or filled up; -1: the last."""

    @classmethod
    def of(cls, name: str, value: CollateInfo | Mapping[str, Any] | tuple[Any, ...]) -> CollateInfo:
        """Returns the info that a dict with these fields, or a tuple in their order, stands for. Raises UsageError."""
        detail = f"build_data_collate_info: {name} is {value!r}"
        if _is_of_veomni(value):
            raise UsageError(
                f"{detail}, which is ({', '.join(OF_VEOMNI)}) of VeOmni: give CollateInfo(length=...) instead; rows of several "
                "examples are made by data.packing, and mesh.context divides their tokens by itself"
            )
        names = [item.name for item in dataclasses.fields(cls)]
        try:
            info = value if isinstance(value, CollateInfo) else cls(**value) if isinstance(value, Mapping) else cls(*value)
        except TypeError as error:
            raise UsageError(f"{detail}: expected a CollateInfo, or a dict or tuple of {', '.join(names)}") from error
        if type(info.length) is not int or info.length < 1 or type(info.dim) is not int:
            raise UsageError(
                f"build_data_collate_info: {name} has length {info.length!r} and dim {info.dim!r}: expected integers, and a "
                f"length of at least 1; the fields are {', '.join(names)}"
            )
        if problem := info._problem(name):
            raise UsageError(f"{detail}: {problem}; the fields are {', '.join(names)}")
        return info

    def _problem(self, name: str) -> str:
        """Returns which other field of the info of leaf `name` has no such value."""
        if isinstance(self.pad_value, bool) or not isinstance(self.pad_value, int | float | np.number):
            return f"expected a number as pad_value, found {self.pad_value!r}"
        if self.mask is not None and (not isinstance(self.mask, str) or self.mask in ("", name, "weight", "sample_id")):
            return f"expected the name of a new leaf as mask, or None, found {self.mask!r}"
        return ""


OF_VEOMNI = ("pack_dim", "sp_slice", "sp_pad_value", "sp_pad_scale")
"""The fields of what `build_data_collate_info` returns in VeOmni."""


def _is_of_veomni(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.keys() & set(OF_VEOMNI))
    return isinstance(value, tuple) and len(value) > 1 and type(value[0]) is int and isinstance(value[1], bool)


class Collated:
    """`dataset` by index, with rows of fixed shapes. `weight` is 0 for an example that the transform leaves out, else 1."""

    def __init__(self, dataset: Any, transform: Transform | None, info: Mapping[str, CollateInfo], truncation: Truncation):
        self.dataset, self.transform, self.info, self.truncation = dataset, transform, info, truncation
        self._filler: dict[str, np.ndarray] | None = None
        for name in ("available", "state_at", "remember", "notes", "numbers", "numbers_at", "where_is"):
            if hasattr(dataset, name):
                # Only if the dataset has it: whoever needs the end or the state of the data asks whether there is such a method.
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        example = self.dataset[index]
        row = self._row(example)
        if row is None:
            # Left out by its weight, not by taking the next example: that would shift the position of all later ones.
            return {**self._filler_row(), "sample_id": example["sample_id"], "weight": np.zeros((), np.float32)}
        # Not of the transform alone: it need not know that its examples have weights.
        return {"weight": np.asarray(example.get("weight", 1.0), np.float32), **row}

    def _row(self, example: Example) -> dict[str, np.ndarray] | None:
        transformed = example if self.transform is None else self.transform(example)
        if transformed is None:
            return None
        return collate({"sample_id": example["sample_id"], **transformed}, self.info, self.truncation)

    def _filler_row(self) -> dict[str, np.ndarray]:
        """Returns a row with the right shapes, in place of one that is left out."""
        if self._filler is None:
            rows = (self._row(self.dataset[index]) for index in range(LONGEST_GAP))
            first_row = next((row for row in rows if row is not None), None)
            if first_row is None:
                raise DataError(
                    f"build_data_transform leaves out each of the first {LONGEST_GAP} examples: there is nothing to train"
                )
            # Two threads may both compute it. That is harmless: it is the same row.
            self._filler = first_row
        return dict(self._filler)


def collate(example: Example, info: Mapping[str, CollateInfo], truncation: Truncation) -> dict[str, np.ndarray]:
    """Returns one row: the leaves that `info` names truncated or padded, the others unchanged. Raises DataError."""
    if missing := info.keys() - example.keys():
        raise DataError(
            f"build_data_collate_info names {', '.join(sorted(missing))}, absent from one with {', '.join(sorted(example))}"
        )
    row = {name: np.asarray(value) for name, value in example.items()}
    for name, leaf_info in info.items():
        row[name], mask = _fit(name, row[name], leaf_info, truncation)
        if (added := leaf_info.mask) is None:
            continue
        # Of two leaves of the same lengths one mask will do.
        if added in example or (added in row and not np.array_equal(row[added], mask)):
            raise DataError(f"build_data_collate_info: the mask {added} of {name} is another leaf already: give it a new name")
        row[added] = mask
    return row


def _fit(name: str, value: np.ndarray, info: CollateInfo, truncation: Truncation) -> tuple[np.ndarray, np.ndarray]:
    if not -value.ndim <= info.dim < value.ndim:
        raise DataError(f"build_data_collate_info: a leaf of shape {list(value.shape)} has no dimension {info.dim}")
    if value.dtype.kind in "iub" and not _holds(value.dtype, info.pad_value):
        raise DataError(f"build_data_collate_info: {name} is {value.dtype}, which cannot hold the pad_value {info.pad_value!r}")
    value = np.moveaxis(value, info.dim, 0)
    value = value[: info.length] if truncation == "keep_start" else value[max(len(value) - info.length, 0) :]
    # [length, ...], in the type of the values: padding must not change the type of a leaf.
    padded = np.full((info.length, *value.shape[1:]), info.pad_value, value.dtype)
    padded[: len(value)] = value
    return np.moveaxis(padded, 0, info.dim), (np.arange(info.length) < len(value)).astype(np.float32)


def _holds(dtype: np.dtype[Any], number: float) -> bool:
    """Whether a type of integers, or bool, has this number."""
    lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(number == number // 1) and lowest <= number <= highest


def stack(rows: Sequence[Example], counts: Sequence[bool], collator: Collator | None = None) -> dict[str, np.ndarray]:
    """Returns rows as a batch [rows, ...]: stacked, which asks for equal shapes, or by the collator. `weight` is that of the row
    (default 1) where `counts` is true, else 0. Raises DataError."""
    batch = _stacked(rows) if collator is None else _by_collator(rows, collator)
    if texts := [name for name, leaf in batch.items() if leaf.dtype.kind not in NUMBERS]:
        kinds = ", ".join(f"{name} ({batch[name].dtype})" for name in texts)
        raise DataError(
            f"columns of the data are no numbers: {kinds}; turn them into numbers in build_data_transform, or leave them out: "
            f"data.ignore_columns=[{', '.join(texts)}]"
        )
    weights = [float(row.get("weight", 1.0)) if is_real else 0.0 for row, is_real in zip(rows, counts, strict=True)]
    return {**batch, "weight": np.array(weights, np.float32)}


def _by_collator(rows: Sequence[Example], collator: Collator) -> dict[str, np.ndarray]:
    examples = [{name: value for name, value in row.items() if name not in ("weight", "sample_id", SKIPPED)} for row in rows]
    made = {name: np.asarray(leaf) for name, leaf in collator(examples).items()}
    if wrong := [f"{name} {list(leaf.shape)}" for name, leaf in made.items() if leaf.shape[:1] != (len(rows),)]:
        raise DataError(f"the collator returned {', '.join(wrong)} for {len(rows)} examples: expected leaves [{len(rows)}, ...]")
    own = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in ("sample_id", SKIPPED) if name in rows[0]}
    return made | own


def _stacked(rows: Sequence[Example]) -> dict[str, np.ndarray]:
    # Without `weight`: it is made for every row, also where the data has none.
    plain = [{name: _array(name, value, row) for name, value in row.items() if name != "weight"} for row in rows]
    first = plain[0]
    for row in plain[1:]:
        if row.keys() != first.keys() or any(row[name].shape != leaf.shape for name, leaf in first.items()):
            raise DataError(_difference(row, first))
        # NumPy would stack them, in a type that depends on which examples came together: the step is compiled for one.
        if any(row[name].dtype != leaf.dtype and leaf.dtype.kind in NUMBERS for name, leaf in first.items()):
            raise DataError(_difference(row, first))
    return {name: np.stack([row[name] for row in plain]) for name in first}


def _array(name: str, value: Any, example: Example) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # such as lists of different lengths in a list
        raise DataError(
            f"{_named(example)}: column {name} is no array ({error}): turn it into one in the dataset or in build_data_transform"
        ) from error


def _difference(example: Mapping[str, np.ndarray], first: Mapping[str, np.ndarray]) -> str:
    """Returns what is different in `example`, and what to do."""
    which, other = _named(example), _named(first)
    if missing := [name for name in first if name not in example]:
        return (
            f"{which} has no column {', '.join(missing)}, which {other} has (it has {', '.join(example)}): give every example "
            "the same columns, or leave those out: data.ignore_columns"
        )
    if added := [name for name in example if name not in first]:
        return (
            f"{which} has a column {', '.join(added)}, which {other} has not (it has {', '.join(first)}): give every example the "
            "same columns, or leave those out: data.ignore_columns"
        )
    name = next(name for name in first if (example[name].shape, example[name].dtype) != (first[name].shape, first[name].dtype))
    found, expected = (f"{row[name].dtype}{list(row[name].shape)}" for row in (example, first))
    detail = f"{which}: column {name} is {found}, and {expected} in {other}: "
    if example[name].shape != first[name].shape:
        return f"{detail}override build_data_collate_info to cut and fill up what varies in length"
    return f"{detail}give it one type in the dataset or in build_data_transform, such as np.{first[name].dtype}(value)"


def _named(example: Example) -> str:
    """Returns the name of an example: its `sample_id` is its index in the data, unless the data has ids of its own."""
    return f"example {int(example['sample_id'])}" if "sample_id" in example else "an example"


def check_numbers(batch: Mapping[str, np.ndarray], ids: Mapping[str, Ids]) -> None:
    """Raises DataError for a number in rows [rows, ...] that becomes another one on the devices, or that is none of the `ids` of
    its leaf: a lookup would take another one for it, in silence."""
    for name, leaf in batch.items():
        if leaf.size == 0 or name == "sample_id":  # which is counted modulo 2**31 - 1
            continue
        if name in ids and leaf.dtype.kind in "iu":
            number, others = ids[name]
            if leaf.min() < 0 or leaf.max() >= number:
                wrong = ~((leaf >= 0) & (leaf < number)) & ~np.isin(leaf, [*others])
                besides = f", or {' or '.join(map(str, sorted(others)))}" if others else ""
                _raise_wrong(batch, name, wrong, f"expected ids from 0 to {number - 1}{besides}")
        elif leaf.dtype in WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            limits: Any = np.finfo(np.float32) if leaf.dtype.kind == "f" else np.iinfo(f"{leaf.dtype.kind}4")
            # NaN and infinity stay what they are.
            with np.errstate(invalid="ignore"):
                wrong = ((leaf < limits.min) | (leaf > limits.max)) & np.isfinite(leaf)
            _raise_wrong(batch, name, wrong, f"devices have numbers of 32 bits, from {limits.min} to {limits.max}")


def _raise_wrong(batch: Mapping[str, np.ndarray], name: str, wrong: np.ndarray, expected: str) -> None:
    if wrong.any():
        row = int(np.argwhere(wrong)[0][0])
        example = {"sample_id": batch["sample_id"][row]} if "sample_id" in batch else {}
        raise DataError(
            f"{_named(example)}: column {name} ({batch[name].dtype}) has {batch[name][wrong][0]}: {expected}; make it one in the "
            f"dataset or in build_data_transform, or leave the column out: data.ignore_columns=[{name}]"
        )


def preprocessed(batch: dict[str, np.ndarray], batch_index: int, preprocess: Preprocess) -> dict[str, np.ndarray]:
    """Returns the rows as the hook returns them; its metrics become leaves `metric/NAME`. Raises DataError."""
    num_rows, returned = len(batch["weight"]), preprocess(dict(batch), batch_index)
    leaves, metrics = returned if isinstance(returned, tuple) else (returned, {})
    # A number becomes one value for each row, so rows of padding drop out by their weight.
    rows = {METRIC + name: np.broadcast_to(np.asarray(value, np.float32), (num_rows,)) for name, value in metrics.items()}
    result = {**leaves, **rows}
    wrong = [f"{name} {np.shape(leaf)}" for name, leaf in result.items() if np.shape(leaf)[:1] != (num_rows,)]
    if wrong or not {"weight", "sample_id"} <= result.keys():
        raise DataError(
            f"preprocess_batch returned {', '.join(wrong) or 'no weight or sample_id'}: expected leaves [{num_rows}, ...], "
            "`weight` and `sample_id` among them"
        )
    return result
