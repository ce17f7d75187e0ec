"""Shell. Looks at a network from this machine: names, ports, web pages and the clocks behind them."""

from __future__ import annotations

import http.client
import socket
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from qmq.errors import cause_of
from qmq.tools.address import Address
from qmq.tools.doctor.finding import ClockReading, read_clock

TIMEOUT_S = 3.0
PAGE_BYTES_MAX = 64 << 20


class Unreachable(Exception):
    """A name does not resolve, a port does not answer, or what answers is no web server."""


@dataclass(frozen=True, slots=True)
class Page:
    """A web page, and how its server's clock compares with ours (None: it does not say)."""

    status: int
    text: str
    clock: ClockReading | None


def resolve(host: str) -> list[str]:
    """Return the addresses of a name; raises Unreachable."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"{host} has no address: {error}") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def connect(host: str, port: int) -> float:
    """Open a TCP connection and close it; return how many seconds it took. Raises Unreachable."""
    began = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"{host}:{port} does not answer: {cause_of(error)}") from None
    return time.monotonic() - began


def read_page(address: Address, path: str, token: str = "") -> Page:
    """Read a page; raises Unreachable."""
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        sent_ms = time.time_ns() // 1_000_000
        connection.request("GET", path, headers={"X-Api-Token": token} if token else {})
        response = connection.getresponse()
        received_ms = time.time_ns() // 1_000_000
        text = response.read(PAGE_BYTES_MAX).decode("utf-8", "replace")
        clock = _clock(response.getheader("Date"), sent_ms, received_ms)
        return Page(response.status, text, clock)
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        raise Unreachable(f"{address.url}{path} does not answer: {cause_of(error)}") from None
    finally:
        connection.close()


def _clock(date: str | None, sent_ms: int, received_ms: int) -> ClockReading | None:
    try:
        date_ms = round(parsedate_to_datetime(date or "").timestamp() * 1000)
    except (ValueError, TypeError):
        return None
    return read_clock(date_ms, sent_ms=sent_ms, received_ms=received_ms)
