"""Shell. gRPC channels and servers of the control ports; addresses of metaservers."""

from __future__ import annotations

import http.client
import os
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

from qmq.errors import InvalidRequest, NotServed
from qmq.message_sizes import ANSWER_BYTES_MAX
from qmq.plain import plain, plain_text
from qmq.types import Endpoint

T = TypeVar("T")

HANDSHAKE_MS = "grpc.server_handshake_timeout_ms"
IDLE_MS = "grpc.max_connection_idle_ms"
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    # Brokers are reached directly: a proxy of the environment is for addresses outside the installation.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    # A machine that hangs or is cut off sends nothing; without keepalive pings the loss shows after many minutes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
NO_PROBE = ("grpc.http2.bdp_probe", 0)
"""Without this option gRPC answers each message with a PING, to measure the bandwidth. For a stream with one small
message a second that is half of its cost at both ends; only large streams gain from it.
"""
META_CHANNEL_OPTIONS: list[tuple[str, int]] = [*CHANNEL_OPTIONS, NO_PROBE]
"""Options of channels to a metaserver. Channels of one process with equal options share a connection."""
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a second process on the same port is an error, not chance
    ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
    # Requests have a few kilobytes; a client that watches 10,000 subjects sends one megabyte.
    ("grpc.max_receive_message_length", 4 << 20),
    # Longest life of a connection without an HTTP/2 handshake: it has no token.
    (HANDSHAKE_MS, 5_000),
    # Longest life of a connection without a call. Links and watches are calls that last. A channel of qmq reconnects
    # with its next call.
    (IDLE_MS, 60_000),
    # A caller on a lost machine is detected within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Accept the channel's pings above instead of counting them as abuse.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    # A busy machine sends pings late and in bunches: with a limit, all its clients were cut off at once.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
"""Options of every gRPC server."""

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener for HTTP addresses of qmq's own processes, without proxies."""


EXPERIMENTS = "GRPC_EXPERIMENTS"


OLDER_ENGINE = (
    "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints,-event_engine_callback_cq"
)
"""gRPC's older I/O engine. A gRPC version without one of these names uses the newer engine and logs an error for
each.
"""


def use_older_engine() -> None:
    """Let the thread that waits for a process's calls read its connections too. By default a pool reads them, and its
    threads look for work twenty times a second: a sixth of an idle broker's cost, and a third of a metaserver's cost
    per client (docs/metaservers.md). gRPC reads the variable once, at import, so `__main__` calls this before. An
    operator's own value stays.
    """
    os.environ.setdefault(EXPERIMENTS, OLDER_ENGINE)


METASERVER_VARIABLE, APP_VARIABLE = "QMQ_METASERVER", "QMQ_APP"
_EXAMPLE = "http://mq1:8080 or http://[fd00::2]:8080, or several separated by commas"


def metaserver_urls(addresses: str | Sequence[str] | None = None) -> str:
    """Return the URLs of an installation's metaservers, separated by commas; `http://` may be left out.

    Args:
        addresses: one address, a text of several with commas, or a list; by default the value of QMQ_METASERVER.

    Raises:
        InvalidRequest: there is no address, or one of them is no URL.
    """
    name = "metaserver="
    if addresses is None:
        name, addresses = METASERVER_VARIABLE, os.environ.get(METASERVER_VARIABLE)
        if not addresses:
            raise InvalidRequest(f"no metaserver: set {name} to its HTTP address, {_EXAMPLE}, or give metaserver=")
    texts = [addresses] if isinstance(addresses, str) else addresses
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        urls = [_url(address.strip()) for text in texts for address in plain(text).split(",")]
        if all(urls):
            return ",".join(dict.fromkeys(urls))
    raise InvalidRequest(f"{name} is the metaserver's HTTP address, such as {_EXAMPLE}, not {addresses!r:.100}")


def _url(address: str) -> str:
    """Return the URL of one metaserver, or "" if the address is no URL."""
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    with suppress(ValueError):  # brackets without an IPv6 address, or a port that is no number
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        return url if is_web and not set(url) & set(" \t\r\n") else ""
    return ""


def app_name(given: str | None = None) -> str:
    """Return the application's name: `given`, else the value of QMQ_APP. A program's name would often be "python".

    Raises:
        InvalidRequest: the name is missing or is no text.
    """
    if given is None and not (given := os.environ.get(APP_VARIABLE)):
        raise InvalidRequest(
            f"the application has no name: set {APP_VARIABLE}, or give app=, as operators shall see it"
        )
    return plain_text("app", given, is_blank_allowed=False)


def first_answer(addresses: str, ask: Callable[[str], T]) -> T:
    """Return `ask(url)` of the first metaserver that answers, in random order. Blocks.

    Raises:
        OSError: no metaserver answers. ValueError: an answer is not a metaserver's.
    """
    urls = addresses.split(",")
    if len(urls) == 1:
        return ask(urls[0])
    random.shuffle(urls)  # spreads the clients; a metaserver of which only the web port works is left, too
    failures = []
    for url in urls:
        try:
            return ask(url)
        except (OSError, ValueError, NotServed) as error:
            failures.append(f"{url}: {error}")
    raise OSError("no metaserver answers: " + "; ".join(failures))


def find_metaserver(addresses: str, *, timeout_s: float = 3.0) -> str:
    """Return the gRPC `host:port` that a metaserver of these HTTP addresses names. Blocks.

    Args:
        timeout_s: time limit for each address.

    Raises: see `first_answer`.
    """

    def ask(url: str) -> str:
        answer = get(f"{url}/meta/address", timeout_s=timeout_s, bytes_max=1000)
        return str(Endpoint.parse(str(answer, "utf-8").strip()))

    return first_answer(metaserver_urls(addresses), ask)


def get(request: str | urllib.request.Request, *, timeout_s: float, bytes_max: int) -> bytes:
    """Return the body at an HTTP address of one of qmq's processes, at most `bytes_max` of it. Blocks.

    Raises:
        OSError: no answer; urllib's HTTPError is one. ValueError: the answer is not HTTP.
    """
    try:
        with DIRECT.open(request, timeout=timeout_s) as response:
            data: bytes = response.read(bytes_max)
            return data
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:  # its text is "<urlopen error …>"
        raise error.reason if isinstance(error.reason, OSError) else OSError(error.reason) from None
    except http.client.HTTPException as error:
        if isinstance(error, OSError):
            raise
        raise ValueError(f"the answer is not HTTP: {type(error).__name__}") from None
