"""Core. ReplicaStatus: where the logs of master and slave end, and whether they are equal."""

from __future__ import annotations

from typing import Any

from tools.command import Command, Option
from tools.table import render_table

_EQUAL = {True: "logs are equal", False: "logs differ at their ends", None: "not both could be asked"}


def render(groups: Any) -> str:
    return "\n\n".join(_render_group(group) for group in groups) or "there is no broker group"


def _render_group(group: Any) -> str:
    title = f"{group['brokerGroup']}  term {group['term']}  {'writable' if group['writable'] else 'readonly'}  "
    title += _EQUAL[group["equal"]]
    if group["lagBytes"]:
        title += f", the slave lacks {group['lagBytes']} bytes"
    head = ("ROLE", "BROKER", "UP", "EPOCH", "LOG END", "FLUSHED", "MATCHED", "HIGH WATERMARK", "CHAIN", "REASONS")
    rows = [
        (
            replica["role"],
            f"{replica['hostname']}:{replica['servePort']}",
            replica["up"],
            None if replica["term"] is None else f"{replica['term']}.{replica['boot']}",
            replica["logEnd"],
            replica["flushedEnd"],
            replica["matchedEnd"],
            replica["highWatermark"],
            replica["chain"],
            replica["error"] or ",".join(replica["readonlyReasons"] or []),
        )
        for replica in group["replicas"]
    ]
    return f"{title}\n{render_table(head, rows)}"


COMMAND = Command(
    name="ReplicaStatus",
    help="show where the logs of master and slave end, and whether they are equal",
    action="ReplicaStatus",
    options=(Option("brokerGroup", "only this broker group", default=""),),
    render=render,
    changes=False,
)
