"""Data whose server is away at first: whoever asks too early gets no connection.

AWAY is JSON, {"folder", "times"}: so many times it is asked in vain, by whatever process. (Not for so many seconds: a machine may
be slow.)
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from trainers.config.arguments import TrainingArguments
from trainers.data.sources import text


def byte_text(arguments: TrainingArguments):
    away = json.loads(os.environ["AWAY"])
    for number in range(away["times"]):
        try:
            (Path(away["folder"]) / f"asked-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the data server is away")
    return text.text_windows(arguments)
