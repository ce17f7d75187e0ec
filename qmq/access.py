"""Shell. Sources of a token (an argument, a file, standard input or the environment), and the check of a secret's file.

One rule decides about every file of a secret, for processes, clients and commands (`require_private`):

    writable by its group or by others                                          refused
    readable by others, of this process's user, and not mounted                 refused
    anything else                                                               accepted

So the files that Kubernetes (0440 with fsGroup, 0644), Docker (0444) and systemd (0400, 0440) mount are accepted,
because their platform guards them. The mode of another user's file is that user's decision.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from qmq.errors import AccessError
from qmq.logs import bounded
from qmq.plain import plain_text

log = bounded(__name__)

TOKEN_VARIABLE = "QMQ_TOKEN"
FILE_VARIABLE = "QMQ_TOKEN_FILE"
TOKEN_CHARS_MAX = 4096
SETTLED_NS = 1_000_000_000
"""Age of a change above which the file's times will differ after the next change: kernels count them in steps of
milliseconds.
"""
STANDARD_INPUT = "-"
MOUNTS = Path("/proc/self/mountinfo")
SHARED_FOLDERS = frozenset({"/tmp", "/var/tmp", "/dev/shm", "/run"})
"""Folders of all users, which are often mounts."""


class TokenFile:
    """Token in a file, which is read again for each connection: after a rotation the next connection has the new token.

    Made with a client, which shares it with its connections.

    Args:
        text: the present content; it stays in use while the file cannot be read.
    """

    __slots__ = ("path", "_text", "_seen")

    def __init__(self, path: Path, text: str) -> None:
        self.path: Path = path.absolute()  # the process may change its directory
        self._text = text
        self._seen = (0, 0, 0)

    def read(self) -> str:
        """Return the token in the file now. Costs one `stat` while the file is the same."""
        try:
            found = os.stat(self.path)
            seen = found.st_ino, found.st_size, found.st_ctime_ns
            if seen == self._seen:
                return self._text
            text = read_token_file(self.path)
            is_settled = time.time_ns() - found.st_ctime_ns > SETTLED_NS
            self._seen = seen if is_settled else (0, 0, 0)
        except (OSError, AccessError) as error:  # it may be replaced at this moment
            log.warning("token file not read, the token before stays in use file=%s error=%s", self.path, error)
            return self._text
        if text != self._text:
            self._text = text
            log.info("token file has a new token file=%s", self.path)
        return text


Token = str | TokenFile
"""Token of a client, or key of the installation: fixed, or in a file."""


def token_text(token: Token) -> str:
    """Return the token for a new connection."""
    return token.read() if isinstance(token, TokenFile) else token


def token_metadata(token: Token) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a gRPC call with the token."""
    return (("x-api-token", token_text(token)),)


def find_token(
    given: str | None = None,
    *,
    token_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    stdin: TextIO | None = None,
) -> str:
    """Return the present token of `token_source`, for a process that ends soon."""
    return token_text(token_source(given, token_file=token_file, environ=environ, stdin=stdin))


def token_source(
    given: Token | None = None,
    *,
    token_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    stdin: TextIO | None = None,
) -> Token:
    """Return `given`, else the file's token, else QMQ_TOKEN, else that of the file in QMQ_TOKEN_FILE.

    Args:
        given: the token itself; `-` reads one line of standard input instead.
        token_file: a file that other users cannot read or write; `-` is standard input, too.

    Returns:
        The token; empty if there is none.

    Raises:
        AccessError: token and file are both given, the token is blank, or the file cannot be read, breaks the rule, or
            holds no token.
    """
    environ = os.environ if environ is None else environ
    if given is not None and token_file is not None:
        raise AccessError("give the token or the file that holds it, not both")
    if isinstance(given, TokenFile):
        return given
    if given is not None:
        given = plain_text("token", given)
        if not given.strip():
            raise AccessError(f"the token is blank: leave it out to read {TOKEN_VARIABLE} or {FILE_VARIABLE}")
    if STANDARD_INPUT in (given, str(token_file)):
        return _one_line((sys.stdin if stdin is None else stdin).readline(TOKEN_CHARS_MAX + 2), "standard input")
    if given is not None:
        return given
    if token_file is None and (token := environ.get(TOKEN_VARIABLE, "")):
        return token
    path = token_file if token_file is not None else environ.get(FILE_VARIABLE) or None
    return "" if path is None else TokenFile(Path(path), read_token_file(Path(path)))


def add_token_options(parser: argparse.ArgumentParser) -> None:
    """Add `--token-file` and `--token`, for `find_token`."""
    default = f"default: {TOKEN_VARIABLE}, or the file that {FILE_VARIABLE} names"
    parser.add_argument("--token-file", help=f"file with the API token, - for standard input; {default}")
    parser.add_argument("--token", help="the API token itself: the process list shows it to every user")


def read_token_file(path: Path, name: str = "token") -> str:
    """Read the token, or the secret called `name`, in `path`: one line without spaces.

    Raises:
        AccessError: the file breaks a rule.
    """
    try:
        with path.open(encoding="utf-8") as file:
            require_private(file.fileno(), path)
            return _one_line(file.read(TOKEN_CHARS_MAX + 2), str(path), name)
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"the {name} file {path} cannot be read: {error}") from None


def require_private(descriptor: int, path: Path) -> None:
    """Check the open file of a secret against the rule above; a pipe is private.

    Raises:
        AccessError: with the mode and the remedy.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AccessError(f"other users may write {path} (mode {mode:03o}); run: chmod 600 {path}")
    if mode & stat.S_IROTH and found.st_uid == os.geteuid() and not _is_mounted(descriptor, path):
        raise AccessError(f"other users may read {path} (mode {mode:03o}); run: chmod 600 {path}")


def keep_private() -> None:
    """Make new files of this process unreadable for other users and unwritable for its group."""
    os.umask(os.umask(0o077) | 0o027)


def _is_mounted(descriptor: int, path: Path) -> bool:
    """Return whether the file, or its folder, is a mount of its own, or the file system is read-only."""
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return True
    folder = os.path.realpath(path.parent)
    return _is_mount(os.path.realpath(path)) or (folder not in SHARED_FOLDERS and _is_mount(folder))


def _is_mount(path: str) -> bool:
    """Return whether `path` is a mount point; Python alone does not detect a mount within one file system."""
    if os.path.ismount(path):
        return True
    try:
        points = {line.split(" ")[4] for line in MOUNTS.read_text().splitlines()}
    except OSError:  # not on Linux
        return False
    return path.replace(" ", "\\040") in points


def _one_line(text: str, where: str, name: str = "token") -> str:
    token = text.strip()
    if not token or len(token) > TOKEN_CHARS_MAX or len(token.split()) != 1:
        raise AccessError(f"{where} does not hold one {name} on one line")
    return token
