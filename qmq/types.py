"""Core. The few values that every part of qmq passes around."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Epoch(NamedTuple):
    """Mastership of a master: `term` from the metaserver's row, `boot` raised by the master at each of its starts."""

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
    """Brokers: they keep messages for consumers."""
    DELAY = 2
    """Delay servers: they keep messages until these are due, then give them to brokers."""


class Durability(IntEnum):
    """What an acknowledgement stands for; named in every reply."""

    FSYNC = 0
    """fsynced on master and slave."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read `host:port`; raises ValueError with what is wrong."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is not host:port")
        return cls(host, int(port))
