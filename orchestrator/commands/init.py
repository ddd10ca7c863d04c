"""`python -m orchestrator.commands.init DIR`: writes a small project of a user's own, which runs at once.

The files are those of `examples/project/`. With --examples it writes the configurations and the examples of gangway instead.
Exit status: 0; 2 when the folder is not empty, or cannot be written.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gangway.program import EXIT_FINE, Parser, command
from gangway.storage import ours
from orchestrator.shipped.files import CONFIGS, EXAMPLES, PROJECT, folder_of

NEXT = {
    False: ("gangway run config.yaml    # trains on two hosts: two processes of this machine", "pytest    # pip install pytest"),
    True: ("gangway run configs/tiny.yaml", "gangway run examples/callback.yaml"),
}
"""What to do in the new folder; with the examples."""


class InitError(Exception):
    """The folder cannot be written."""


@command(InitError, FileNotFoundError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orchestrator.commands.init", "Write a small project, which runs at once.", example="my-project")
    parser.add_argument("folder", metavar="DIR", help="a new or empty folder")
    parser.add_argument("--examples", action="store_true", help="write the configurations and examples of gangway instead")
    options = parser.parse_args(argv)
    files = examples() if options.examples else project()
    write(Path(options.folder), files)
    print("\n".join(next_steps(options.folder, files, NEXT[options.examples])))
    return EXIT_FINE


def project() -> dict[str, bytes]:
    return dict(read(folder_of(EXAMPLES) / PROJECT))


def examples() -> dict[str, bytes]:
    """The files of both folders. The examples are imported as `examples.NAME`, so their folder keeps its name."""
    own = f"{EXAMPLES}/{PROJECT}/"
    folders = ((name, folder_of(name)) for name in (CONFIGS, EXAMPLES))
    files = {f"{name}/{path}": content for name, folder in folders for path, content in read(folder)}
    return {path: content for path, content in files.items() if not path.startswith(own)}


def read(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (path, content) of each file of a folder. Paths are relative to it."""
    for path in sorted(folder.rglob("*")):
        # Python writes its caches beside the files, also where they are installed.
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(folder)), path.read_bytes()


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files into a new or empty folder: all, or none. Raises InitError."""
    if folder.exists() and not folder.is_dir():
        raise InitError(f"{folder} is a file: expected a new or empty folder")
    if names := sorted(os.listdir(folder) if folder.exists() else ()):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InitError(f"{folder} is not empty, it has {', '.join(names[:3])}{more}: give a new or empty folder")
    written: list[Path] = []
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # Exclusively: of two that write here at once, one is refused and deletes nothing of the other.
            with path.open("xb") as file:
                written.append(path)
                file.write(content)
    except OSError as error:
        remove(written, folder)
        raise InitError(
            f"{error.filename or folder} cannot be written: {error.strerror}; nothing was left in {folder}"
        ) from error


def remove(written: Sequence[Path], folder: Path) -> None:
    """Deletes these files of a folder, and the folders inside it that are empty then."""
    for path in written:
        with suppress(OSError):  # the error that led here is the one to tell
            ours.delete(path, ours.among("a file made just now", written))
    # Deeper ones first.
    inside = {parent for path in written for parent in path.relative_to(folder).parents} - {Path()}
    for parent in sorted(inside, reverse=True):
        with suppress(OSError):
            ours.delete_empty(folder / parent)


def next_steps(folder: str, files: Mapping[str, bytes], next_commands: Sequence[str]) -> list[str]:
    into = [] if Path(folder).resolve() == Path.cwd() else [f"cd {shlex.quote(folder)}"]
    return [f"{folder} has", *(f"  {name}" for name in files), "next:", *(f"  {line}" for line in (*into, *next_commands))]


if __name__ == "__main__":
    sys.exit(main())
