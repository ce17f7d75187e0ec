"""Shell. Counts who was refused at a door, and logs each once: a stranger may knock a thousand times a second."""

from __future__ import annotations

import logging

from metaserver.metrics import Metrics

log = logging.getLogger("qmq.metaserver")

REMEMBERED_MAX = 10_000


class Refusals:
    """Created by main for both doors, HTTP and gRPC; used on the loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[str, str]] = set()

    def note(self, what: str, peer: str, reason: str) -> None:
        """`what`: the method or address; `peer`: the host, without its port."""
        self._metrics.refused_tokens.inc()
        if (peer, reason) in self._logged:
            return
        if len(self._logged) >= REMEMBERED_MAX:
            self._logged.clear()
        self._logged.add((peer, reason))
        log.warning("refused at=%.100s peer=%s: %s", what, peer, reason)
