"""Which logs are Gangway's, and the only deletions of `cluster`: of these logs.

`hosts.log_dir` and the run's folder are a user's folders, with files of his own. So a folder of logs gets a *mark*, a file in it,
if there is nothing in it but what Gangway writes there. Only a log, by its name, in a folder with a mark is ever cut or deleted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from gangway.storage.durable import no_link
from gangway.storage.ours import NotOursError

MARK = ".gangway-logs"
ABOUT = "Logs of training processes, by Gangway. It deletes those that are old. Without this file it deletes nothing here.\n"
LOG = re.compile(r"(process-\d+-\d{4,}|precompilations-\d+)\.log(\.1)?")
PART = re.compile(rf"\.({LOG.pattern})\.\d+\.part")
"""A copy that is being written: nobody else gives a file such a name."""
HOST = re.compile(r"host-\d{4,}")
NAMES = (LOG, PART, HOST)


def claim(folder: str) -> bool:
    """Creates a folder for the logs of a host, or of the hosts of a run, and marks it if nobody else has anything in it. Returns
    whether it has the mark. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    if is_marked(folder):
        return True
    if os.path.islink(folder) or not all(any(name.fullmatch(entry) for name in NAMES) for entry in os.listdir(folder)):
        return False
    with open(os.path.join(folder, MARK), "w", opener=no_link) as file:
        file.write(ABOUT)
    return True


def is_marked(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, MARK)) and not os.path.islink(folder)


def logs_in(folder: str) -> Iterator[str]:
    """Yields the paths of Gangway's own logs in a folder, in order; none if the folder has no mark, or is not there."""
    if not is_marked(folder):
        return
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from sorted(entry.path for entry in entries if LOG.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))


def delete(path: str) -> None:
    """Deletes a log, or a folder of logs with all logs in it, if it has the mark. What else is in the folder stays, and the
    folder with it. Does nothing if there is none. Raises NotOursError without the mark, and OSError."""
    folder, name = os.path.split(path)
    if os.path.isdir(path) and not os.path.islink(path):
        _delete_folder(path)
    elif not (PART.fullmatch(name) or (LOG.fullmatch(name) and is_marked(folder))):
        raise NotOursError(f"{path} stays: it is no log of Gangway's in a folder with the file {MARK}")
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _delete_folder(folder: str) -> None:
    if not is_marked(folder):
        raise NotOursError(f"{folder} stays: it has no file {MARK}")
    for entry in list(os.scandir(folder)):
        if HOST.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and is_marked(entry.path):
            _delete_folder(entry.path)
        elif LOG.fullmatch(entry.name) or PART.fullmatch(entry.name):
            os.unlink(entry.path)
    if os.listdir(folder) == [MARK]:
        os.unlink(os.path.join(folder, MARK))
        os.rmdir(folder)
