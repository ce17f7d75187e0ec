"""Shell. The metaserver's state as metrics: its database, the other metaservers, clients, tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from qmq.metaserver.access import is_valid
from qmq.metaserver.database import Database
from qmq.metaserver.model import DELAY
from qmq.metaserver.registry import Registry
from qmq.metaserver.route_hubs import RouteHubs
from qmq.metaserver.rpc.tokens import wall_ms
from qmq.process_metrics import version_of

PREFIX = "qmq_metaserver"
TOKENS_MAX = 100
"""Those that expire first."""


class StateMetrics:
    """Made by main; `read` is called on the loop."""

    def __init__(self, registry: Registry, database: Database, hubs: RouteHubs) -> None:
        self._registry, self._database, self._hubs = registry, database, hubs

    def read(self) -> Iterable[Metric]:
        yield version_of("metaserver")
        yield from self._of_database()
        yield _gauge("peers", "Metaservers of this installation that are up, this one among them.", self._peers())
        yield from self._of_clients()
        yield self._of_tokens()
        yield self._of_failovers()
        yield self._of_losses()

    def _of_losses(self) -> Metric:
        losses = GaugeMetricFamily(
            f"{PREFIX}_loss_accepted",
            "1 from when an operator accepted a loss of acknowledged messages until AcknowledgeLoss.",
            labels=["broker_group"],
        )
        for name, group in sorted(self._registry.directory.groups.items()):
            if group.lost_term:
                losses.add_metric([name], 1.0)
        return losses

    def _of_failovers(self) -> Metric:
        refused = GaugeMetricFamily(
            f"{PREFIX}_failover_refused",
            "1 while a group's master is gone and its slave does not become the master by itself, with the reason.",
            labels=["broker_group", "reason"],
        )
        for name, (why, _) in sorted(self._registry.no_failover.items()):
            refused.add_metric([name, why.value], 1.0)
        return refused

    def _peers(self) -> float:
        return max(len(self._registry.peers()), 1)

    def _of_database(self) -> Iterable[Metric]:
        database = self._database
        yield _gauge("database_up", "1 while the database answers and is used.", float(database.is_up))
        yield _gauge(
            "database_set_aside",
            "1 while the database is not used because it has lost groups whose brokers are registered.",
            float(bool(database.set_aside_because)),
        )
        yield _gauge("database_bad_rows", "Rows that make no sense and are left out.", database.bad_rows)
        yield _gauge("database_answer_seconds", "How long the newest answer of the database took.", database.answer_s)
        yield _gauge(
            "database_last_commit_timestamp_seconds",
            "When this metaserver last stored something; 0: not yet.",
            database.committed_ms / 1000,
        )

    def _of_clients(self) -> Iterable[Metric]:
        clients = GaugeMetricFamily(
            f"{PREFIX}_clients", "Clients that this metaserver gives routes to, by kind.", labels=["kind"]
        )
        counts = Counter(
            "delay producer" if one.kind == DELAY else "producer" if one.produces else "consumer"
            for one in self._hubs.clients()
        )
        for kind in ("producer", "consumer", "delay producer"):
            clients.add_metric([kind], counts[kind])
        yield clients

    def _of_tokens(self) -> Metric:
        now = wall_ms()
        expiry = GaugeMetricFamily(
            f"{PREFIX}_token_expiry_timestamp_seconds",
            "When a valid token expires, of the first 100 that do.",
            labels=["name", "id"],
        )
        ending = [row for row in self._registry.tokens if row.expires_ms and is_valid(row, now)]
        for row in sorted(ending, key=lambda row: row.expires_ms)[:TOKENS_MAX]:
            expiry.add_metric([row.name, row.id], row.expires_ms / 1000)
        return expiry


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value)
