"""Shell. gRPC of a broker: its control port, and its requests for the begin of consumer groups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from qmq.access import token_text
from qmq.broker import positions
from qmq.broker.browse import MESSAGES_DEFAULT, Bodies, Browse, Filter, Found, visible_end
from qmq.broker.group_status import Cause, Key
from qmq.broker.master import BrokerMaster
from qmq.broker.positions import Answered, Begin, NewGroup, borders, sequences_kept
from qmq.broker.settings import BrokerSettings
from qmq.codec import Buffer
from qmq.errors import CallError, CorruptFrame, DiskFailed, MissingRight, NotServed, QmqError
from qmq.log import MessageLog
from qmq.log.frame import Frame
from qmq.log.index import FrameRef
from qmq.proto import qmq_pb2 as pb
from qmq.remoting.connection import Connection
from qmq.rights import CONSUME
from qmq.rpc_access import caller
from qmq.server.control import CopyControl, Samples
from qmq.server.meta_link import MetaLink
from qmq.server.service import Service

log = logging.getLogger(__name__)

AT_ONCE = 500
"""Consumer groups per request."""
ANSWER_S = 10.0
"""Timeout of a request. The metaserver waits some seconds each for the masters of the route and for its database."""


class BeginRequests:
    """Requests for the begin of new consumer groups. Made by main before the service; used on its loop."""

    def __init__(self) -> None:
        self._requests: list[tuple[NewGroup, Answered]] = []
        self._arrived = asyncio.Event()

    def ask(self, group: NewGroup, answered: Answered) -> None:
        """Queue a request; see `qmq.broker.positions.Ask`."""
        self._requests.append((group, answered))
        self._arrived.set()

    async def run(self, service: Service[BrokerMaster], meta_link: MetaLink, settings: BrokerSettings) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._requests:
                some, self._requests = self._requests[:AT_ONCE], self._requests[AT_ONCE:]
                token = token_text(settings.token)
                answers = await _answers([group for group, _ in some], service.node.group, meta_link, token)
                for (_, answered), answer in zip(some, answers, strict=True):
                    for link, packet in answered(answer):
                        assert isinstance(link, Connection)
                        service.packet_received(link, packet)


async def _answers(
    groups: list[NewGroup], broker_group: str, meta_link: MetaLink, token: str
) -> list[Begin | NotServed | None]:
    """Return the metaserver's answer for each group; None: its version stores no consumer groups."""
    asked = pb.BeginGroupsRequest(
        broker_group=broker_group, groups=[pb.NewGroup(**group._asdict()) for group in groups]
    )
    try:
        if (stub := meta_link.stub) is None:
            raise NotServed("no metaserver serves this broker now")
        metadata = (("x-api-token", token),)
        answer = await stub.BeginGroups(asked, metadata=metadata, timeout=ANSWER_S)
        if len(answer.begins) != len(groups):
            raise NotServed("the metaserver answered for another number of groups than requested")
        return [Begin(begin.since_ms, begin.mark, begin.began_ms) for begin in answer.begins]
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return [None] * len(groups)
        reason = error.details() or error.code().name
    except NotServed as error:
        reason = str(error)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        reason = "the connection to the metaserver was closed"  # the link closed it after a failure
    log.warning("new consumer groups wait groups=%d reason=%s", len(groups), reason)
    return [
        NotServed(f"consumer group {group.group} is new here and waits for the metaserver: {reason}")
        for group in groups
    ]


CALLS_AT_ONCE = 2
"""More calls wait for their turn, so browsing never uses more of a broker than this."""
CALL_S = 1.0
"""Duration of a search. Then the call returns its matches, and the range that is left for the next call."""
PAUSE_S = 0.0005
MESSAGES_AT_ONCE = 50
_NO_END = 1 << 63


class BrowseCalls:
    """Handler of Browse. It reads the disk on threads in small steps, so other work continues. Made by the control
    port; used on the loop.
    """

    def __init__(self, service: Service[BrokerMaster]) -> None:
        self._service = service
        self._slots = asyncio.Semaphore(CALLS_AT_ONCE)

    async def answer(self, request: pb.BrowseRequest) -> pb.BrowseAnswer:
        """Search for the requested messages.

        Raises:
            NotMaster, NotServed: ask the master.
            CallError: the request is invalid.
            CorruptFrame: this copy is damaged there.
        """
        async with self._slots:
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
            bodies=Bodies(request.body_begin, request.body_bytes_max),
        )

    async def _stored_since(self, subject: str, since_ms: int) -> int:
        """Return the sequence of the first message stored at `since_ms` or later; if clocks went back, of one of
        several such messages.
        """
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
                    raise  # else retention deleted it meanwhile


def _is_older(message_log: MessageLog, ref: FrameRef, since_ms: int) -> bool:
    try:
        return message_log.timestamp_at(ref.offset) < since_ms
    except CorruptFrame:
        if ref.offset >= message_log.start:
            raise
        return True  # retention deleted it meanwhile


def _step(browse: Browse, refs: list[FrameRef], in_tail: dict[int, tuple[Frame, Buffer]]) -> None:
    """Read frames and search them. Blocks; runs on a thread."""
    on_disk = browse.log.stored.read_bodies([ref for ref in refs if ref.offset not in in_tail])
    bodies = in_tail | {frame.offset: (frame, body) for frame, body in on_disk}
    for _ in browse.look_through([bodies[ref.offset] for ref in refs]):
        time.sleep(PAUSE_S)  # lets the loop's thread run


def _messages(found: list[Found], with_properties: bool) -> list[pb.BrowsedMessage]:
    """Encode messages for the answer. Runs on a thread, and pauses as `_step` does."""
    messages = []
    for at, match in enumerate(found, start=1):
        messages.append(
            pb.BrowsedMessage(
                sequence=match.sequence,
                offset=match.offset,
                stored_ms=match.stored_ms,
                created_ms=match.created_ms,
                id=match.id,
                tags=match.tags,
                stored_bytes=match.bytes,
                properties=_properties(match) if with_properties else (),
                problem=match.problem,
                body_bytes=match.body_bytes,
                body=bytes(match.body),
            )
        )
        if at % MESSAGES_AT_ONCE == 0:
            time.sleep(PAUSE_S)
    return messages


def _properties(match: Found) -> list[pb.Property]:
    return [pb.Property(name=name, value=value) for name, value in match.properties.items()]


GROUPS_AT_A_TIME, COUNTED_AT_A_TIME = 50, 500
"""Groups looked up, or only counted, without a pause: about 2 ms in which the loop serves nothing else."""
SAFE_S = 10.0


class Control(CopyControl[BrokerMaster]):
    """gRPC service of a broker. Made by main; its server ends with the process."""

    def __init__(self, service: Service[BrokerMaster], settings: BrokerSettings, samples: Samples) -> None:
        super().__init__(service, settings, samples)
        self._browsing = BrowseCalls(service)

    async def Consumers(self, request: pb.ConsumersRequest, context: Any) -> pb.ConsumersAnswer:
        """Return the progress of consumer groups. FAILED_PRECONDITION: not the master, or its log cannot be read."""
        node, groups, sums = self._service.node, list[positions.GroupProgress](), None
        try:
            master = node.acting_master()
            begins = {(entry.subject, entry.group): _begin(entry.begin) for entry in request.known}
            lacking = {key: master.begins_at(key, at) for key, at in begins.items() if key not in node.log.state.groups}
            keys = positions.keys_of(node.log, subject=request.subject, group=request.group, lacking=lacking)
            if before_ms := request.unused_before_ms:
                keys = [key for key in keys if 0 < master.unused_since_ms(key) < before_ms]
            if request.behind_max:
                behind = positions.Behind(node.log, request.behind_max, lacking, master.chosen_dead_letters)
                async for some in _in_parts(keys, COUNTED_AT_A_TIME):
                    behind.look(some)
                keys, sums = behind.keys(), pb.GroupSums(**behind.sums._asdict())
            async for some in _in_parts(keys, GROUPS_AT_A_TIME):
                groups += positions.of_groups(node.log, master.connected_to, some, lacking)
            lengths = node.log.lengths(request.subject) if request.subject and not request.behind_max else []
            subject_bytes = await asyncio.to_thread(lambda: sum(map(sum, lengths)))
            found = [(group.subject, group.group) for group in groups]
            causes = [master.causes.of(key) for key in found]
            first_unacked_ms, unused = map(master.backlogs.first_unacked_of, found), map(master.unused_since_ms, found)
            oldest_ms = await asyncio.to_thread(self._timestamps, [group.oldest_offset for group in groups])
        except CorruptFrame as problem:
            await self._being_repaired(problem, context)
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.ConsumersAnswer(
            groups=map(_group_message, groups, oldest_ms, causes, unused, first_unacked_ms),
            sums=sums,
            subject_bytes=subject_bytes,
            producers=self._producers(request.subject),
        )

    def _producers(self, subject: str) -> list[pb.ProducerProgress]:
        connected = [(acceptor.app, acceptor.connection) for acceptor in self._service.acceptors]
        return [
            pb.ProducerProgress(app=app, peer=link.peer, messages=link.produced[subject])
            for app, link in connected
            if subject in link.produced
        ]

    def _timestamps(self, offsets: list[int | None]) -> list[int]:
        message_log, found = self._service.node.log, []
        for offset in offsets:
            try:
                found.append(0 if offset is None else message_log.timestamp_at(offset))
            except CorruptFrame:
                if offset is not None and offset >= message_log.start:
                    raise
                found.append(0)  # retention deleted it meanwhile
        return found

    async def Browse(self, request: pb.BrowseRequest, context: Any) -> pb.BrowseAnswer:
        """Search stored messages. PERMISSION_DENIED: the token may not consume from the subject."""
        answer = pb.BrowseAnswer()
        try:
            caller().require_subject(CONSUME, request.subject)
            answer = await self._browsing.answer(request)
        except DiskFailed as error:
            self._service.fail(error)
        except CorruptFrame as problem:
            await self._being_repaired(problem, context)
        except MissingRight as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except CallError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return answer

    async def MarkGroups(self, request: pb.MarkGroupsRequest, context: Any) -> pb.MarkGroupsAnswer:
        keys, known = [(group.subject, group.group) for group in request.groups], list[bool]()
        try:
            known = self._service.node.acting_master().mark_groups(request.mark, keys)
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.MarkGroupsAnswer(known=known)

    async def ResetOffset(self, request: pb.ResetOffsetRequest, context: Any) -> pb.ResetOffsetAnswer:
        """Move a consumer group.

        FAILED_PRECONDITION: nothing changed. DEADLINE_EXCEEDED, UNAVAILABLE: a change of masters may undo the move.
        """
        reset, safe = None, self._loop.create_future()

        def move() -> None:
            nonlocal reset
            reset = self._service.node.acting_master().move_group(
                request.subject,
                request.group,
                request.to,
                request.value,
                dry_run=request.dry_run,
                begin=_begin(request.begin) if request.HasField("begin") else None,
                answer=lambda error: None if safe.done() else safe.set_result(error),
            )

        try:
            self._service.guarded(move)
        except QmqError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        assert reset is not None
        if not request.dry_run:
            await self._wait_until_safe(safe, context)
            log.warning(
                "group moved subject=%s consumer_group=%s before=%d after=%d skipped=%d repeated=%d",
                request.subject,
                request.group,
                *reset,
            )
        return pb.ResetOffsetAnswer(
            before=reset.before, after=reset.after, skipped=reset.skipped, repeated=reset.repeated
        )

    async def _wait_until_safe(self, safe: asyncio.Future[QmqError | None], context: Any) -> None:
        try:
            error = await asyncio.wait_for(safe, SAFE_S)
        except TimeoutError:
            text = f"the slave did not confirm the move within {SAFE_S:.0f} s; check Consumers before you repeat it"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        if error is not None:
            text = "the master changed before both copies had the move; check Consumers before you repeat it"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)


async def _in_parts(keys: Sequence[Key], size: int) -> AsyncIterator[Sequence[Key]]:
    """Yield parts of a list; between them the loop serves others."""
    for begin in range(0, len(keys), size):
        if begin:
            await asyncio.sleep(0)
        yield keys[begin : begin + size]


def _begin(message: pb.GroupBegin) -> Begin:
    return Begin(message.since_ms, message.mark, message.began_ms)


def _group_message(
    progress: positions.GroupProgress, oldest_ms: int, causes: list[Cause], unused_since_ms: int, first_unacked_ms: int
) -> pb.GroupProgress:
    consumers = [
        pb.ConsumerProgress(
            consumer=consumer.consumer,
            connected=bool(consumer.peer),
            unacked=consumer.unacked,
            peer=consumer.peer,
            delivered=consumer.delivered,
        )
        for consumer in progress.consumers
    ]
    return pb.GroupProgress(
        subject=progress.subject,
        group=progress.group,
        first_sequence=progress.first_sequence,
        next_sequence=progress.next_sequence,
        position=progress.position,
        returned=progress.returned,
        lag=progress.lag,
        oldest_ms=oldest_ms,
        consumers=consumers,
        causes=causes,
        dead_letters=progress.dead_letters,
        unused_since_ms=unused_since_ms,
        first_unacked_ms=first_unacked_ms,
    )
