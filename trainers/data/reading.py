"""Reads single examples: again after an error that may pass, and past those that cannot be read, if the settings say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gangway.errors import DataUnavailableError, TransientError, UsageError, may_pass
from trainers.config import DataConfig
from trainers.data.epoch_order import where_is
from trainers.protocol import SKIPPED

NOTED = 5
"""How many examples that were left out are named in notes."""
LONGEST_GAP = 1000
"""How many examples are searched for one that can be read in place of another."""


class Reader:
    """Reads examples of `dataset`. Called in the loader's threads. Streams are not read again: an iterator that has raised is
    at its end."""

    def __init__(
        self,
        dataset: Any,
        config: DataConfig,
        note: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.dataset, self.config, self.note, self.sleep = dataset, config, note, sleep
        self.is_stream = hasattr(dataset, "available")
        self._num_noted = 0

    def __call__(self, index: int) -> Mapping[str, Any]:
        """Returns the example. Raises DataUnavailableError after too many errors that might have passed."""
        if self.config.on_error == "raise" or self.is_stream:
            return self._read(index)
        try:
            return {**self._read(index), SKIPPED: np.zeros((), np.float32)}
        except UsageError:  # it is wrong in the same way for all examples
            raise
        except Exception as error:
            if self._num_noted < NOTED:
                self._num_noted += 1
                cause = error.__cause__ or error
                self.note(f"{where_is(self.dataset, index)} is left out: {type(cause).__name__}: {cause}")
            return self._filling(index, error)

    def _read(self, index: int) -> Mapping[str, Any]:
        tries = 1 if self.is_stream else 1 + self.config.retries
        for attempt in range(1, tries + 1):
            try:
                return self._columns(self.dataset[index])
            except Exception as error:
                if not may_pass(error) or self.is_stream:
                    error.add_note(f"while {where_is(self.dataset, index)} was read")
                    raise
                if attempt == tries:
                    message = (
                        f"{where_is(self.dataset, index)} could not be read, tried {tries} times: {type(error).__name__}: {error}"
                    )
                    raise DataUnavailableError(message) from error
                self.sleep(self.config.retry_backoff_s * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _filling(self, index: int, error: Exception) -> dict[str, Any]:
        """Returns another example in place of one that cannot be read; its weight is 0."""
        for other in range(index + 1, index + LONGEST_GAP):
            try:
                example = self._columns(self.dataset[other])
            except (UsageError, TransientError, OSError, ValueError, KeyError, RuntimeError):
                continue
            return {**example, "weight": np.zeros((), np.float32), SKIPPED: np.ones((), np.float32)}
        raise error

    def _columns(self, example: Mapping[str, Any]) -> Mapping[str, Any]:
        ignored = self.config.ignore_columns
        return {name: value for name, value in example.items() if name not in ignored} if ignored else example
