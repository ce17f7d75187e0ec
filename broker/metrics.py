"""Shell. A broker's own metrics, besides those of every copy. docs/metrics.md maps QMQ's names to these."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import Metric

from qmq.broker.backlogs import Backlog
from qmq.broker.counters import Counters
from qmq.broker.master import BrokerMaster
from qmq.broker.retention import Retention
from qmq.broker.settings import BrokerSettings
from qmq.http_port import HttpPort
from qmq.server.metrics import CopyCollector, http_port
from qmq.server.service import Service


class BrokerCollector(CopyCollector[BrokerMaster]):
    """Made by `open_http`."""

    def __init__(
        self,
        service: Service[BrokerMaster],
        counters: Counters,
        loop: asyncio.AbstractEventLoop,
        retention: Retention,
        settings: BrokerSettings,
    ) -> None:
        super().__init__("qmq_broker", service, counters, loop, settings)
        self._counters, self._retention = counters, retention

    def read(self) -> Iterator[Metric]:
        yield from super().read()
        counters, master = self._counters, self._service.node.master
        yield self.count(("pulled_messages", "Messages handed to consumers", counters.pulled_messages))
        yield self.count(("acked_messages", "Pull sequences acked by consumers", counters.acked_messages))
        left = counters.returned_consumers
        yield self.count(("departed_consumers", "Consumers that left or whose lease ended", left))
        yield from self._lags()
        dropped = self.counts(
            "dropped_messages",
            "Messages deleted although the consumer group had not consumed them, as set",
            "subject",
            "consumer_group",
        )
        for (subject, consumer_group), messages in self._service.node.log.state.kept.unconsumed.items():
            dropped.add_metric([self.group, subject, consumer_group], messages)
        yield dropped
        if master is not None:
            yield from self._ages(master)
            text = "Log past retention that is kept because this consumer group has not consumed it"
            held = self.gauges("held_bytes", text, "subject", "consumer_group")
            if self._retention.holder is not None:
                held.add_metric([self.group, *self._retention.holder], self._retention.held_bytes)
            yield held
            yield self.gauge(("subscriptions", "Consumers that are connected", len(master.subscriptions)))
            skipped = self.counts(
                "skipped_messages",
                "Messages that retention took before a consumer group acked them",
                "subject",
                "consumer_group",
            )
            for (subject, consumer_group), messages in master.skipped.items():
                skipped.add_metric([self.group, subject, consumer_group], messages)
            yield skipped
            text = "Messages that expired before a consumer group handled them"
            expired = self.counts("expired_messages", text, "subject", "consumer_group")
            for (subject, consumer_group), messages in master.expired.items():
                expired.add_metric([self.group, subject, consumer_group], messages)
            yield expired
            text = "Messages that were given up because more than an operator allows waited for a consumer group"
            overflowed = self.counts("overflowed_messages", text, "subject", "consumer_group")
            for (subject, consumer_group), messages in master.overflowed.items():
                overflowed.add_metric([self.group, subject, consumer_group], messages)
            yield overflowed
            stopped = self.gauges(
                "group_cause", "What stops or slows a consumer group", "subject", "consumer_group", "cause"
            )
            for (subject, consumer_group), found in master.causes.found.items():
                for cause in found:
                    stopped.add_metric([self.group, subject, consumer_group, cause], 1)
            yield stopped

    def _lags(self) -> Iterator[Metric]:
        labels = "subject", "consumer_group"
        lag = self.gauges("lag_messages", "Messages not delivered yet", *labels)
        unacked = self.gauges("unacked_messages", "Messages delivered and not acked", *labels)
        known = len(self._service.node.log.state.groups)
        yield self.gauge(("consumer_groups", "Consumer groups; metrics_subjects_max of them are shown", known))
        for (subject, name), backlog in self._backlogs().items():
            lag.add_metric([self.group, subject, name], backlog.waiting)
            unacked.add_metric([self.group, subject, name], backlog.delivered)
        yield lag
        yield unacked

    def _backlogs(self) -> dict[tuple[str, str], Backlog]:
        """Of few groups, how it is; of many, how it was at the last look: a page must not walk through all of them."""
        state, master = self._service.node.log.state, self._service.node.master
        if len(state.groups) <= self._shown_max:
            ends = state.next_sequence
            return {key: Backlog.of(group, ends.get(key[0], 0)) for key, group in state.groups.items()}
        return master.backlogs.largest(self._shown_max) if master is not None else {}

    def _ages(self, master: BrokerMaster) -> Iterator[Metric]:
        text = "Age of the oldest message that the group has not acked, of the groups with the oldest ones"
        ages = self.gauges("oldest_unacked_seconds", text, "subject", "consumer_group")
        for (subject, name), ms in master.backlogs.ages_ms(self._service.now_ms()).items():
            ages.add_metric([self.group, subject, name], ms / 1000)
        yield ages


def open_http(
    service: Service[BrokerMaster], counters: Counters, settings: BrokerSettings, retention: Retention
) -> HttpPort:
    """Open the HTTP port."""
    loop = asyncio.get_running_loop()
    return http_port(BrokerCollector(service, counters, loop, retention, settings), service, settings)
