"""Shell. Counts refused requests, and logs each once: there may be thousands a second."""

from __future__ import annotations

import logging

from qmq.metaserver.metrics import Metrics

log = logging.getLogger("qmq.metaserver")

REMEMBERED_MAX = 10_000


class Refusals:
    """Created by main for both acceptors, HTTP and gRPC; used on the loop."""

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
