"""Shell. How processes and clients reach each other's control ports: gRPC channels, the metaserver's address."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from qmq.errors import InvalidRequest
from qmq.plain import plain
from qmq.types import Endpoint

HANDSHAKE_MS = "grpc.server_handshake_timeout_ms"
IDLE_MS = "grpc.max_connection_idle_ms"
CHANNEL_OPTIONS = [
    # Brokers are neighbours: a proxy of the environment is for the world outside.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 80 << 20),
    # A machine that hangs or is cut off sends nothing; without questions nobody would notice for many minutes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
NO_PROBE = ("grpc.http2.bdp_probe", 0)
"""Else each message is answered with a PING, to find out how much could be sent ahead. Of a line that says little, once
a second, that is half of what it costs both ends; only large streams gain from it."""
META_CHANNEL_OPTIONS = [*CHANNEL_OPTIONS, NO_PROBE]
"""For channels to a metaserver. Those of a process with the same options share a connection."""
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a second process on the same port is an error, not a coin toss
    ("grpc.max_send_message_length", 80 << 20),
    # Who asks sends a few kilobytes; a client that watches 10,000 subjects sends one megabyte.
    ("grpc.max_receive_message_length", 4 << 20),
    # Who opens a connection and says nothing has no token, and holds it no longer than this.
    (HANDSHAKE_MS, 5_000),
    # Nor longer than this, who says all that belongs to HTTP/2 and calls nothing. Links and watches are calls that
    # last; a channel of ours that rests for so long connects again by itself with its next call.
    (IDLE_MS, 60_000),
    # A caller whose machine is gone is noticed within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Accept the channel's questions above, instead of taking them for an attack.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    # From a busy machine they come late, then in bunches: with a limit, all clients there were cut off at once.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
"""For every gRPC server of ours."""

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens HTTP addresses of our own processes."""


EXPERIMENTS = "GRPC_EXPERIMENTS"


OLDER_ENGINE = (
    "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints,-event_engine_callback_cq"
)
"""gRPC's older I/O engine. A version of gRPC that does not know one of these names any more goes on with the newer one
and logs an error for each."""


def use_older_engine() -> None:
    """Let the thread that waits for a process's calls read its connections, too. By default a pool does, whose threads
    look twenty times a second for more: a sixth of what an idle broker costs, and a third of what it costs a metaserver
    to tell a client (docs/metaservers.md). gRPC looks at it once, when it is imported, so `__main__` calls this before.
    An operator's own setting stays."""
    os.environ.setdefault(EXPERIMENTS, OLDER_ENGINE)


def metaserver_url(address: str) -> str:
    """Return the URL of a metaserver that an application names; `http://` may be left out.

    Raises:
        InvalidRequest: it is none, as what an environment's missing variable gives.
    """
    if isinstance(address, str):
        address = plain(address)
        url = (address if "://" in address else f"http://{address}").rstrip("/")
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return url
    raise InvalidRequest(f"metaserver= is its HTTP address, such as http://127.0.0.1:8080, not {address!r:.100}")


def find_metaserver(url: str, *, timeout_s: float = 3.0) -> str:
    """Ask the metaserver at the HTTP address `url` for its gRPC `host:port`. Blocks.

    Raises:
        OSError: nobody answers.
        ValueError: what answers is no metaserver.
    """
    answer = get(f"{url.rstrip('/')}/meta/address", timeout_s=timeout_s, bytes_max=1000)
    return str(Endpoint.parse(str(answer, "utf-8").strip()))


def get(request: str | urllib.request.Request, *, timeout_s: float, bytes_max: int) -> bytes:
    """Get what an HTTP address of ours answers, `bytes_max` of it at most. Blocks.

    Raises:
        OSError: nobody answers; urllib's HTTPError is one. ValueError: what answers does not speak HTTP.
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
        raise ValueError(f"what answers does not speak HTTP: {type(error).__name__}") from None
