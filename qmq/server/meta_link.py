"""Shell. Link of a broker to the metaserver: registration, a heartbeat every second, new assignments."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from qmq.access import token_metadata
from qmq.control_plane import META_CHANNEL_OPTIONS, find_metaserver
from qmq.errors import NotServed, OperatorError, cause_of
from qmq.operator_limits import OperatorLimits
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub
from qmq.replication.assignment import Address, Assignment, SyncMode
from qmq.replication.identity import Point
from qmq.replication.settings import CopySettings
from qmq.server.patience import Patience
from qmq.server.service import Service
from qmq.ticking import until_next_second
from qmq.types import Epoch, GroupKind, Role
from qmq.version import VERSION

log = logging.getLogger(__name__)

_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
)
RETRIES_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits after failures in a row. The first is 0: when one metaserver ends, /meta/address names another one at once. Up
to half of a wait is added at random, so that brokers do not all come at the same time.
"""
STEADY_S = 3.0
"""A connection that lasted this long resets the waits. Two machines with copies of one broker's disk and name end each
other's heartbeats; without a wait they would do so a hundred times a second.
"""
ALONE_AFTER_S = 3.0
"""Time that a starting broker waits for the metaserver before it takes its last role."""


def state_message(service: Service[Any], settings: CopySettings) -> pb.BrokerState:
    """Return this broker's state, as its heartbeat carries it."""
    node = service.node
    master, message_log, epoch = node.master, node.log, node.identity.value.epoch
    return pb.BrokerState(
        broker_group=node.group,
        role=node.assignment.role if node.assignment and node.role else Role.SLAVE,
        term=epoch.term if node.role else 0,
        boot=epoch.boot,
        log_start=message_log.start,
        log_end=message_log.end,
        flushed_end=message_log.flushed_end,
        matched_end=master.gate.matched_end if master else 0,
        high_watermark=master.gate.high_watermark if master else message_log.state.high_watermark,
        chain=message_log.chain,
        readonly_reasons=node.readonly_reasons,
        hostname=settings.hostname,
        serve_port=settings.advertised.serve_port,
        writable=node.writable,
        durability=settings.durability,
        incarnation=node.identity.value.incarnation,
        in_step=master.in_sync if master else (),
        acknowledged=_point_message(node.identity.points.own),
        in_sync=node.slave is not None and node.slave.has_matched,
        promised_term=node.identity.value.promised,
        last_term=message_log.state.epoch.term,
        last_boot=message_log.state.epoch.boot,
        incomplete=not node.identity.value.complete,
        fill_id=node.identity.value.fill_id,
        clock_off_s=node.clock_off_s,
        lost_master=service.has_lost_master,
        instance=node.identity.instance,
        quarantine_bytes=service.quarantine.bytes,
        quarantine_full=service.quarantine.is_full,
        known_term=node.identity.value.known_term,
    )


class MetaLink:
    """Link to one metaserver after another. Made by main; `run` returns when it is cancelled.

    Args:
        kind: kind of groups that this process can belong to.
    """

    def __init__(self, service: Service[Any], settings: CopySettings, *, kind: GroupKind = GroupKind.NORMAL) -> None:
        self._service = service
        self._settings = settings
        self._kind = kind
        self._token = settings.token
        self._is_refused = False
        self._failures = 0
        self._has_part = False
        """Whether a metaserver has assigned the role since this process began; a stored role may be outdated."""
        self.stub: MetaserverStub | None = None
        """Stub of the metaserver that serves this broker, or None."""
        self._last: pb.Assignment | None = None
        self._served_since: float | None = None
        """Time by the loop's clock since when a metaserver serves this broker; None if not since the last failure."""
        self._patience = Patience()
        self._look: asyncio.TimerHandle | None = None
        """Timer of the next check for an answer."""

    async def run(self) -> None:
        """Register and send heartbeats; begin again after every failure."""
        loop = asyncio.get_running_loop()
        loop.call_later(ALONE_AFTER_S, self.start_alone)
        while True:
            try:
                async with grpc.aio.insecure_channel(await self._find(), options=META_CHANNEL_OPTIONS) as channel:
                    await self._live(MetaserverStub(channel))
            except (grpc.aio.AioRpcError, NotServed, OperatorError) as error:
                self.failed(error)
            if self._served_since is not None and loop.time() - self._served_since >= STEADY_S:
                self._failures = 0
            self._served_since = None
            wait_s = RETRIES_S[min(self._failures, len(RETRIES_S) - 1)]
            self._failures += 1
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.5))

    def served(self, now_s: float) -> None:
        """Record that a metaserver serves this broker."""
        self._served_since = self._served_since or now_s
        self._service.is_registered = True

    def failed(self, error: Exception) -> None:
        """Record the reason why the metaserver does not serve this broker."""
        self._service.is_registered = False
        is_refusal = isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSALS
        self._is_refused = is_refusal or isinstance(
            error, OperatorError
        )  # or its assignment contradicts this directory
        text = (isinstance(error, grpc.aio.AioRpcError) and error.details()) or cause_of(error)
        if self._service.node.is_of_another and not isinstance(error, OperatorError):
            text = f"{text} (this data directory belongs to {self._service.node.owner})"
        is_taken = isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.ALREADY_EXISTS
        level = logging.CRITICAL if is_taken else logging.WARNING
        log.log(level, "metaserver does not serve this broker at=%s: %s", self._settings.metaserver, text)
        if is_taken:
            self._service.guarded(lambda: self._service.node.lose_part(text))

    def start_alone(self) -> None:
        """Take the last role, unless a metaserver refused this broker: its data directory may be a copy."""
        if not self._is_refused:
            self._service.guarded(self._take_up_old_part)

    def _take_up_old_part(self) -> None:
        if self._service.node.start_without_metaserver():
            log.warning("metaserver not reached: the broker resumes its role")

    async def _find(self) -> str:
        """Return the metaserver's gRPC address; raises NotServed."""
        try:
            return await asyncio.to_thread(find_metaserver, self._settings.metaserver)
        except (OSError, ValueError) as error:
            raise NotServed(cause_of(error)) from None

    async def _live(self, stub: MetaserverStub) -> None:
        settings, at = self._settings, self._settings.advertised
        identity = pb.BrokerIdentity(
            broker_group=self._service.node.identity.value.group,
            hostname=settings.hostname,
            ip=at.ip,
            serve_port=at.serve_port,
            sync_port=at.sync_port,
            control_port=at.control_port,
            metrics_port=settings.advertised_metrics_port or settings.metrics_port,
            incarnation=self._service.node.identity.value.incarnation,
            version=VERSION,
            kind=self._kind,
            term=self._service.node.identity.value.known_term,
            begins=not self._has_part,
            instance=self._service.node.identity.instance,
        )
        self._last = None
        self._assignment_received(await self._register(stub, identity))
        self.stub, loop = stub, asyncio.get_running_loop()
        self._patience.begin()
        try:
            async with asyncio.timeout(None) as silence:
                beats = self._beats(stub, silence)
                async for assignment in stub.Heartbeat(beats, metadata=token_metadata(self._token)):
                    self._patience.answered(loop.time())
                    self.served(loop.time())
                    self._assignment_received(assignment)
        except TimeoutError:
            self._patience.leave()
            raise NotServed("the metaserver does not answer heartbeats") from None
        finally:
            self.stub = None
            if self._look is not None:
                self._look.cancel()
                self._look = None
        raise NotServed("the metaserver ended the heartbeat")

    async def _register(self, stub: MetaserverStub, identity: pb.BrokerIdentity) -> pb.Assignment:
        try:
            timeout_s = self._patience.limit_s
            part: pb.Assignment = await stub.Register(identity, metadata=token_metadata(self._token), timeout=timeout_s)
            return part
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                self._patience.leave()
            raise

    async def _beats(self, stub: MetaserverStub, silence: asyncio.Timeout) -> AsyncIterator[pb.BrokerState]:
        changed, loop = self._service.state_changed, asyncio.get_running_loop()
        while self.stub is stub:  # gRPC's task continues to read these for a while after the stream has failed
            changed.clear()
            self._patience.asked(loop.time())
            if self._look is None:
                self._look_later(silence)
            yield state_message(self._service, self._settings)
            try:
                async with asyncio.timeout(until_next_second(loop.time())):
                    await changed.wait()
            except TimeoutError:
                pass

    def _look_later(self, silence: asyncio.Timeout) -> None:
        """Schedule a check for the time when an answer is due; without the answer, leave the metaserver."""
        loop = asyncio.get_running_loop()
        left_s = self._patience.left_s(loop.time())
        self._look = loop.call_later(left_s, self._look_later, silence) if left_s else None
        if left_s == 0.0:
            silence.reschedule(loop.time())

    def _assignment_received(self, message: pb.Assignment) -> None:
        if message.clock_ms:
            self._service.node.record_metaserver_clock(message.clock_ms)
            message.clock_ms = 0
        if message.term and message != self._last:  # otherwise it only carries the clock, or the group has no row yet
            self._last = message
            self._assign(message)

    def _assign(self, message: pb.Assignment) -> None:
        assignment = Assignment(
            group=message.broker_group,
            term=message.term,
            role=Role(message.role),
            master=_address(message.master) if message.HasField("master") else None,
            slaves=tuple(map(_address, message.slaves)),
            readonly_subjects=tuple(message.readonly_subjects),
            offline=tuple((consumer.subject, consumer.group, consumer.consumer) for consumer in message.offline),
            min_copies=message.min_copies or 2,
            limits=tuple(
                OperatorLimits(*(getattr(limit, name) for name in OperatorLimits._fields)) for limit in message.limits
            ),
            sync_mode=message.sync_mode or SyncMode.AUTOMATIC,
            fills=tuple((order.fill_id, order.allowed) for order in message.fills),
            awaited=tuple(message.awaited),
        )
        points = [Point(Epoch(point.term, point.boot), point.end, point.chain) for point in message.points]
        node, accepted_term = self._service.node, message.loss_accepted_term
        self._service.guarded(
            lambda: node.remembered_elsewhere(
                points, loss_accepted_term=accepted_term, may_be_behind=assignment.may_be_behind
            )
        )
        self._service.guarded(lambda: node.assign(assignment))
        self._has_part = self._has_part or (node.assignment is not None and node.assignment.term == assignment.term)
        self._service.state_changed.set()


def _point_message(point: Point | None) -> pb.AcknowledgedPoint | None:
    if point is None:
        return None
    return pb.AcknowledgedPoint(term=point.epoch.term, boot=point.epoch.boot, end=point.end, chain=point.chain)


def _address(message: pb.BrokerAddress) -> Address:
    return Address(message.ip, message.serve_port, message.sync_port, message.control_port)
