"""Core. Settings of the metaserver; their environment variables begin with QMQ_METASERVER_."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from qmq.access import Token, token_text
from qmq.logs import FORMATS, LEVELS
from qmq.settings import InvalidSettings, advertising_complaints, setting
from qmq.types import Host

CLUSTER_TOKEN_CHARS_MIN = 8
CLUSTER_NAME = r"[A-Za-z0-9._-]{1,64}"


@dataclass(frozen=True)
class MetaserverSettings:
    """Settings of one metaserver process."""

    host: Host = setting("127.0.0.1", why="address to listen on; 0.0.0.0 or :: for all")
    http_port: int = setting(8080, least=0, most=65535, why="/meta/address, /management, /metrics; 0: a free port")
    grpc_port: int = setting(8081, least=0, most=65535, why="brokers and clients; 0: a free port")
    advertised_ip: Host = setting(
        "", why="host name or IP address that /meta/address gives to brokers and clients; default: host"
    )
    advertised_http_port: int = setting(
        0, least=0, most=65535, why="port that others connect to instead, as behind NAT; 0: http_port"
    )
    advertised_grpc_port: int = setting(0, least=0, most=65535, why="the same for grpc_port")
    database: str = setting(
        "sqlite:///metaserver.db", secret=True, why="SQLAlchemy URL; tables are made and migrated at start"
    )
    database_timeout_ms: int = setting(
        3000, unit="ms", least=100, most=60_000, why="a call takes a few ms; a longer one counts as not answered"
    )
    poll_ms: int = setting(250, unit="ms", least=20, most=10_000, why="how soon changes of other metaservers are seen")
    snapshot: str = setting(
        "", why="file to start from while the database is away; default: beside SQLite's, else here; `none`: no file"
    )
    cluster_token: Token = setting(
        secret=True, why="key of the installation: all its metaservers and brokers have it; it grants every right"
    )
    cluster_token_before: Token = setting(
        "", secret=True, why="the key before a rotation: accepted as well, until it is taken out"
    )
    password_keys: tuple[str, ...] = setting(
        (),
        secret=True,
        why="keys that encrypt passwords of databases in the table: the first one, the others only decrypt",
    )
    open_lists: bool = setting(False, why="QMQ's lists are answered without a token, as QMQ does")
    audit_ledger: str = setting(
        "", why="directory of the audit's ledger, on this machine or mounted: the console shows its nights"
    )
    oidc_issuer: str = setting("", why="OpenID provider by which people log in to the console; docs/access.md")
    oidc_client_id: str = setting("", why="this console's name at the provider")
    oidc_client_secret: str = setting("", secret=True, why="given with the id; empty: the provider requires none")
    oidc_redirect: str = setting("", why="the console as browsers reach it: https://HOST/console/oidc/callback")
    oidc_roles: tuple[str, ...] = setting(
        (), why="roles: viewer=VALUE, operator=VALUE, admin=VALUE, of the claim that oidc_roles_claim names"
    )
    oidc_roles_claim: str = setting(
        "groups", why="claim with a person's groups or roles; dots lead into objects, or are part of its name"
    )
    oidc_name_claim: str = setting("preferred_username", why="claim that names a person in the audit trail; else sub")
    trusted_proxies: tuple[str, ...] = setting(
        ("127.0.0.1", "::1"),
        why="addresses and networks of nginx: their X-Forwarded-For names the caller in the audit trail",
    )
    new_subjects_per_minute: int = setting(
        10_000, least=1, most=10_000_000, why="for all clients of one token, so that none fills the tables"
    )
    new_subjects_max: int = setting(
        200_000,
        least=1,
        most=100_000_000,
        why="for all clients of one token while this metaserver runs: bound of the sum of all minutes",
    )
    cluster: str = setting(
        "qmq",
        why="name of this installation: label `cluster` of its Prometheus targets; all its metaservers have the same",
    )
    log_level: str = setting("INFO", one_of=LEVELS, why="lowest level of written log lines")
    log_format: str = setting("text", one_of=FORMATS, why="one line an event, as text or as JSON")

    groups_per_subject_min: int = setting(2, least=1, most=100, why="QMQ's min.group.num: one group may be readonly")
    groups_per_subject_new: int = setting(
        4, least=1, most=100, why="a new subject's share of the groups; more make routes large, ExtendSubjectRoute adds"
    )
    heartbeat_timeout_ms: int = setting(
        5000,
        unit="ms",
        least=200,
        most=300_000,
        why="two heartbeats of an idle broker; a closed connection is noticed at once",
    )
    broker_timeout_ms: int = setting(2000, unit="ms", least=50, most=60_000, why="a healthy broker answers in a few ms")
    swap_catch_up_ms: int = setting(
        5000, unit="ms", least=100, most=300_000, why="longest wait of SwapRoles until the slave has everything"
    )
    swap_hold_ms: int = setting(
        10_000,
        unit="ms",
        least=1000,
        most=300_000,
        why="the master accepts nothing for this time; then the swap is cancelled",
    )
    swap_finish_ms: int = setting(
        15_000, unit="ms", least=100, most=300_000, why="longest wait of SwapRoles for the report of the new master"
    )
    failover: bool = setting(
        False,
        why="a slave with every acknowledged message is promoted when its master is gone; SetFailover for one group",
    )
    failover_silence_ms: int = setting(
        2000,
        unit="ms",
        least=200,
        most=60_000,
        why="a master that sends nothing to metaserver and slave for this time counts as gone",
    )
    watch_subjects_max: int = setting(
        100_000, least=1, most=1_000_000, why="subjects of one client; bounds the memory that it can take"
    )
    token_subjects_max: int = setting(
        2_000_000, least=1, most=100_000_000, why="subjects of all clients of a token, each counted for each client"
    )
    token_watches_max: int = setting(
        50_000, least=1, most=1_000_000, why="clients of a token that watch routes at once"
    )
    group_expiry_days: int = setting(
        0, unit="days", least=0, most=3650, why="consumer groups without a consumer for so long are removed; 0: never"
    )
    request_bytes_max: int = setting(
        65_536, unit="bytes", least=1024, most=16_777_216, why="an operator's request has a few hundred bytes"
    )

    def __post_init__(self) -> None:
        complaints = []
        for name, key in (("cluster_token", self.cluster_token), ("cluster_token_before", self.cluster_token_before)):
            token = token_text(key)
            if token and (len(token) < CLUSTER_TOKEN_CHARS_MIN or not token.isascii() or not token.isprintable()):
                complaints.append(f"{name}: fewer than {CLUSTER_TOKEN_CHARS_MIN} characters, or not printable ASCII")
        complaints += advertising_complaints(self.host, self.advertised_ip)
        if not re.fullmatch(CLUSTER_NAME, self.cluster):
            complaints.append(f"cluster: {self.cluster!r} is no name; use 1 to 64 letters, digits, '.', '_' and '-'")
        if self.groups_per_subject_new < self.groups_per_subject_min:
            complaints.append("groups_per_subject_new: less than groups_per_subject_min, and would have no effect")
        if self.swap_hold_ms <= self.swap_catch_up_ms + self.broker_timeout_ms:
            complaints.append("swap_hold_ms: must be longer than swap_catch_up_ms and broker_timeout_ms together")
        if not all(_is_key(key) for key in self.password_keys):
            complaints.append("password_keys: one is not 32 bytes in URL-safe base64; Fernet.generate_key() makes one")
        complaints += [
            f"trusted_proxies: {text!r} is no address and no network such as 10.0.0.0/24"
            for text in self.trusted_proxies
            if not _is_network(text)
        ]
        complaints += self._oidc_complaints() if self.oidc_issuer else ()
        if complaints:
            raise InvalidSettings(complaints)

    def _oidc_complaints(self) -> Iterator[str]:
        if not self.oidc_client_id:
            yield "oidc_client_id: missing, and oidc_issuer is set"
        for name, address in (("oidc_issuer", self.oidc_issuer), ("oidc_redirect", self.oidc_redirect)):
            parts = urlsplit(address)
            if parts.scheme != "https" and not (parts.scheme == "http" and _is_own(parts.hostname or "")):
                yield f"{name}: {address!r} is no https:// address; http:// is for this machine alone"
        if not self.oidc_roles:
            yield "oidc_roles: empty, so no user could log in; set for example operator=on-call"
        for text in self.oidc_roles:
            role, equals, value = text.partition("=")
            if role not in ("viewer", "operator", "admin") or not equals or not value:
                yield f"oidc_roles: {text!r} is not viewer=VALUE, operator=VALUE or admin=VALUE"

    @property
    def snapshot_path(self) -> Path | None:
        if self.snapshot == "none":
            return None
        if self.snapshot:
            return Path(self.snapshot)
        kind, _, file = self.database.partition(":///")
        beside = file if kind.startswith("sqlite") and file and ":memory:" not in file else "metaserver"
        return Path(f"{beside}.snapshot")

    @property
    def advertised(self) -> str:
        return self.advertised_ip or self.host


def _is_own(host: str) -> bool:
    try:
        return Host(host).is_loopback
    except ValueError:
        return False


def _is_key(text: str) -> bool:
    try:
        return len(base64.urlsafe_b64decode(text)) == 32
    except ValueError:
        return False


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
