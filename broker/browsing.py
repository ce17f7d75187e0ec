"""Shell. Answers Browse: reads from disk on threads, a little at a time, whoever else waits being served meanwhile."""

from __future__ import annotations

import asyncio
import time

from qmq.broker.browse import MESSAGES_DEFAULT, Browse, Filter, Found, borders, visible_end
from qmq.broker.master import BrokerMaster
from qmq.broker.progress import sequences_kept
from qmq.codec import Buffer
from qmq.errors import CorruptFrame
from qmq.log import MessageLog
from qmq.log.frame import Frame
from qmq.log.index import FrameRef
from qmq.proto import qmq_pb2 as pb
from qmq.server.service import Service

CALLS_AT_ONCE = 2
"""More wait for their turn: looking never takes more of a broker than this."""
CALL_S = 1.0
"""A call that has looked so long says how far it came."""
PAUSE_S = 0.0005
MESSAGES_AT_ONCE = 50
_NO_END = 1 << 63


class Browsing:
    """Made by the control port; used on the loop."""

    def __init__(self, service: Service[BrokerMaster]) -> None:
        self._service = service
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)

    async def answer(self, request: pb.BrowseRequest) -> pb.BrowseAnswer:
        """Look for what is asked for.

        Raises:
            NotMaster, NotServed: ask the master.
            CallError: something that is asked for cannot be.
            CorruptFrame: this copy is damaged there.
        """
        async with self._turns:
            browse = await self._begin(request)
            first_sequence, _ = sequences_kept(browse.log, browse.subject)
            end_sequence = visible_end(browse.log, browse.subject, browse.limit)
            await self._look(browse)
            messages = await asyncio.to_thread(_messages, browse.found, request.with_properties)
        return pb.BrowseAnswer(
            messages=messages,
            begin=browse.begin,
            end=browse.end,
            first_sequence=first_sequence,
            end_sequence=end_sequence,
        )

    async def _begin(self, request: pb.BrowseRequest) -> Browse:
        node = self._service.node
        limit, begin, end = node.acting_master().gate.high_watermark, request.begin, request.end or _NO_END
        if request.since_ms:
            begin = max(begin, await self._stored_since(request.subject, request.since_ms))
        if request.until_ms:
            end = min(end, await self._stored_since(request.subject, request.until_ms))
        wanted = Filter(request.id, frozenset(request.tags), dict(request.properties))
        return Browse(
            node.log,
            request.subject,
            limit,
            begin,
            end,
            newest_first=request.newest_first,
            wanted=wanted,
            messages_max=request.messages_max or MESSAGES_DEFAULT,
        )

    async def _stored_since(self, subject: str, since_ms: int) -> int:
        """Return the first message that was stored at `since_ms` or later; where clocks went back, one of several."""
        message_log = self._service.node.log
        search = borders(message_log, subject)
        try:
            ref = next(search)
            while True:
                ref = search.send(await asyncio.to_thread(_is_older, message_log, ref, since_ms))
        except StopIteration as found:
            return int(found.value)

    async def _look(self, browse: Browse) -> None:
        loop = asyncio.get_running_loop()
        stop_at = loop.time() + CALL_S
        while not browse.is_over and loop.time() < stop_at:
            refs = browse.next_frames()
            in_tail = {ref.offset: found for ref in refs if (found := browse.log.tail_body(ref.offset)) is not None}
            try:
                await asyncio.to_thread(_step, browse, refs, in_tail)
            except CorruptFrame as problem:
                if problem.offset >= browse.log.start:
                    raise  # else retention took it meanwhile


def _is_older(message_log: MessageLog, ref: FrameRef, since_ms: int) -> bool:
    try:
        return message_log.timestamp_at(ref.offset) < since_ms
    except CorruptFrame:
        if ref.offset >= message_log.start:
            raise
        return True  # retention took it meanwhile


def _step(browse: Browse, refs: list[FrameRef], in_tail: dict[int, tuple[Frame, Buffer]]) -> None:
    """Read frames and look through them. Blocks; runs on a thread."""
    on_disk = browse.log.read_bodies([ref for ref in refs if ref.offset not in in_tail])
    bodies = in_tail | {frame.offset: (frame, body) for frame, body in on_disk}
    for _ in browse.look_through([bodies[ref.offset] for ref in refs]):
        time.sleep(PAUSE_S)  # the loop's thread runs meanwhile


def _messages(found: list[Found], with_properties: bool) -> list[pb.BrowsedMessage]:
    """Write messages for the answer. Runs on a thread, and pauses as `_step` does."""
    messages = []
    for at, one in enumerate(found, start=1):
        messages.append(
            pb.BrowsedMessage(
                sequence=one.sequence,
                offset=one.offset,
                stored_ms=one.stored_ms,
                created_ms=one.created_ms,
                id=one.id,
                tags=one.tags,
                bytes=one.bytes,
                properties=_properties(one) if with_properties else (),
                problem=one.problem,
            )
        )
        if at % MESSAGES_AT_ONCE == 0:
            time.sleep(PAUSE_S)
    return messages


def _properties(one: Found) -> list[pb.Property]:
    return [pb.Property(name=name, value=value) for name, value in one.properties.items()]
