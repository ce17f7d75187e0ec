"""Core. Values used in every part of qmq."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import unquote

HOST_CHARS_MAX = 253
"""Length limit of a host name in DNS."""
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_NUMBERS = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9a-fA-F]*)\.?")
"""Texts that the C library reads as an IPv4 address, such as `10.1`."""
_PORT = re.compile(r"[0-9]{1,5}")


class Epoch(NamedTuple):
    """Epoch of a mastership: `term` from the metaserver's row, `boot` raised by the master at each of its starts."""

    term: int
    boot: int

    def __str__(self) -> str:
        return f"{self.term}.{self.boot}"


NO_EPOCH = Epoch(0, 0)


class Role(IntEnum):
    """Roles of a broker, with QMQ's numbers."""

    MASTER = 0
    SLAVE = 1
    DELAY_MASTER = 5
    DELAY_SLAVE = 6


MASTERS = frozenset({Role.MASTER, Role.DELAY_MASTER})


class GroupKind(IntEnum):
    """Kinds of broker groups, with QMQ's numbers."""

    NORMAL = 1
    """Brokers, which store messages for consumers."""
    DELAY = 2
    """Delay servers, which store messages until they are due, then send them to brokers."""


class Durability(IntEnum):
    """Durability of an acknowledgement, stated in every reply."""

    FSYNC = 0
    """fsynced on master and slave."""


class Host(str):
    """Host name or IP address in its canonical form, without brackets: one address has one text."""

    __slots__ = ()

    def __new__(cls, text: str) -> Host:
        """Check and normalize `text`; raises ValueError, with the fault and the remedy, if it is neither."""
        bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if "%" in bare:
            raise ValueError(f"{text!r} has a zone, which other machines do not have; use an address without %")
        address = ip_address_of(bare)
        if address is not None:
            return super().__new__(cls, str(address))
        if text.count(":") == 1:
            raise ValueError(f"{text!r} has a port; use the host alone")
        if ":" in text or bare != text:
            raise ValueError(f"{text!r} is no IPv6 address; use one such as fd00::2")
        if _NUMBERS.fullmatch(text):
            raise ValueError(f"{text!r} is no IPv4 address; use one such as 192.168.0.7")
        if len(text) > HOST_CHARS_MAX or not _NAME.fullmatch(text):
            raise ValueError(f"{text!r:.300} is no host; use a name such as mq1.example, 192.168.0.7 or fd00::2")
        return super().__new__(cls, text.lower())

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The IP address, or None for a name."""
        return ip_address_of(self)

    @property
    def is_any(self) -> bool:
        """Return whether this is `0.0.0.0` or `::`, which stand for all addresses of a machine."""
        return self.address is not None and self.address.is_unspecified

    @property
    def is_loopback(self) -> bool:
        return self == "localhost" if self.address is None else self.address.is_loopback


def ip_address_of(text: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address of a text, or None if it is a name or invalid."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a process. All addresses are formatted and parsed by this class. `host` has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return `host:port` with brackets around an IPv6 address, as URLs and gRPC need it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse `host:port` or `[IPv6]:port`; raises ValueError with the fault and the remedy."""
        host, _, port = text.rpartition(":")
        is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
        if is_bare or not host or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
            raise ValueError(
                f"{text!r} is not host:port; use such as mq1:8080 or [fd00::2]:8080, with a port from 1 to 65535"
            )
        return cls(Host(host), int(port))

    @classmethod
    def of_peer(cls, text: str) -> Endpoint:
        """Return the sender of a gRPC call from grpc's text: `ipv4:10.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
        host, _, port = unquote(text).partition(":")[2].rpartition(":")
        return cls(plain_peer(host.strip("[]")), int(port) if _PORT.fullmatch(port) else 0)


def plain_peer(host: str) -> str:
    """Return the host of a connection in its plain form: a socket for IPv4 and IPv6 shows `10.0.0.1` as
    `::ffff:10.0.0.1`.
    """
    return host.removeprefix("::ffff:") if "." in host else host
