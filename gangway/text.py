"""Texts that may be of any length, shortened for people."""

from __future__ import annotations

MAX_MESSAGE, MAX_TRACEBACK = 4000, 20_000
"""The letters that are kept of a message, and of a traceback. A library may put a whole array or a web page into one, and it
would travel in events, lie in the run's files, and push others out of them."""
SHOWN = 60
"""The letters that are shown of a value."""


def cut(text: str, limit: int = MAX_MESSAGE) -> str:
    """Returns the text, of a long one the beginning and the end, where the cause is. It says how much was left out."""
    if len(text) <= limit:
        return text
    begin, end = limit * 2 // 3, limit // 3
    return f"{text[:begin]} ... [{len(text) - begin - end:,} letters left out] ... {text[-end:]}"


def shortened(text: str, limit: int = SHOWN) -> str:
    """Returns the text, of a long one the beginning."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
