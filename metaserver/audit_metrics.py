"""Shell. What the audit's ledger says, as metrics: where a job's own file reaches no Prometheus, as on Kubernetes, the
metaserver that shows the nights tells of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from qmq.ledger import LedgerDamaged
from qmq.ledger_status import readings
from qmq.metaserver.scrapes import Scrapes

log = logging.getLogger("qmq.metaserver")


class AuditMetrics:
    """Made by main, which runs `scrapes.run` as a task.

    Args:
        status: reads the ledger (`Nights.status`), on any thread.
    """

    def __init__(self, status: Callable[[], list[dict[str, Any]]]) -> None:
        self._status = status
        self.scrapes = Scrapes(self._look)
        self._found: list[dict[str, Any]] = []
        self._is_up: bool | None = None
        """None: it was not looked at yet."""

    def read(self) -> Iterable[Metric]:
        """What the ledger said last; nothing of the groups if it cannot be read now."""
        self.scrapes.came()
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
            self._found, self._is_up = await asyncio.to_thread(self._status), True
        except (LedgerDamaged, OSError) as error:
            self._found, self._is_up = [], False
            if was_up is not False:
                log.error("the audit's ledger cannot be read: %s", error)
