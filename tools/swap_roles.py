"""Core. SwapRoles: exchange master and slave of a group while both run."""

from __future__ import annotations

from typing import Any

from tools.command import GROUP, Command


def render(swapped: Any) -> str:
    master, slave = swapped["master"], swapped["slave"]
    takes = "takes messages" if swapped["writable"] else "does not take messages yet (ListBrokerGroups says why)"
    return (
        f"{swapped['brokerGroup']}: term {swapped['term']}, master {master['hostname']}:{master['servePort']}, "
        f"slave {slave['hostname']}:{slave['servePort']}, logs equal up to {swapped['logEnd']} "
        f"(chain {swapped['chain']}); {swapped['durationMs']} ms; the group {takes}"
    )


COMMAND = Command(
    name="SwapRoles",
    help="exchange master and slave of a broker group while both run",
    action="SwapRoles",
    options=(GROUP,),
    render=render,
    timeout_s=90,
)
