"""Core. What a command is: its name, its options, what it asks of the metaserver, how its answer reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command; its name is also the name of the parameter that is sent."""

    name: str
    help: str
    default: str | None = None
    """None: the option is required."""
    is_port: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One operator's command."""

    name: str
    help: str
    action: str
    """The metaserver's name for it."""
    options: tuple[Option, ...]
    render: Callable[[Any], str]
    """The result as people read it."""
    changes: bool = True
    """Whether it changes anything: then it needs a token, and a lost answer leaves its outcome unknown."""
    timeout_s: float = 15
    """Longer than the metaserver takes at most, its waiting for the database included."""


GROUP = Option("brokerGroup", "name of the broker group")
BROKER = (
    GROUP,
    Option("role", "0 for the master, 1 for the slave"),
    Option("hostname", "the broker's setting hostname"),
    Option("ip", "IPv4 address at which the broker is reached"),
    Option("servePort", "port for producers and consumers", is_port=True),
    Option("syncPort", "port for the slave", is_port=True),
)
