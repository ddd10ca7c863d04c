"""Records in a list, for what reads records."""

from __future__ import annotations


class ListRecords(list):
    @property
    def columns(self):
        return tuple(self[0])

    def where(self, index):
        return f"pairs.jsonl, line {index + 1}"
