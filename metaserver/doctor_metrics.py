"""Shell. What Doctor finds, as metrics: counted now and then by a task, so that no scrape waits for it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from qmq.metaserver.actions.causes import Check, Kind
from qmq.metaserver.scrapes import Scrapes

log = logging.getLogger("qmq.metaserver")

PREFIX = "qmq_metaserver_doctor"


class DoctorMetrics:
    """Made by main, which runs `scrapes.run` as a task.

    Args:
        examine: makes all checks.
    """

    def __init__(self, examine: Callable[[], Awaitable[Sequence[Check]]]) -> None:
        self._examine = examine
        self.scrapes = Scrapes(self._look)
        self._findings: Counter[Kind] | None = None
        self._checked_s = 0.0

    def read(self) -> Iterable[Metric]:
        """What was found last; of a process that has not looked yet, nothing, which is not to say that all is well."""
        self.scrapes.came()
        yield GaugeMetricFamily(
            f"{PREFIX}_checked_timestamp_seconds",
            "When this metaserver last made Doctor's checks; 0: not yet.",
            self._checked_s,
        )
        findings = GaugeMetricFamily(
            f"{PREFIX}_findings", "What Doctor finds wrong, one for each cause; 0: all is well.", labels=["check"]
        )
        if self._findings is not None:
            for kind in Kind:
                findings.add_metric([kind], self._findings[kind])
        yield findings

    async def _look(self) -> None:
        try:
            checks = await self._examine()
        except Exception:  # a defect in a check is to be seen by the time that stands still, and ends no metaserver
            log.exception("doctor's checks for its metrics failed")
            return
        self._findings = Counter(check["kind"] for check in checks if not check["ok"])
        self._checked_s = time.time()
