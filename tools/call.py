"""Shell. One call to a metaserver: its address, the request, and the answer: done, refused, unreachable or unknown."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from urllib.parse import urlencode, urlsplit

from qmq.types import Endpoint

DEFAULT_PORT = 8080


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a metaserver."""

    host: str
    port: int
    secure: bool = False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `host`, `host:port` or a URL; raises ValueError."""
        try:
            url = urlsplit(text if "://" in text else f"http://{text}")
            port = url.port
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}; use mq1:8080, [fd00::2]:8080 or http://mq1:8080") from None
        if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/") or url.query:
            raise ValueError(f"{text!r} is no address; use mq1:8080, [fd00::2]:8080 or http://mq1:8080")
        if port == 0:
            raise ValueError(f"{text!r}: 0 is no port")
        secure = url.scheme == "https"
        return cls(url.hostname, port or (443 if secure else DEFAULT_PORT), secure)

    @classmethod
    def parse_several(cls, text: str) -> tuple[Address, ...]:
        """Parse addresses separated by commas; raises ValueError."""
        return tuple(cls.parse(address.strip()) for address in text.split(","))

    def __str__(self) -> str:
        """Return the address as it can be typed."""
        place = str(Endpoint(self.host, self.port))
        return f"https://{place}" if self.secure else place

    @property
    def url(self) -> str:
        return str(self) if self.secure else f"http://{self}"


class Exit(IntEnum):
    """Exit status of a command."""

    DONE = 0
    REFUSED = 1
    """Nothing was changed; the reason is shown."""
    USAGE = 2
    UNREACHABLE = 3
    """Nothing was changed; the metaserver, or a process that it needs, does not answer."""
    UNKNOWN = 4
    """The change may have been made; check before repeating it."""


_STATUS = {0: Exit.DONE, -1: Exit.REFUSED, -2: Exit.UNKNOWN, -3: Exit.UNREACHABLE}
"""The field `status` of an answer."""
_HTTP_STATUS = {429: Exit.UNREACHABLE, 503: Exit.UNREACHABLE, 500: Exit.UNKNOWN, 504: Exit.UNKNOWN}
"""HTTP status of error answers; others are refusals."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of an action."""

    exit: Exit
    message: str
    data: Any
    raw: Any
    """The answer as received."""


def read_answer(http_status: int, raw: Any) -> Answer | None:
    """Parse the answer of a metaserver; None if it has no known form.

    QMQ's styles: standard, `{"status", "message", "data"}`; map, `{"data"}` or `{"error"}`; raw, the bare result.
    """
    if http_status != 200:
        return _error(http_status, raw)
    if isinstance(raw, list):
        return Answer(Exit.DONE, "", raw, raw)
    if not isinstance(raw, dict):
        return None
    if "error" in raw:
        return Answer(_STATUS.get(raw.get("status", -1), Exit.REFUSED), str(raw["error"]), raw.get("data"), raw)
    if type(raw.get("status")) is int:
        exit_status = _STATUS.get(raw["status"], Exit.REFUSED)
        return Answer(exit_status, str(raw.get("message") or ""), raw.get("data"), raw)
    return Answer(Exit.DONE, "", raw["data"] if set(raw) == {"data"} else raw, raw)


def _error(http_status: int, raw: Any) -> Answer | None:
    """Parse an error of the HTTP side: `{"error": {"code", "message", "action"}}`, or QMQ's envelope."""
    if not isinstance(raw, dict):
        return None
    error = raw.get("error", raw)
    if not isinstance(error, dict) or not error.get("message"):
        return None
    message = ": ".join(filter(None, (str(error["message"]), str(error.get("action") or ""))))
    return Answer(_HTTP_STATUS.get(http_status, Exit.REFUSED), message, None, raw)


CONNECT_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 1 << 30


class CallFailed(Exception):
    """Call that got no answer of a metaserver. `sent`: the request left this machine, so the action may have been
    carried out.
    """

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


def reachable(addresses: Sequence[Address]) -> Address:
    """Return the first address that accepts a connection; without any, the first."""
    for address in addresses if len(addresses) > 1 else ():
        with suppress(CallFailed), closing(_connect(address)):
            return address
    return addresses[0]


def post(address: Address, token: str, arguments: Mapping[str, str], *, timeout_s: float) -> Answer:
    """Post a request to /management; return the answer.

    Raises:
        CallFailed: no connection, no answer in time, or an answer that is not a metaserver's.
    """
    connection = _connect(address)
    try:
        status, reason, body = _exchange(connection, address, token, arguments, timeout_s)
    finally:
        connection.close()
    answer = read_answer(status, _json(body))
    if answer is None:
        text = f"{address} answered {status} {reason}: {body[:200].decode('utf-8', 'replace').strip()}"
        raise CallFailed(text, sent=status == 200 or status >= 500)
    return answer


def _connect(address: Address) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=CONNECT_TIMEOUT_S)
    try:
        connection.connect()
    except (OSError, UnicodeError) as error:  # a label of more than 63 characters is a UnicodeError
        raise CallFailed(f"cannot reach a metaserver at {address}: {error}", sent=False) from error
    return connection


def _exchange(
    connection: http.client.HTTPConnection, address: Address, token: str, arguments: Mapping[str, str], timeout_s: float
) -> tuple[int, str, bytes]:
    headers = {"X-Api-Token": token, "Content-Type": "application/x-www-form-urlencoded"}
    deadline = time.monotonic() + timeout_s
    sock = connection.sock
    try:
        sock.settimeout(timeout_s)
        connection.request("POST", "/management", urlencode(arguments), headers)
        response = connection.getresponse()
        return response.status, response.reason, _read(response, sock, deadline)
    except (OSError, http.client.HTTPException) as error:
        text = "time-out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise CallFailed(f"no answer from {address} within {timeout_s:g} s: {text}", sent=True) from error


def _read(response: http.client.HTTPResponse, sock: socket.socket, deadline: float) -> bytes:
    """Read the answer within the deadline, even if the server sends one byte at a time."""
    pieces, length = [], 0
    while piece := response.read1(1 << 20):
        pieces.append(piece)
        length += len(piece)
        left_s = deadline - time.monotonic()
        if length > ANSWER_BYTES_MAX or left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
    return b"".join(pieces)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
