"""Shell. Browse: shows messages where they are stored, of all broker groups as one list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from heapq import merge
from typing import Any

from qmq.proto import qmq_pb2 as pb
from qmq.subjects import dead_letter_subject
from qmq.tools.answer import Exit
from qmq.tools.command import warning
from qmq.tools.messages.brokers import Looker, Unanswered, ended, looking
from qmq.tools.messages.lines import words_of
from qmq.tools.messages.shown import message_json, to_json
from qmq.tools.session import Session
from qmq.tools.table import Block, Column, Table, moment
from qmq.tools.terminal import show


def run(session: Session) -> Exit:
    return ended(session, _browse)


def subject_of(values: Mapping[str, str]) -> str:
    """The subject to look at: the one that is named, or that of a group's dead letters."""
    if values.get("deadLetters") == "true":
        return dead_letter_subject(values["subject"], values["group"])
    return values["subject"]


def wanted(values: Mapping[str, str]) -> pb.BrowseRequest:
    """What is asked of each broker."""
    return pb.BrowseRequest(
        since_ms=int(values.get("since") or 0),
        until_ms=int(values.get("until") or 0),
        id=values.get("id", ""),
        properties=json.loads(values["property"] or "{}"),
        tags=words_of(values["tag"]),
        with_properties=True,
    )


async def _browse(session: Session) -> Exit:
    values = session.values
    limit, newest_first = int(values["limit"]), is_newest_first(values)
    request = wanted(values)
    request.begin, request.newest_first = int(values["sequence"] or 0), newest_first
    request.messages_max = min(max(limit, 1), 1_000)
    async with looking(session, subject_of(values), values["brokerGroup"]) as lookers:
        found = await asyncio.gather(*(_take(looker, request, limit) for looker in lookers))
    parts = [part for part in found if not isinstance(part, Unanswered)]
    messages = list(merge(*parts, key=lambda message: int(message["stored"]), reverse=newest_first))
    unasked = {one.broker_group: part for one, part in zip(lookers, found) if isinstance(part, Unanswered)}
    answer = {"messages": messages[:limit], "unasked": {name: str(why) for name, why in unasked.items()}}
    if session.as_json:
        print(to_json(answer))
    else:
        show(_shown(answer))
    return max((why.exit for why in unasked.values()), default=Exit.DONE)


def is_newest_first(values: Mapping[str, str]) -> bool:
    """From a sequence or a time on, people read forwards; else the newest is what they look for."""
    return values["order"] == "newest" if values["order"] else not (values["sequence"] or values["since"])


async def _take(looker: Looker, request: pb.BrowseRequest, limit: int) -> list[dict[str, Any]] | Unanswered:
    """Return the first `limit` messages that one broker group has; or why it does not answer."""
    taken: list[dict[str, Any]] = []
    try:
        async with aclosing(looker.messages(request)) as messages:
            async for message in messages:
                taken.append(browsed_json(looker.broker_group, message))
                if len(taken) >= limit:
                    break
    except Unanswered as why:
        return why
    return taken


def browsed_json(broker_group: str, message: pb.BrowsedMessage) -> dict[str, Any]:
    return message_json(
        id=message.id,
        broker_group=broker_group,
        sequence=message.sequence,
        properties={one.name: one.value for one in message.properties},
        tags=message.tags,
        created_ms=message.created_ms,
        stored=message.stored_ms,
        offset=message.offset,
        bytes=message.bytes,
        problem=message.problem,
    )


def _shown(answer: Mapping[str, Any]) -> list[Block]:
    table = Table(
        (
            Column("BROKER GROUP", "brokerGroup", drop=1),
            Column("SEQUENCE", "sequence"),
            Column("STORED", moment("stored")),
            Column("ID", "id", fold=12),
            Column("TAGS", "tags", drop=2),
            Column("ORDER KEY", "orderKey", drop=3),
            Column("BYTES", "bytes", drop=4),
            Column("PROPERTIES", lambda row: row.get("problem") or to_json(row["properties"]), fold=20),
        ),
        answer["messages"],
        empty="no such message",
    )
    return [table, *(warning(f"not looked at: {name}, {why}") for name, why in answer["unasked"].items())]
