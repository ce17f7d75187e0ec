"""Core. Values used in every part of qmq."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a process."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse `host:port`; raises ValueError with the fault."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is not host:port")
        return cls(host, int(port))
