"""Shell. The gRPC service of the metaserver, joined of its parts: brokers, consumer groups, clients' routes, tokens,
watchdogs."""

from __future__ import annotations

from qmq.metaserver.access import Access
from qmq.metaserver.actions.vault import Vault
from qmq.metaserver.cluster.registry import Ask, Registry
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.routes.hub import RouteHubs
from qmq.metaserver.rpc.brokers import BrokerRpc, Visits
from qmq.metaserver.rpc.consumer_groups import ConsumerGroupRpc, ConsumerGroups
from qmq.metaserver.rpc.routes import RouteRpc
from qmq.metaserver.rpc.tokens import TokenRpc
from qmq.metaserver.rpc.watchdogs import Hold, WatchdogRpc
from qmq.metaserver.storage.database import Database
from qmq.proto.qmq_pb2_grpc import MetaserverServicer


class MetaserverRpc(BrokerRpc, ConsumerGroupRpc, RouteRpc, TokenRpc, WatchdogRpc, MetaserverServicer):  # type: ignore[misc]
    """Created by main, once.

    Args:
        ask: asks a broker whether it is there.
        hold: keeps, takes or gives back a watchdog's lease.
    """

    def __init__(
        self,
        registry: Registry,
        hubs: RouteHubs,
        access: Access,
        metrics: Metrics,
        ask: Ask,
        hold: Hold,
        database: Database,
        vault: Vault,
        consumer_groups: ConsumerGroups,
    ) -> None:
        self._registry, self._hubs, self._access, self._metrics = registry, hubs, access, metrics
        self._database, self._vault, self._consumer_groups = database, vault, consumer_groups
        self._ask = ask
        self._hold = hold
        self._logged: set[str] = set()
        self.visits = Visits(access)
