"""Shell. Posts an action to the metaserver and tells apart: done, refused, not reached, nobody knows."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

DEFAULT_PORT = 8080
CONNECT_TIMEOUT_S = 5
ANSWER_BYTES_MAX = 64 * 1024 * 1024


class CallFailed(Exception):
    """The metaserver gave no answer of its own. `sent`: it may have carried the action out."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Address:
    """Where a metaserver is."""

    host: str
    port: int
    secure: bool = False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host`, `host:port` or a URL; raises ValueError."""
        url = urlsplit(text if "://" in text else f"http://{text}")
        if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/") or url.query:
            raise ValueError(f"{text!r} is neither host:port nor http://host:port")
        port = url.port  # raises ValueError itself
        if port == 0:
            raise ValueError(f"{text!r}: 0 is no port")
        secure = url.scheme == "https"
        return cls(url.hostname, port or (443 if secure else DEFAULT_PORT), secure)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def post(address: Address, token: str, words: Mapping[str, str], *, timeout_s: float) -> Any:
    """Post to /management and return the JSON answer.

    Raises:
        CallFailed: no connection, no answer in time, or an answer that is not the metaserver's.
    """
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=CONNECT_TIMEOUT_S)
    try:
        try:
            connection.connect()
        except OSError as error:
            raise CallFailed(f"cannot reach a metaserver at {address}: {error}", sent=False) from error
        connection.sock.settimeout(timeout_s)
        return _exchange(connection, address, token, words)
    finally:
        connection.close()


def _exchange(connection: http.client.HTTPConnection, address: Address, token: str, words: Mapping[str, str]) -> Any:
    headers = {"X-Api-Token": token, "Content-Type": "application/x-www-form-urlencoded"}
    try:
        connection.request("POST", "/management", urlencode(words), headers)
        response = connection.getresponse()
        body = response.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise CallFailed(
            f"the metaserver at {address} did not answer: {error or type(error).__name__}", sent=True
        ) from error
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, list) and not (isinstance(answer, dict) and "status" in answer):
        text = (
            f"{address} answered {response.status} {response.reason}: {body[:200].decode('utf-8', 'replace').strip()}"
        )
        raise CallFailed(text, sent=response.status >= 500)
    return answer
