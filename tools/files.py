"""Shell. Writes files that hold secrets: complete or not at all, for the owner alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from types import TracebackType


class PrivateFile:
    """A file that appears with `commit`, mode 0600, in place of what was there; entered before what is to be kept is
    asked for, so that a path that cannot be written fails first. Raises OSError."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._beside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")

    def __enter__(self) -> PrivateFile:
        if self._path.is_dir():
            raise IsADirectoryError(f"{self._path} is a directory")
        self._descriptor = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        self._beside.unlink(missing_ok=True)

    def commit(self, text: str) -> None:
        """Write the text, and make it the file; it is on disk when this returns."""
        with open(self._descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.write(text)
        os.fsync(self._descriptor)
        os.replace(self._beside, self._path)
        _sync_directory(self._path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
