"""Shell. Metrics read at a scrape: the cluster's state, the audit's ledger, Doctor's findings.

Doctor's checks and the ledger are read by a task after a scrape, so no scrape waits for them. The ledger's metrics are
for systems on which the audit's own file reaches no Prometheus, such as Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from qmq.ledger import LedgerDamaged, readings
from qmq.metaserver.access import is_valid
from qmq.metaserver.actions.causes import Check, CheckKind
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import DELAY
from qmq.metaserver.observability.metrics import Scrapes
from qmq.metaserver.routes.hub import RouteHubs
from qmq.metaserver.rpc.access import wall_ms
from qmq.metaserver.storage.database import Database
from qmq.process_metrics import version_of

PREFIX = "qmq_metaserver"
TOKENS_MAX = 100
"""Tokens with a metric: the first ones to expire."""


class StateMetrics:
    """State of the database, metaservers, clients and tokens. Made by main; `read` is called on the loop."""

    def __init__(self, registry: Registry, database: Database, hubs: RouteHubs) -> None:
        self._registry = registry
        self._database = database
        self._hubs = hubs

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
            "1 while the database is not used because it lacks groups with registered brokers.",
            float(bool(database.set_aside_because)),
        )
        yield _gauge("database_bad_rows", "Invalid rows, which are left out.", database.bad_rows)
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
            "delay producer" if client.kind == DELAY else "producer" if client.produces else "consumer"
            for client in self._hubs.clients()
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


log = logging.getLogger("qmq.metaserver")


class AuditMetrics:
    """The audit's ledger. Made by main, which runs `scrapes.run` as a task.

    Args:
        status: reads the ledger (`Nights.status`), on any thread.
    """

    def __init__(self, status: Callable[[], list[dict[str, Any]]]) -> None:
        self._status = status
        self.scrapes = Scrapes(self._look)
        self._found: list[dict[str, Any]] = []
        self._is_up: bool | None = None
        """None: not read yet."""

    def read(self) -> Iterable[Metric]:
        """Return the metrics of the last reading; only `up` if the ledger cannot be read."""
        self.scrapes.note_scrape()
        if self._is_up is not None:
            yield GaugeMetricFamily(
                "qmq_metaserver_audit_ledger_up", "Whether the audit's ledger could be read.", int(self._is_up)
            )
        for name, (help_text, values) in readings(self._found).items():
            if values:
                family = GaugeMetricFamily(name, help_text, labels=list(values[0][0]))
                for labels, value in values:
                    family.add_metric(list(labels.values()), float(value))
                yield family

    async def _look(self) -> None:
        was_up = self._is_up
        try:
            self._found = await asyncio.to_thread(self._status)
            self._is_up = True
        except (LedgerDamaged, OSError) as error:
            self._found = []
            self._is_up = False
            if was_up is not False:
                log.error("the audit's ledger cannot be read: %s", error)


class DoctorMetrics:
    """Doctor's findings. Made by main, which runs `scrapes.run` as a task.

    Args:
        examine: makes all checks.
    """

    def __init__(self, examine: Callable[[], Awaitable[Sequence[Check]]]) -> None:
        self._examine = examine
        self.scrapes = Scrapes(self._look)
        self._findings: Counter[CheckKind] | None = None
        self._checked_s = 0.0

    def read(self) -> Iterable[Metric]:
        """Return the metrics of the last checks. Before the first ones there are no findings, which does not mean that
        all is well.
        """
        self.scrapes.note_scrape()
        yield GaugeMetricFamily(
            f"{PREFIX}_doctor_checked_timestamp_seconds",
            "When this metaserver last made Doctor's checks; 0: not yet.",
            self._checked_s,
        )
        findings = GaugeMetricFamily(
            f"{PREFIX}_doctor_findings",
            "Findings of Doctor, one per cause; 0: all is well.",
            labels=["check"],
        )
        if self._findings is not None:
            for kind in CheckKind:
                findings.add_metric([kind], self._findings[kind])
        yield findings

    async def _look(self) -> None:
        try:
            checks = await self._examine()
        except Exception:  # a defect in a check must not end the metaserver; the timestamp shows it
            log.exception("doctor's checks for its metrics failed")
            return
        self._findings = Counter(check["kind"] for check in checks if not check["ok"])
        self._checked_s = time.time()
