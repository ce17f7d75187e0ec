"""Core. Settings of a gateway (QMQ_GATEWAY_ in the environment)."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from qmq.control_plane import metaserver_urls
from qmq.errors import InvalidRequest
from qmq.logs import FORMATS, LEVELS
from qmq.settings import InvalidSettings, setting
from qmq.types import Host


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of a gateway at its start. It has no token of its own, because each request has one."""

    metaserver: str = setting(why="HTTP addresses of the metaservers, separated by commas")
    app: str = setting("gateway", why="application name, shown to operators")
    host: Host = setting("127.0.0.1", why="address to listen on; 0.0.0.0 or :: for all")
    http_port: int = setting(8070, least=0, most=65535, why="port of all requests; 0: a free port")
    log_level: str = setting("INFO", one_of=LEVELS, why="which log lines are written")
    log_format: str = setting("text", one_of=FORMATS, why="one line an event, as text or as JSON")
    access_log: bool = setting(True, why="one line per request, without its token, query and body")
    cors_origins: tuple[str, ...] = setting((), why="origins of web pages that may call it, or *; none by default")
    trusted_proxies: tuple[str, ...] = setting(
        ("127.0.0.1", "::1"), why="addresses of proxies whose X-Forwarded-For names the caller, for the access log"
    )

    connections_max: int = setting(2_000, least=1, most=100_000, why="connections: long polls and streams keep theirs")
    body_bytes_max: int = setting(
        8 << 20, unit="bytes", least=1_000, most=256 << 20, why="longest request: twice a message's default limit"
    )
    body_s_max: int = setting(30, unit="s", least=1, most=600, why="time for a whole request to arrive")
    tokens_max: int = setting(
        1_000, least=1, most=100_000, why="tokens with clients here; of more, the one unused for longest is closed"
    )
    sessions_max: int = setting(
        500, least=1, most=20_000, why="sessions of all tokens; each is a consumer with its own connections"
    )
    token_sessions_max: int = setting(100, least=1, most=20_000, why="sessions of one token")
    prefetch_messages: int = setting(
        32, least=1, most=10_000, why="messages that wait here for the next pull; other consumers cannot get them"
    )
    unacked_max: int = setting(
        1_000, least=1, most=100_000, why="undecided messages of a session; above it, pulls are refused"
    )
    lease_s: int = setting(
        60, unit="s", least=1, most=43_200, why="time to decide a message, unless a pull sets another"
    )
    lease_s_max: int = setting(43_200, unit="s", least=1, most=604_800, why="longest lease that a request may set")
    wait_s_max: int = setting(60, unit="s", least=1, most=600, why="longest wait of a pull")
    session_idle_s: int = setting(
        10, unit="s", least=1, most=3_600, why="time without a request and undecided messages until a session ends"
    )
    keep_alive_s: int = setting(15, unit="s", least=1, most=600, why="interval of comments in a silent stream")
    stall_s: int = setting(60, unit="s", least=1, most=3_600, why="time until a client that reads nothing is cut off")
    send_s: int = setting(20, unit="s", least=1, most=600, why="time until a message without an outcome is given up")
    repeat_s: int = setting(
        600, unit="s", least=1, most=86_400, why="time for which the outcome of an Idempotency-Key is kept"
    )
    repeats_max: int = setting(10_000, least=1, most=1_000_000, why="kept outcomes of one token")
    stop_s: int = setting(10, unit="s", least=0, most=600, why="time for acks and sent messages at a stop")

    def __post_init__(self) -> None:
        complaints: list[str] = []
        if self.lease_s > self.lease_s_max:
            complaints.append("lease_s: it exceeds lease_s_max")
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if origin != "*" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path):
                complaints.append(f"cors_origins: {origin!r} is no origin; use one such as https://shop.example, or *")
        try:
            metaserver_urls(self.metaserver)
        except InvalidRequest as error:
            complaints.append(str(error))
        if complaints:
            raise InvalidSettings(complaints)
