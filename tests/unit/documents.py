"""The fenced blocks of the documents, and what kind each one is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "files.md"),
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
FILE_NAME = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")
COMMAND = re.compile(
    r"\.ci/|([A-Z_]+=\S+ )*(python|gangway|pytest|make|ray|mlflow|export|source|cd|mkdir|git|pip|kill|pkill"
    r"|docker|kubectl|gcloud|sbatch|scancel|bash|ssh)\b"
)


class Block(NamedTuple):
    document: str
    line: int
    language: str
    """As the fence says: may be empty."""
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The first line of a block says it, if the block is a file."""
        named = FILE_NAME.match(self.text)
        return named and named[1]

    @property
    def kind(self) -> str:
        """How the block is tried: `python`, `yaml`, `commands`, `drawing` or `output`; `theirs`: code of another system, which is
        only parsed; `unknown`: no test can try it."""
        if self.language in ("python", "yaml"):
            return self.language
        if self.language == "py":
            return "theirs"
        if self.language in ("", "sh", "console", "bash") and all(COMMAND.match(line) for line in command_lines(self.text)):
            return "commands"
        if self.language in ("", "text") and re.search(r"[|┌│]|->", self.text):
            return "drawing"
        if self.language in ("", "text") and self.text.lstrip().startswith("✓"):
            return "output"
        return "unknown"


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text()
    found = [
        Block(path.name, text.count("\n", 0, match.start()) + 1, match[2], re.sub(rf"^{match[1]}", "", match[3], flags=re.M))
        for match in FENCE.finditer(text)
    ]
    if 2 * len(found) != len(re.findall(r"^ *```", text, re.M)):
        raise ValueError(f"{path.name} has a fence that is not closed, or one of a form that is not understood")
    return found


def blocks(kind: str) -> list[Block]:
    return [block for path in DOCUMENTS for block in blocks_of(path) if block.kind == kind]


def command_lines(text: str) -> list[str]:
    """Without comments and empty lines; a line that ends with a backslash goes on in the next one."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in joined.splitlines())
    return [line.removeprefix("$ ") for line in lines if line]


def inline_code(path: Path) -> list[str]:
    """What stands between single back quotes, outside blocks. What a table row promises that is not yet or only in part there
    (the cells before its state) is left out."""
    text = re.sub(r"^\|.*\| (not yet|part) \|", "|", FENCE.sub("", path.read_text()), flags=re.M)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
