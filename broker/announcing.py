"""Shell. Asks the metaserver where consumer groups begin that have no position on this broker group, many at once."""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio

from qmq.broker.beginning import Answered, Begin, NewGroup
from qmq.broker.master import BrokerMaster
from qmq.broker.settings import BrokerSettings
from qmq.errors import NotServed
from qmq.proto import qmq_pb2 as pb
from qmq.remoting.connection import Connection
from qmq.server.meta_link import MetaLink
from qmq.server.service import Service

log = logging.getLogger(__name__)

AT_ONCE = 500
ANSWER_S = 10.0
"""A metaserver waits for the masters of the route, and for its database, some seconds each."""


class Announcing:
    """Made by main before the service; used on its loop."""

    def __init__(self) -> None:
        self._asked: list[tuple[NewGroup, Answered]] = []
        self._came = asyncio.Event()

    def ask(self, group: NewGroup, answered: Answered) -> None:
        """Ask soon; see `qmq.broker.beginning.Ask`."""
        self._asked.append((group, answered))
        self._came.set()

    async def run(self, service: Service[BrokerMaster], meta_link: MetaLink, settings: BrokerSettings) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._asked:
                some, self._asked = self._asked[:AT_ONCE], self._asked[AT_ONCE:]
                answers = await _answers([group for group, _ in some], service.node.group, meta_link, settings.token)
                for (_, answered), answer in zip(some, answers, strict=True):
                    for link, packet in answered(answer):
                        assert isinstance(link, Connection)  # of this process
                        service.packet_received(link, packet)


async def _answers(
    groups: list[NewGroup], broker_group: str, meta_link: MetaLink, token: str
) -> list[Begin | NotServed | None]:
    asked = pb.BeginGroupsRequest(
        broker_group=broker_group, groups=[pb.NewGroup(**group._asdict()) for group in groups]
    )
    try:
        if (stub := meta_link.stub) is None:
            raise NotServed("no metaserver serves this broker now")
        metadata = (("x-api-token", token),)
        answer = await stub.BeginGroups(asked, metadata=metadata, timeout=ANSWER_S)
        if len(answer.begins) != len(groups):
            raise NotServed("the metaserver answered for other groups than were asked for")
        return [Begin(one.since_ms, one.mark, one.began_ms) for one in answer.begins]
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return [None] * len(groups)
        reason = error.details() or error.code().name
    except NotServed as error:
        reason = str(error)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        reason = "the connection to the metaserver was closed"  # by its link, which failed
    log.warning("new consumer groups wait groups=%d reason=%s", len(groups), reason)
    return [NotServed(f"{group.group} is new here, and waits for the metaserver: {reason}") for group in groups]
