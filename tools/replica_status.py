"""Core. ReplicaStatus: where the logs of master and slave end, and whether they are equal."""

from __future__ import annotations

from typing import Any

from tools.command import Command, Option
from tools.table import render_table

_EQUAL = {True: "logs are equal", False: "LOGS DIFFER: stop producing, run the audit"}


def render(groups: Any) -> str:
    return "\n\n".join(_render_group(group) for group in groups) or "there is no broker group"


def _render_group(group: Any) -> str:
    title = f"{group['brokerGroup']}  term {group['term']}  {'writable' if group['writable'] else 'readonly'}  "
    if group["equal"] is not None:
        title += _EQUAL[group["equal"]]
    elif group["lagBytes"] is not None:
        title += f"ends differ at this moment, the slave lacks {group['lagBytes']} bytes"
    else:
        title += "not both could be asked"
    head = ("ROLE", "BROKER", "UP", "EPOCH", "LOG END", "FLUSHED", "MATCHED", "HIGH WATERMARK", "CHAIN", "REASONS")
    rows = [
        (
            replica["role"],
            f"{replica['hostname']}:{replica['servePort']}",
            replica["up"],
            None if replica["term"] is None else f"{replica['term']}.{replica['boot']}",
            replica["logEnd"],
            replica["flushedEnd"],
            replica["matchedEnd"] if replica["role"] == "MASTER" else None,  # only a master compares
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
