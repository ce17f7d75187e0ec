"""Core. The states of a process that keeps one copy of a group, and how it came into them: `/states`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qmq.replication.node import Node
from qmq.states import Machine


def machines(node: Node[Any]) -> Iterator[tuple[str, Machine[Any]]]:
    """Yield the machines of states that this process has now, with what each is about."""
    yield "log", node.log.health
    if node.master is not None:
        for watch in node.master.slaves.all:
            yield f"its slave {watch.name}".rstrip(), watch.follower
    elif node.slave is not None:
        yield "slave", node.slave.life


def states(node: Node[Any], *, now_ms: int) -> list[dict[str, object]]:
    """Return each machine's state and last transitions, oldest first, as JSON.

    Args:
        now_ms: by the clock of the machines' owners, which is that of `Host.monotonic_ms`.
    """
    return [
        {
            "about": about,
            "state": machine.state.name,
            "illegal": machine.table.illegal,
            "transitions": [
                {
                    "before": move.before.name,
                    "event": move.event,
                    "after": move.after.name,
                    "secondsAgo": round((now_ms - move.at_ms) / 1000, 1) if move.at_ms else None,
                }
                for move in machine.history
            ],
        }
        for about, machine in machines(node)
    ]
