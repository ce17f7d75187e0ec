"""Shell. Reconciliation: rows that are still in an outbox, held against the logs of the brokers. It reads, no more.

For a bounded number of rows, and for a bounded time, each broker group that may have messages of the row's subject is
asked to look for the message's id among what was stored since the row was written, less an hour for clocks that differ.
    in the log       some group has it: the row will go, or was to be deleted; nothing is lost
    not in the log   every group was asked, and looked through all of it
    unchecked        anything else, with the reason: nobody claims what he did not see
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import grpc
import grpc.aio

from qmq.control_plane import CHANNEL_OPTIONS
from qmq.errors import NotServed
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub
from qmq.watchdog.db.questions import StuckRow
from qmq.watchdog.meta_link import MetaLink

CLOCKS_MS = 3_600_000
ANSWER_S = 5.0
IN_LOG, NOT_IN_LOG, UNCHECKED = "inLog", "notInLog", "unchecked"


class Finding(NamedTuple):
    """What is known of one row's message. `where`: broker group and sequence; `why`: what kept us from knowing."""

    row: StuckRow
    state: str
    where: str = ""
    why: str = ""


class Reconciling:
    """One look at rows of any databases. Used on the loop: `async with`."""

    def __init__(self, link: MetaLink, token: str, *, seconds: float) -> None:
        self._link, self._token = link, token
        self._ends_at = time.monotonic() + seconds
        self._masters: dict[str, list[tuple[str, str]]] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Reconciling:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def look(self, rows: Iterable[StuckRow]) -> list[Finding]:
        return [await self._look_for(row) for row in rows]

    async def _look_for(self, row: StuckRow) -> Finding:
        if not row.message_id or not row.subject:
            return Finding(row, UNCHECKED, why="the row cannot be read")
        try:
            masters = await self._masters_of(row.subject)
            if not masters:
                return Finding(row, UNCHECKED, why="the metaserver names no broker group of its subject")
            for group, address in masters:
                if (sequence := await self._find(address, row)) is not None:
                    return Finding(row, IN_LOG, where=f"{group} {sequence}")
        except (NotServed, TimeoutError) as error:
            return Finding(row, UNCHECKED, why=str(error) or "no time was left")
        except grpc.aio.AioRpcError as error:
            return Finding(row, UNCHECKED, why=f"a broker does not tell: {error.details()}")
        return Finding(row, NOT_IN_LOG)

    async def _masters_of(self, subject: str) -> list[tuple[str, str]]:
        if subject not in self._masters:
            self._masters[subject] = await self._link.masters(subject)
        return self._masters[subject]

    async def _find(self, address: str, row: StuckRow) -> int | None:
        """Look through one group's messages, as far as the time allows; return the message's sequence there."""
        since_ms = max(1, row.created_ms - CLOCKS_MS) if row.created_ms else 0
        request = pb.BrowseRequest(subject=row.subject, id=row.message_id, since_ms=since_ms, messages_max=1)
        while True:
            answer = await self._ask(address, request)
            if answer.messages:
                return int(answer.messages[0].sequence)
            if answer.begin >= answer.end:
                return None
            request.begin, request.end, request.since_ms = answer.begin, answer.end, 0

    async def _ask(self, address: str, request: pb.BrowseRequest) -> Any:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        metadata = (("x-api-token", self._token),)
        return await BrokerStub(channel).Browse(request, metadata=metadata, timeout=min(left_s, ANSWER_S))
