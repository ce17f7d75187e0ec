"""Shell. The gRPC method by which masters ask where consumer groups begin."""

from __future__ import annotations

from typing import Any

import grpc

from qmq.errors import CallError, MissingRight, OperatorError, QmqError
from qmq.metaserver.consumer_groups import ConsumerGroups
from qmq.metaserver.group_starts import Asked
from qmq.proto import qmq_pb2 as pb
from qmq.rpc_access import caller
from qmq.subjects import check_name, check_subject


class ConsumerGroupRpc:
    """Part of the metaserver's service."""

    _consumer_groups: ConsumerGroups

    async def BeginGroups(self, request: pb.BeginGroupsRequest, context: Any) -> pb.BeginGroupsAnswer:
        try:
            caller().require_group(request.broker_group)
            asked = [_asked(one) for one in request.groups]
            begins = await self._consumer_groups.begin(request.broker_group, asked)
        except QmqError as error:
            await context.abort(_status(error), str(error))
            raise  # abort has raised already
        return pb.BeginGroupsAnswer(begins=[pb.GroupBegin(**begin._asdict()) for begin in begins])


def _asked(one: pb.NewGroup) -> Asked:
    check_subject(one.subject)
    check_name("consumer group", one.group)
    return Asked(one.subject, one.group, one.latest, max(one.since_ms, 0), one.broadcast)


def _status(error: QmqError) -> grpc.StatusCode:
    if isinstance(error, MissingRight):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, CallError | OperatorError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.UNAVAILABLE
