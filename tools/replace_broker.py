"""Core. ReplaceBroker: put a broker in the place of a stopped one; twice, it swaps two stopped brokers."""

from __future__ import annotations

from typing import Any

from tools.command import BROKER, Command


def render(before: Any) -> str:
    return f"{before['hostname']}:{before['servePort']} was the {before['role']} of {before['group']} and is replaced"


COMMAND = Command(
    name="ReplaceBroker",
    help="put a broker in the place of a stopped one; to swap two stopped brokers: --role=0 with the slave's "
    "addresses, then --role=1 with the master's",
    action="ReplaceBroker",
    options=BROKER,
    render=render,
)
