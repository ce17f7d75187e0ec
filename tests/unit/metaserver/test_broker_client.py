"""Shell. Outcome of a failed call to a broker."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from qmq.errors import NotServed, OperatorError
from qmq.metaserver.model import Broker
from qmq.metaserver.rpc.broker_client import Brokers
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerServicer, add_BrokerServicer_to_server
from qmq.types import Role

HOST = "127.0.0.1"


async def reset_at_a_failing_broker(fails):
    """Call ResetOffset of a broker that ends it with `fails`, a status or an exception."""

    class Failing(BrokerServicer):
        async def ResetOffset(self, request, context):
            if isinstance(fails, grpc.StatusCode):
                await context.abort(fails, "so it is")
            raise fails

    others = asyncio.all_tasks()
    server = grpc.aio.server()
    add_BrokerServicer_to_server(Failing(), server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        broker = Broker("g1", Role.MASTER, "h1", HOST, 1, 2, control_port=port)
        await Brokers("token", timeout_ms=5000).reset_offset(broker, pb.ResetOffsetRequest())
    finally:
        await server.stop(0)
        # gRPC may report the end of a call after that. If the loop is closed by then, the next loop raises an error.
        if calls := asyncio.all_tasks() - others:
            await asyncio.wait(calls)


@pytest.mark.parametrize("fails", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL, ValueError("a bug")])
async def test_failed_reset_has_unknown_outcome(fails):
    """Reported as refused, it would be repeated without a look."""
    with pytest.raises(NotServed):
        await reset_at_a_failing_broker(fails)


@pytest.mark.parametrize("status", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED])
async def test_refused_reset_changed_nothing(status):
    with pytest.raises(OperatorError, match="h1:1 .MASTER of g1. refused: so it is"):
        await reset_at_a_failing_broker(status)
