"""Shell. Asks a metaserver and distinguishes: done, refused, try again later, not reached, outcome unknown."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from qmq.tools.address import Address
from qmq.tools.answer import Answer, read_answer

CONNECT_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 1 << 30


class CallFailed(Exception):
    """The metaserver gave no answer of its own. `sent`: it may have carried the action out."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


def post(address: Address, token: str, words: Mapping[str, str], *, timeout_s: float) -> Answer:
    """Post to /management.

    Raises:
        CallFailed: no connection, no answer in time, or an answer that is not a metaserver's.
    """
    connection = _connect(address)
    try:
        status, reason, body = _exchange(connection, address, token, words, timeout_s)
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
    connection: http.client.HTTPConnection, address: Address, token: str, words: Mapping[str, str], timeout_s: float
) -> tuple[int, str, bytes]:
    headers = {"X-Api-Token": token, "Content-Type": "application/x-www-form-urlencoded"}
    deadline = time.monotonic() + timeout_s
    sock = connection.sock
    try:
        sock.settimeout(timeout_s)
        connection.request("POST", "/management", urlencode(words), headers)
        response = connection.getresponse()
        return response.status, response.reason, _read(response, sock, deadline)
    except (OSError, http.client.HTTPException) as error:
        text = "time-out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise CallFailed(f"no answer from {address} within {timeout_s:g} s: {text}", sent=True) from error


def _read(response: http.client.HTTPResponse, sock: socket.socket, deadline: float) -> bytes:
    """Read the answer; a server that sends a byte now and then does not hold us for ever."""
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
