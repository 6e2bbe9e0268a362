"""A path as a user wrote it -> a Path."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ArgumentError


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """The Path, with a leading `~` or `~user` as a home folder; where there is no such user, as it is written.

    Raises: ArgumentError for something other than a str or a path object, naming it as `what`.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise ArgumentError(f"{what} is {path!r}; pass a str or a Path", code="bad_argument", source=what)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
