"""Shell. Browse and Tail: show stored messages of all broker groups as one list. Consumers are not affected.

Tail polls the brokers, so it leaves no consumer group behind.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import aclosing
from heapq import merge
from typing import Any

from qmq.codec import content_of
from qmq.message_sizes import BODY_BYTES_MAX
from qmq.message_view import body_json, body_line, one_line
from qmq.proto import qmq_pb2 as pb
from qmq.subjects import dead_letter_subject
from qmq.tools.call import Exit
from qmq.tools.command import warning
from qmq.tools.messages.brokers import Looker, Unanswered, find_masters, looking, run_on_loop
from qmq.tools.messages.lines import CELL_CHARS, PREVIEW_BYTES, line_of, message_json, to_json, words_of
from qmq.tools.session import Session
from qmq.tools.table import Block, Column, Table, moment
from qmq.tools.terminal import complain, show

WHOLE_BYTES_MAX = 256 << 20
"""Limit for the sum of bodies of one Browse, which prints them together; bodies beyond it are cut to previews."""


def browse(session: Session) -> Exit:
    return run_on_loop(session, _browse)


def subject_of(values: Mapping[str, str]) -> str:
    """Return the subject to read: the named one, or that of a group's dead letters."""
    if values.get("deadLetters") == "true":
        return dead_letter_subject(values["subject"], values["group"])
    return values["subject"]


def request_of(values: Mapping[str, str], *, is_whole: bool) -> pb.BrowseRequest:
    """Return the request for each broker. `is_whole`: with whole bodies where they fit into an answer."""
    return pb.BrowseRequest(
        since_ms=int(values.get("since") or 0),
        until_ms=int(values.get("until") or 0),
        id=values.get("id", ""),
        properties=json.loads(values["property"] or "{}"),
        tags=words_of(values["tag"]),
        with_properties=True,
        body_bytes_max=BODY_BYTES_MAX if is_whole else PREVIEW_BYTES,
    )


class _Reader:
    """Reader of messages as JSON: with previews of their bodies, or whole bodies up to a sum of bytes."""

    def __init__(self, whole_bytes_max: int) -> None:
        self._left = whole_bytes_max

    async def read(self, looker: Looker, message: pb.BrowsedMessage) -> dict[str, Any]:
        """Return a message as JSON. Raises Unanswered."""
        texts = {property.name: property.value for property in message.properties}
        content, body = content_of(texts), None
        if message.HasField("body_bytes"):
            is_whole = message.body_bytes <= self._left
            stored = await looker.whole_body(message) if is_whole else message.body
            body = body_json(
                stored,
                message.body_bytes,
                content_type=content.type,
                encoding=content.encoding,
                bytes_max=BODY_BYTES_MAX if is_whole else PREVIEW_BYTES,
            )
            if is_whole:
                self._left -= len(body.get("body", "")) + len(body.get("bodyBase64", ""))
        return message_json(
            id=message.id,
            broker_group=looker.broker_group,
            sequence=message.sequence,
            properties=content.properties,
            tags=message.tags,
            created_ms=message.created_ms,
            body=body,
            stored=message.stored_ms,
            offset=message.offset,
            bytes=message.stored_bytes,
            problem=message.problem,
        )


async def _browse(session: Session) -> Exit:
    values = session.values
    limit, newest_first = int(values["limit"]), is_newest_first(values)
    request = request_of(values, is_whole=session.as_json)
    request.begin, request.newest_first = int(values["sequence"] or 0), newest_first
    request.messages_max = min(max(limit, 1), 1_000)
    reader = _Reader(WHOLE_BYTES_MAX if session.as_json else 0)
    async with looking(session, subject_of(values), values["brokerGroup"]) as lookers:
        found = await asyncio.gather(*(_take(looker, request, limit, reader) for looker in lookers))
    parts = [part for part in found if not isinstance(part, Unanswered)]
    messages = list(merge(*parts, key=lambda message: int(message["stored"]), reverse=newest_first))
    unasked = {looker.broker_group: part for looker, part in zip(lookers, found) if isinstance(part, Unanswered)}
    answer = {"messages": messages[:limit], "unasked": {name: str(why) for name, why in unasked.items()}}
    if session.as_json:
        print(to_json(answer))
    else:
        show(_shown(answer))
    return max((why.exit for why in unasked.values()), default=Exit.DONE)


def is_newest_first(values: Mapping[str, str]) -> bool:
    """Return the reading order: forwards from a sequence or time, else newest first."""
    return values["order"] == "newest" if values["order"] else not (values["sequence"] or values["since"])


async def _take(
    looker: Looker, request: pb.BrowseRequest, limit: int, reader: _Reader
) -> list[dict[str, Any]] | Unanswered:
    """Return the first `limit` messages of one broker group, or the reason for no answer."""
    taken: list[dict[str, Any]] = []
    try:
        async with aclosing(looker.messages(request)) as messages:
            async for message in messages:
                taken.append(await reader.read(looker, message))
                if len(taken) >= limit:
                    break
    except Unanswered as why:
        return why
    return taken


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
            Column("BODY", lambda row: one_line(body_line(row, CELL_CHARS)), drop=1, fold=20),
        ),
        answer["messages"],
        empty="no such message",
    )
    return [table, *(warning(f"not looked at: {name}, {why}") for name, why in answer["unasked"].items())]


PAUSE_S = 0.3
SEEK_S = 10.0
"""Seconds between searches for new broker groups."""
LAST_MAX = 1_000
_BEHIND_ALL = 1 << 62


def tail(session: Session) -> Exit:
    try:
        return run_on_loop(session, _tail)
    except KeyboardInterrupt:
        return Exit.DONE


async def _tail(session: Session) -> Exit:
    async with looking(session, subject_of(session.values), session.values["brokerGroup"]) as lookers:
        await _Tail(session).show(lookers)
    return Exit.DONE


class _Tail:
    """One run of Tail: prints lines as they arrive, up to the limit."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._values = session.values
        self._form = "json" if session.as_json else session.values["format"]
        self._left = int(session.values["limit"] or 0) or _BEHIND_ALL
        self._began_ms = time.time_ns() // 1_000_000
        self._is_full = asyncio.Event()
        self._is_whole = self._form == "json"
        self._printing = asyncio.Lock()

    async def show(self, lookers: list[Looker]) -> None:
        """Show the newest messages, then new ones as they arrive. Raises Unanswered if brokers refuse."""
        ends = await self._show_last(lookers)
        tasks = [asyncio.create_task(self._follow(looker, end)) for looker, end in zip(lookers, ends)]
        tasks.append(asyncio.create_task(self._seek({looker.broker_group for looker in lookers})))
        tasks.append(asyncio.create_task(self._wait_until_full()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_until_full(self) -> None:
        await self._is_full.wait()

    async def _print(self, looker: Looker, message: pb.BrowsedMessage) -> None:
        async with self._printing:
            if self._left:
                print(line_of(await self._read(looker, message), self._form), flush=True)
                self._left -= 1
            if not self._left:
                self._is_full.set()

    async def _read(self, looker: Looker, message: pb.BrowsedMessage) -> dict[str, Any]:
        try:
            return await _Reader(WHOLE_BYTES_MAX if self._is_whole else 0).read(looker, message)
        except Unanswered as why:
            complain(f"{why}; the body of {message.id} is cut")
            return await _Reader(0).read(looker, message)

    async def _show_last(self, lookers: list[Looker]) -> list[int | None]:
        """Show the newest messages of all groups; return the end of each, None where no broker answers."""
        count = min(int(self._values["last"]), LAST_MAX)
        request = request_of(self._values, is_whole=self._is_whole)
        request.newest_first, request.messages_max = True, max(count, 1)
        request.begin = 0 if count else _BEHIND_ALL
        answers = await asyncio.gather(*(self._ask(looker, request) for looker in lookers))
        parts = [
            [(looker, message) for message in reversed(answer.messages)]
            for looker, answer in zip(lookers, answers)
            if answer is not None
        ]
        shown = list(merge(*parts, key=lambda pair: pair[1].stored_ms))
        for looker, message in shown[-count or len(shown) :]:
            await self._print(looker, message)
        return [answer.end_sequence if answer else None for answer in answers]

    async def _follow(self, looker: Looker, begin: int | None) -> None:
        """Print new messages of a broker group from `begin` on; None: since the start of this command."""
        request = request_of(self._values, is_whole=self._is_whole)
        request.begin, request.since_ms = begin or 0, 0 if begin is not None else self._began_ms
        while not self._is_full.is_set():
            answer = await self._ask(looker, request)
            if answer is not None:
                for message in answer.messages:
                    await self._print(looker, message)
                request.begin, request.since_ms = answer.begin, 0
            if answer is None or answer.begin >= answer.end:
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, looker: Looker, request: pb.BrowseRequest) -> pb.BrowseAnswer | None:
        """Return a broker's answer, or None after reporting that none answers now."""
        try:
            return await looker.ask(request)
        except Unanswered as why:
            if why.exit is Exit.REFUSED:
                raise
            complain(f"{why}; continuing when it answers")
            return None

    async def _seek(self, known: set[str]) -> None:
        """Follow broker groups that are added later, too."""
        async with asyncio.TaskGroup() as tasks:
            while not self._values["brokerGroup"]:
                await asyncio.sleep(SEEK_S)
                try:
                    masters = await find_masters(self._session, subject_of(self._values))
                except Unanswered:
                    continue  # known groups are still followed
                for master in masters:
                    if master.broker_group not in known:
                        known.add(master.broker_group)
                        looker = Looker(self._session, subject_of(self._values), master)
                        tasks.create_task(self._follow_until_the_end(looker))
            await self._is_full.wait()

    async def _follow_until_the_end(self, looker: Looker) -> None:
        try:
            await self._follow(looker, None)
        finally:
            await looker.close()
