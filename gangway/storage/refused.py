"""A run that is refused leaves no folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gangway.storage import ours
from gangway.storage.documents import is_url


@contextmanager
def no_folder_if_refused(path: str) -> Iterator[None]:
    """Removes the folder and those above it again, if they are made within and an error leaves them empty. A URL has no
    folders."""
    folder = Path(path)
    made = [] if is_url(path) else [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first that has something in it ends this
            for each in made:
                ours.delete_empty(each)
        raise
