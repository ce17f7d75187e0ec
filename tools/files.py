"""Shell. Secrets and documents: read from files, standard input or a prompt, and written for the owner alone."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import sys
from pathlib import Path
from types import TracebackType

from qmq.access import Token, TokenFile, require_private
from qmq.errors import AccessError
from qmq.message_sizes import BODY_BYTES_MAX
from qmq.tools.terminal import complain, is_interactive

SECRET_CHARS_MAX = 4096
STANDARD_STREAM = "-"
"""Path of standard input or output."""
FILE_MARK = "@"
"""In front of the path of a body's file."""


class NoInput(Exception):
    """A secret or document is missing or unreadable; the text names the remedy."""


def read_token(typed: str | None, path: str | None) -> Token:
    """Return the API token, or an empty text. A token from a file follows changes of that file.

    Tried in this order: command line (QMQ's way), file or standard input, QMQ_TOKEN, file named by QMQ_TOKEN_FILE.
    """
    if typed is not None:
        complain("warning: --token=… stands in the process list; use QMQ_TOKEN or --token-file")
        return _as_token(typed, "--token")
    if path is not None:
        return _token_in(path)
    if token := os.environ.get("QMQ_TOKEN", ""):
        return _as_token(token, "QMQ_TOKEN")
    path = os.environ.get("QMQ_TOKEN_FILE")
    return _token_in(path) if path else ""


def _token_in(path: str) -> Token:
    token = _as_token(read_secret(path, "token"), path)
    return TokenFile(Path(path), token) if Path(path).is_file() else token  # a pipe is read once


def _as_token(text: str, where: str) -> str:
    """Return the token without its line end; raise NoInput if it does not fit into a header."""
    token = text.strip("\r\n")
    if not token.isascii() or not token.isprintable():
        raise NoInput(f"{where} holds no token. A token is one line of printable ASCII characters")
    return token


def read_password(name: str, typed: str | None, path: str | None) -> str:
    """Return a secret option from the command line, a file, standard input or a prompt."""
    if typed is not None:
        complain(f"warning: --{name}=… stands in the process list; use --{name}-file, or leave it out to be asked")
        return typed
    if path is not None:
        return read_secret(path, name)
    if not is_interactive(sys.stdin):
        raise NoInput(f"--{name}-file is missing (- is standard input); at a terminal you would be asked")
    try:
        return getpass.getpass(f"{name}: ")
    except EOFError:
        raise NoInput(f"no {name} was typed") from None


def read_secret(path: str, name: str) -> str:
    """Read a file of one line; `-` is standard input."""
    try:
        if path == STANDARD_STREAM:
            text = sys.stdin.read(SECRET_CHARS_MAX + 1)
        else:
            with open(path, encoding="utf-8") as file:
                require_private(file.fileno(), Path(path))
                text = file.read(SECRET_CHARS_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise NoInput(f"the {name} cannot be read from {path}: {error}") from None
    except AccessError as error:
        raise NoInput(str(error)) from None
    secret = text.strip("\r\n")
    if not secret or len(text) > SECRET_CHARS_MAX or not secret.isprintable():
        where = "standard input" if path == STANDARD_STREAM else path
        raise NoInput(f"{where} holds no {name}: one line of up to {SECRET_CHARS_MAX} characters was expected")
    return secret


def read_document(path: str) -> str:
    """Read a JSON document from a file (`-`: standard input) and return it without blanks."""
    try:
        if path == STANDARD_STREAM:
            text = sys.stdin.read()
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    except (OSError, ValueError, RecursionError) as error:
        raise NoInput(f"{path} cannot be read: {error}") from None


def read_body(typed: str) -> bytes:
    """Return the content of a message: a text as typed, or the file behind an @ (`@-`: standard input).

    A file of more than `BODY_BYTES_MAX` is read to one byte beyond, and refused as any message.
    """
    if not typed.startswith(FILE_MARK):
        return os.fsencode(typed)
    path = typed.removeprefix(FILE_MARK)
    try:
        if path == STANDARD_STREAM:
            return sys.stdin.buffer.read(BODY_BYTES_MAX + 1)
        with open(path, "rb") as file:
            return file.read(BODY_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise NoInput(f"the body cannot be read from {path}: {error}") from None


class PrivateFile:
    """File of mode 0600 that `commit` puts in place atomically. Enter it before the request: a path that cannot be
    written then fails first. Raises OSError.
    """

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
        """Write the text and replace the file; returns after fsync."""
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
