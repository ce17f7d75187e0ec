"""Shell. What a broker tells Prometheus besides what all of a pair do. docs/metrics.md maps QMQ's names to these."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client.core import Metric

from broker.counters import Counters
from broker.master import BrokerMaster
from broker.settings import BrokerSettings
from qmq.server.metrics import PairCollector, serve_collector
from qmq.server.service import Service


class BrokerCollector(PairCollector[BrokerMaster]):
    """Made by `serve_metrics`."""

    def __init__(
        self, service: Service[BrokerMaster], counters: Counters, settings: BrokerSettings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        super().__init__("qmq_broker", service, counters, settings, loop)
        self._counters = counters

    def read(self) -> Iterator[Metric]:
        yield from super().read()
        counters, master = self._counters, self._service.node.master
        yield self.count(("pulled_messages", "Messages handed to consumers", counters.pulled_messages))
        yield self.count(("acked_messages", "Pull sequences acked by consumers", counters.acked_messages))
        left = counters.returned_consumers
        yield self.count(("departed_consumers", "Consumers that left or whose lease ended", left))
        yield from self._lags()
        if master is not None:
            yield self.gauge(("subscriptions", "Consumers that are connected", len(master.subscriptions)))
            skipped = self.counts(
                "skipped_messages", "Messages that retention took before a consumer group acked them", "subject",
                "consumer_group",
            )  # fmt: skip
            for (subject, consumer_group), messages in master.skipped.items():
                skipped.add_metric([self.group, subject, consumer_group], messages)
            yield skipped

    def _lags(self) -> Iterator[Metric]:
        labels = "subject", "consumer_group"
        lag = self.gauges("lag_messages", "Messages not handed out yet", *labels)
        unacked = self.gauges("unacked_messages", "Messages handed out and not acked", *labels)
        state = self._service.node.log.state
        for (subject, name), progress in state.groups.items():
            returned = sum(entry[1] for entry in progress.returned)
            waiting = state.next_sequence.get(subject, 0) - progress.position + returned
            lag.add_metric([self.group, subject, name], waiting)
            held = sum(consumer.unacked_messages for consumer in progress.consumers.values())
            unacked.add_metric([self.group, subject, name], held)
        yield lag
        yield unacked


def serve_metrics(
    service: Service[BrokerMaster], counters: Counters, settings: BrokerSettings
) -> tuple[WSGIServer, threading.Thread]:
    """Serve /metrics on a thread of its own."""
    loop = asyncio.get_running_loop()
    return serve_collector(BrokerCollector(service, counters, settings, loop), service, settings, loop)
