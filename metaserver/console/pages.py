"""Shell. The console's pages: what each asks, and which template shows the answers. Nothing is decided here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qmq.metaserver.console.asking import Asking

Query = Mapping[str, str]
"""What the address of the page says; what it does not say is empty."""
Ask = Callable[[Asking, Query], Awaitable[dict[str, Any]]]

ROWS = 100
"""A page shows so many groups, subjects or messages at most."""
DOCTOR_S = 1.0
"""Doctor asks every broker; one that is silent takes two seconds. Its own page waits, the overview does not."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page: its address below /console, its title, what it asks. `in_menu`: others are reached from these."""

    path: str
    title: str
    template: str
    ask: Ask
    in_menu: bool = True


async def _overview(asking: Asking, query: Query) -> dict[str, Any]:
    groups, doctor = await asyncio.gather(
        asking.ask("ListBrokerGroups"), asking.ask_for(DOCTOR_S, "Doctor")
    )  # fmt: skip
    wanted, state = query["name"], query["state"]
    rows = [row for row in groups.data or () if wanted in row["groupName"]]
    counts = {"all": len(rows), "taking": sum(row["writable"] for row in rows)}
    rows = [row for row in rows if state != "readonly" or not row["writable"]]
    rows.sort(key=lambda row: row["writable"])  # what needs somebody comes first
    return {"groups": groups, "doctor": doctor, "counts": counts, **_paged(rows, query)}


async def _group(asking: Asking, query: Query) -> dict[str, Any]:
    words = {"brokerGroup": query["name"]}
    groups, status, readonly = await asyncio.gather(
        asking.ask("ListBrokerGroups"), asking.ask("ReplicaStatus", words), asking.ask("ListReadonly", words)
    )
    group = next((row for row in groups.data or () if row["groupName"] == words["brokerGroup"]), None)
    return {"group": group, "groups": groups, "status": status, "readonly": readonly}


async def _doctor(asking: Asking, query: Query) -> dict[str, Any]:
    return {"doctor": await asking.ask("Doctor")}


def _paged(rows: list[Any], query: Query) -> dict[str, Any]:
    """Cut a list into pages, of which `page` says the number from 0 on."""
    text = query["page"]
    page = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0
    begin = page * ROWS
    return {"rows": rows[begin : begin + ROWS], "page": page, "more": begin + ROWS < len(rows), "total": len(rows)}


PAGES = (
    Page("", "Overview", "overview.html", _overview),
    Page("/group", "Broker group", "group.html", _group, in_menu=False),
    Page("/doctor", "Doctor", "doctor.html", _doctor),
)
