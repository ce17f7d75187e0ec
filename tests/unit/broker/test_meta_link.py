"""Shell. What a broker does when the metaserver refuses it, or does not answer."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from broker.meta_link import MetaLink
from broker.settings import BrokerSettings
from qmq.errors import NotServed

SETTINGS = BrokerSettings(hostname="g1-a", data="unused", token="t")


class Node:
    def __init__(self):
        self.started = 0

    def start_without_metaserver(self):
        self.started += 1
        return True


def refusal(code):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="because")


@pytest.mark.parametrize(
    ("error", "starts"),
    [
        pytest.param(NotServed("nobody answers"), 1, id="not reached"),
        pytest.param(refusal(grpc.StatusCode.UNAVAILABLE), 1, id="its database is away"),
        pytest.param(refusal(grpc.StatusCode.FAILED_PRECONDITION), 0, id="not added, or another disk"),
        pytest.param(refusal(grpc.StatusCode.ALREADY_EXISTS), 0, id="another process has this part"),
        pytest.param(refusal(grpc.StatusCode.UNAUTHENTICATED), 0, id="wrong token"),
    ],
)
def test_broker_takes_up_its_old_part_only_if_nobody_told_it_not_to(error, starts):
    node = Node()
    link = MetaLink(SimpleNamespace(node=node), SETTINGS)
    link.failed(error)
    link.start_alone()
    assert node.started == starts
