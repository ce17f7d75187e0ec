"""Shell. Mends a damaged log from the other copy; until then this broker is no master, or readonly (P6)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import grpc
import grpc.aio

from qmq.control_plane import CHANNEL_OPTIONS
from qmq.errors import LogError
from qmq.log.recovery import Damage
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub
from qmq.replication.settings import CopySettings
from qmq.server.service import Service
from qmq.ticking import until_next_second

log = logging.getLogger(__name__)


async def keep_whole(service: Service[Any], settings: CopySettings) -> None:
    """While the log is damaged, try to mend it, once a second."""
    while True:
        damage = service.node.log.damage
        if damage is not None:
            try:
                await _mend(service, settings, damage)
            except (grpc.aio.AioRpcError, LogError) as error:
                text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.error("repair waits group=%s begin=%d: %s", service.node.group, damage.begin, text)
        await asyncio.sleep(until_next_second(asyncio.get_running_loop().time()))


async def _mend(service: Service[Any], settings: CopySettings, damage: Damage) -> None:
    node = service.node
    if node.assignment is None or not node.assignment.peers:
        return
    peer = node.assignment.peers[0]
    metadata = (("x-api-token", settings.token),)
    log.error("log damaged group=%s begin=%d end=%d reason=%s", node.group, damage.begin, damage.end, damage.reason)
    async with grpc.aio.insecure_channel(f"{peer.ip}:{peer.control_port}", options=CHANNEL_OPTIONS) as channel:
        stub = BrokerStub(channel)
        theirs = await stub.DescribeLog(pb.Nothing(), metadata=metadata, timeout=5)
        wanted: tuple[int, int] | None = None

        def mend() -> None:
            nonlocal wanted
            wanted = node.mend(theirs.log_start, theirs.log_end)

        service.guarded(mend)
        if wanted is not None:
            request = pb.ReadLogRequest(begin=wanted[0], end=wanted[1])
            chunks = [chunk async for chunk in stub.ReadLog(request, metadata=metadata, timeout=60)]
            data = b"".join(chunk.data for chunk in chunks)
            if node.log.damage is damage:
                service.guarded(partial(node.repair, chunks[0].offset if chunks else wanted[1], data))
        if node.log.damage is None:
            log.warning("log repaired group=%s begin=%d end=%d", node.group, damage.begin, damage.end)
