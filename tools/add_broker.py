"""Core. AddBroker: give a broker a vacant place in a group, before its first start."""

from __future__ import annotations

from typing import Any

from tools.command import BROKER, Command


def render(broker: Any) -> str:
    return f"{broker['hostname']}:{broker['servePort']} is now the {broker['role']} of {broker['group']}"


COMMAND = Command(
    name="AddBroker",
    help="give a broker a vacant place in a group, before its first start",
    action="AddBroker",
    options=BROKER,
    render=render,
)
