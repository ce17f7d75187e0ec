"""Shell. Repair of a damaged log from another copy. Until it ends, this broker is not promoted, or is readonly (P6)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import grpc
import grpc.aio

from qmq.access import token_metadata
from qmq.control_plane import CHANNEL_OPTIONS
from qmq.errors import LogError, NotServed
from qmq.log.recovery import Damage
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub
from qmq.replication.assignment import Address
from qmq.replication.copy_repair import Sources
from qmq.replication.settings import CopySettings
from qmq.server.service import Service
from qmq.ticking import until_next_second
from qmq.types import Endpoint

log = logging.getLogger(__name__)

SILENT_S = 60.0
"""Time without frames after which the request is repeated. The whole answer may take longer: a missing segment is 1
GiB.
"""

Metadata = tuple[tuple[str, str], ...]


async def keep_repairing(service: Service[Any], settings: CopySettings) -> None:
    """Try to repair a damaged log, once a second."""
    sources = Sources()
    while True:
        damage = service.node.log.damage
        if damage is not None:
            try:
                await _repair(service, settings, damage, sources)
            except (grpc.aio.AioRpcError, LogError, NotServed) as error:
                text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.error("repair waits group=%s begin=%d: %s", service.node.group, damage.begin, text)
        await asyncio.sleep(until_next_second(asyncio.get_running_loop().time()))


async def _repair(service: Service[Any], settings: CopySettings, damage: Damage, sources: Sources) -> None:
    node = service.node
    peers = node.assignment.peers if node.assignment else ()
    if not peers:
        return
    log.error("log damaged group=%s begin=%d end=%d reason=%s", node.group, damage.begin, damage.end, damage.reason)
    metadata = token_metadata(settings.token)
    described = await asyncio.gather(*(_describe(peer, metadata) for peer in peers))
    best = sources.best(damage, [(theirs.log_start, theirs.log_end) if theirs else None for theirs in described])
    theirs = described[best] if best is not None else None
    if best is None or theirs is None:
        raise NotServed(f"{sum(description is None for description in described)} of {len(peers)} copies do not answer")
    wanted: tuple[int, int] | None = None

    def plan() -> None:
        nonlocal wanted
        wanted = node.repairs.plan(theirs.log_start, theirs.log_end)

    service.guarded(plan)
    if wanted is not None:
        begin, data = await _fetch(peers[best], metadata, *wanted)
        if node.log.damage is damage:
            service.guarded(partial(node.repairs.apply, begin, data))
    if node.log.damage is None:
        log.warning("log repaired group=%s begin=%d end=%d", node.group, damage.begin, damage.end)


async def _describe(peer: Address, metadata: Metadata) -> Any | None:
    """Return the extent of a copy's log, or None without an answer."""
    try:
        async with _channel(peer) as channel:
            return await BrokerStub(channel).DescribeLog(pb.Nothing(), metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError:
        return None


async def _fetch(peer: Address, metadata: Metadata, begin: int, end: int) -> tuple[int, bytes]:
    """Return the offset of the first frame that begins in [begin, end), or `end`, and the bytes of all such frames."""
    async with _channel(peer) as channel:
        request, loop = pb.ReadLogRequest(begin=begin, end=end, for_repair=True), asyncio.get_running_loop()
        chunks: list[pb.LogChunk] = []
        try:
            async with asyncio.timeout(SILENT_S) as silence:
                async for chunk in BrokerStub(channel).ReadLog(request, metadata=metadata):
                    chunks.append(chunk)
                    silence.reschedule(loop.time() + SILENT_S)
        except TimeoutError:
            raise NotServed(f"the other copy sent nothing for {SILENT_S:.0f} s") from None
        return chunks[0].offset if chunks else end, b"".join(chunk.data for chunk in chunks)


def _channel(peer: Address) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(str(Endpoint(peer.ip, peer.control_port)), options=CHANNEL_OPTIONS)
