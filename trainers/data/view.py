"""What a person should see of training data before it is trained on: texts with what counts, lengths, sources. Pure text, with
styles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from trainers.console.text import count, printable

Line = tuple[tuple[str, str], ...]
"""Parts of a line: text, and its style as `rich` names it."""
Batch = Mapping[str, np.ndarray]
"""Rows [rows, ...]"""
Decode = Callable[[Sequence[int]], str]

SEGMENT_STYLES = ("green", "cyan", "yellow", "magenta")
"""Of documents beside each other in a row."""
NO_TARGET, SOURCE, HEADING = "dim", "bold blue", "bold"
SEGMENT_MARK, NO_TARGET_MARKS = "‖", ("⟦", "⟧")
"""Without colours: between two documents, and around tokens that are no targets."""
BAR_WIDTH = 40
SIDES = ("chosen", "rejected")
"""The names of the texts of a pair, in the order of their lines."""


def is_text(batch: Batch) -> bool:
    """Whether rows are texts: one, or the two of pairs."""
    shape = np.shape(batch.get("tokens", 0))
    return len(shape) == 2 or (len(shape) == 3 and shape[1] == len(SIDES) and "token_weight" in batch)


def lines_of(batch: Batch) -> Batch:
    """Returns the texts of a batch as rows of their own. Those of pairs have a leaf `side`, an index into SIDES."""
    shape = batch["tokens"].shape
    if len(shape) == 2:
        return batch
    rows, sides, places = shape
    found = {
        name: leaf.reshape(-1, places) if leaf.shape == shape else np.repeat(leaf, sides, axis=0) for name, leaf in batch.items()
    }
    return {**found, "side": np.tile(np.arange(sides), rows)}


def targets(row: Mapping[str, np.ndarray], ignore_index: int | None = None) -> np.ndarray:
    """Returns bool[T + 1]: which tokens of a row the loss counts as targets (`trainers.tasks.causal_lm`)."""
    tokens = row["tokens"]
    found = np.arange(len(tokens)) > 0
    if "token_weight" in row:
        found &= row["token_weight"] > 0
    if "segments" in row:
        found[1:] &= (row["segments"][1:] == row["segments"][:-1]) & (row["segments"][1:] > 0)
    if ignore_index is not None:
        found &= tokens != ignore_index
    return found & (row.get("weight", 1.0) > 0)


def segments_of(row: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns int[T + 1]: the document of each token, from 1 on; 0: filling."""
    if "segments" in row:
        return row["segments"]
    found = np.ones(len(row["tokens"]), np.int32)
    if "token_weight" in row:
        # Without segments, filling is what follows the last token that counts.
        counted = np.flatnonzero(row["token_weight"])
        found[counted[-1] + 1 if len(counted) else 0 :] = 0
    return found


def example(
    row: Mapping[str, np.ndarray],
    decode: Decode,
    names: Sequence[str] = (),
    *,
    coloured: bool,
    ignore_index: int | None = None,
    labels: Sequence[str] = (),
) -> Line:
    """Returns the text of a row in one line: each document in a colour of its own, what is no target dim; or with marks."""
    segments, is_target = segments_of(row), targets(row, ignore_index)
    parts = [*head(row, segments, is_target, names, labels)]
    # What is between two borders is of one document, and either counts or does not.
    borders = np.flatnonzero((np.diff(segments) != 0) | (np.diff(is_target) != 0)) + 1
    before = 0
    for start, stop in zip([0, *borders], [*borders, len(segments)], strict=True):
        segment, counts = int(segments[start]), bool(is_target[start])
        if segment == 0:
            continue
        text = printable(decode(row["tokens"][start:stop].tolist())).replace("\n", "↵")
        if coloured:
            style = SEGMENT_STYLES[segment % len(SEGMENT_STYLES)]
            parts.append((text, style if counts else f"{NO_TARGET} {style}"))
        else:
            mark = SEGMENT_MARK if before not in (0, segment) else ""
            parts.append((mark + (text if counts else text.join(NO_TARGET_MARKS)), ""))
        before = segment
    return tuple(parts)


def head(
    row: Mapping[str, np.ndarray],
    segments: np.ndarray,
    is_target: np.ndarray,
    names: Sequence[str],
    labels: Sequence[str],
) -> Iterator[tuple[str, str]]:
    about = [f"example {int(row['sample_id'])}"] if "sample_id" in row else []
    about += [SIDES[int(row["side"])]] if "side" in row else []
    documents, filling = int(segments.max(initial=0)), int(np.count_nonzero(segments == 0))
    about.append(f"{documents} document{'s' if documents != 1 else ''}" if "segments" in row else f"{len(segments)} tokens")
    about.append(f"{int(is_target.sum())} targets")
    if filling:
        about.append(f"{filling} places empty")
    about += labels_of(row, labels)
    if "source" in row and names:
        yield (names[int(row["source"])], SOURCE)
        yield ("  ", "")
    yield (f"{', '.join(about)}\n", HEADING)


def labels_of(row: Mapping[str, np.ndarray], labels: Sequence[str]) -> Iterator[str]:
    """Yields the classes of the texts of a row, in their order."""
    if "label" in row and labels:
        found = np.ravel(row["label"])[: int(np.sum(row.get("example_weight", 1)))]
        yield f"label{'s' if len(found) != 1 else ''} {', '.join(labels[label] for label in found)}"


def other(batch: Batch) -> Iterator[Line]:
    """Yields the leaves of data that is no text."""
    for name, leaf in batch.items():
        numbers = f", from {leaf.min():.4g} to {leaf.max():.4g}" if leaf.size and leaf.dtype.kind in "biuf" else ""
        yield ((f"{name}  {leaf.dtype}{list(leaf.shape[1:])}{numbers}", ""),)


def by_source(batch: Batch, names: Sequence[str], ignore_index: int | None) -> Iterator[Line]:
    """Yields the rows, tokens and targets of each source among some rows."""
    rows = [{name: leaf[number] for name, leaf in batch.items()} for number in range(len(batch["tokens"]))]
    sources = batch["source"] if "source" in batch and names else np.zeros(len(rows), int)
    tokens = np.array([np.count_nonzero(segments_of(row)) for row in rows])
    counted = np.array([targets(row, ignore_index).sum() for row in rows])
    begins = batch["side"] == 0 if "side" in batch else np.ones(len(rows), bool)  # a pair is one row
    width = max(map(len, [*names, "all"]))
    for number, name in enumerate(names or ["all"]):
        own = sources == number
        share = counted[own].sum() / max(1, counted.sum())
        yield (
            (f"{name:<{width}}", SOURCE),
            (f"  {(own & begins).sum():>6,} rows  {count(tokens[own].sum()):>8} tokens", ""),
            (f"  {count(counted[own].sum()):>8} targets  {share:6.1%} of the targets", ""),
        )


def histogram(lengths: np.ndarray, row_tokens: int) -> Iterator[Line]:
    """Yields how many documents have how many tokens, in ranges that double; those longer than a row stand out."""
    lengths = np.asarray(lengths)
    if not len(lengths):
        return
    exponents = np.maximum(np.floor(np.log2(np.maximum(lengths, 1))).astype(int), 0)
    numbers = np.bincount(exponents)
    first = int(exponents.min())
    ranges = [f"{1 << exponent:,} - {(2 << exponent) - 1:,}" for exponent in range(len(numbers))]
    width = max(map(len, ranges[first:]))
    for exponent in range(first, len(numbers)):
        bar = "█" * -(-int(numbers[exponent]) * BAR_WIDTH // int(numbers.max()))
        style = "red" if 1 << exponent > row_tokens else "green"
        yield ((f"{ranges[exponent]:>{width}}  ", ""), (bar, style), (f" {numbers[exponent]:,}", ""))
    over = int(np.count_nonzero(lengths > row_tokens))
    summary = f"median {np.median(lengths):,.0f}, mean {lengths.mean():,.1f}, longest {lengths.max():,}"
    yield ((f"{summary}; {over:,} of {len(lengths):,} are longer than a row of {row_tokens:,}", ""),)
