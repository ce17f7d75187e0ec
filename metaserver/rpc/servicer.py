"""Shell. The gRPC service of the metaserver, joined of its parts: brokers, clients' routes, tokens."""

from __future__ import annotations

from metaserver.access import Access
from metaserver.metrics import Metrics
from metaserver.registry import Ask, Registry
from metaserver.rpc.brokers import BrokerRpc
from metaserver.rpc.routes import RouteRpc
from metaserver.rpc.tokens import TokenRpc
from metaserver.rpc.visits import Visits
from metaserver.watch import WatchHub
from qmq.proto.qmq_pb2_grpc import MetaserverServicer


class MetaserverRpc(BrokerRpc, RouteRpc, TokenRpc, MetaserverServicer):  # type: ignore[misc]
    """Created by main, once.

    Args:
        ask: asks a broker whether it is there.
    """

    def __init__(self, registry: Registry, hub: WatchHub, access: Access, metrics: Metrics, ask: Ask) -> None:
        self._registry, self._hub, self._access, self._metrics = registry, hub, access, metrics
        self._ask = ask
        self._logged: set[str] = set()
        self.visits = Visits(access)
