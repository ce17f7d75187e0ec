"""Shell. Metrics of a broker, besides those of every copy. docs/metrics.md maps QMQ's names to these."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from qmq.broker.answers import Counters
from qmq.broker.group_status import Backlog, Cause, Key
from qmq.broker.master import BrokerMaster
from qmq.broker.retention import Retention
from qmq.broker.settings import BrokerSettings
from qmq.http_port import HttpPort
from qmq.server.metrics import CopyCollector, Later, http_port
from qmq.server.service import Service


class BrokerCollector(CopyCollector[BrokerMaster]):
    """Collector of a broker's metrics. Made by `open_http`."""

    def __init__(
        self,
        service: Service[BrokerMaster],
        counters: Counters,
        loop: asyncio.AbstractEventLoop,
        retention: Retention,
        settings: BrokerSettings,
    ) -> None:
        super().__init__("qmq_broker", service, counters, loop, settings)
        self._counters = counters
        self._retention = retention

    def read(self) -> Iterator[Metric]:
        yield from super().read()
        counters, master = self._counters, self._service.node.master
        yield self.count(("pulled_messages", "Messages delivered to consumers", counters.pulled_messages))
        yield self.count(("acked_messages", "Pull sequences acked by consumers", counters.acked_messages))
        left = counters.returned_consumers
        yield self.count(("departed_consumers", "Consumers that left or lost their lease", left))
        known = len(self._service.node.log.state.groups)
        yield self.gauge(("consumer_groups", "Consumer groups; metrics_subjects_max of them are shown", known))
        dropped = self.counts(
            "dropped_messages",
            "Messages deleted unconsumed, as `unconsumed = drop` allows",
            "subject",
            "consumer_group",
        )
        for (subject, consumer_group), messages in self._service.node.log.state.kept.unconsumed.items():
            dropped.add_metric([self.group, subject, consumer_group], messages)
        yield dropped
        text = "Dead letters of a consumer group since this process began, for any destination"
        dead = self.counts("dead_letters", text, "subject", "consumer_group")
        for (subject, consumer_group), messages in counters.dead_letters.most_common(self._shown_max):
            dead.add_metric([self.group, subject, consumer_group], messages)
        yield dead
        if master is not None:
            text = "Log past retention that is kept because this consumer group has not consumed it"
            held = self.gauges("held_bytes", text, "subject", "consumer_group")
            if self._retention.holder is not None:
                held.add_metric([self.group, *self._retention.holder], self._retention.held_bytes)
            yield held
            yield self.gauge(("subscriptions", "Consumers that are connected", len(master.subscriptions)))
            skipped = self.counts(
                "skipped_messages",
                "Messages that retention deleted before a consumer group acked them",
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
            text = "Messages dropped because more waited for a consumer group than SetLimits allows"
            overflowed = self.counts("overflowed_messages", text, "subject", "consumer_group")
            for (subject, consumer_group), messages in master.overflowed.items():
                overflowed.add_metric([self.group, subject, consumer_group], messages)
            yield overflowed

    def copied(self) -> Iterator[Later]:
        yield from super().copied()
        state, master, now_ms = self._service.node.log.state, self._service.node.master, self._service.now_ms()
        backlogs = master.backlogs.copy() if master is not None else None
        if len(state.groups) <= self._shown_max:  # few groups: computed now; many: as found by the last round
            ends = state.next_sequence
            found = {key: Backlog.of(group, ends.get(key[0], 0)) for key, group in state.groups.items()}
            yield lambda: self._lags(found)
        else:
            yield lambda: self._lags(backlogs.largest(self._shown_max) if backlogs is not None else {})
        if master is not None:
            causes = dict(master.causes.found)
            yield lambda: self._ages(backlogs.ages_ms(now_ms) if backlogs is not None else {})
            yield lambda: self._first_unacked(backlogs.first_unacked_ms(now_ms) if backlogs is not None else {})
            yield lambda: self._causes(causes)

    def _lags(self, backlogs: Mapping[Key, Backlog]) -> Iterator[Metric]:
        labels = "subject", "consumer_group"
        lag = self.gauges("lag_messages", "Messages not delivered yet", *labels)
        unacked = self.gauges("unacked_messages", "Messages delivered and not acked", *labels)
        for (subject, name), backlog in backlogs.items():
            lag.add_metric([self.group, subject, name], backlog.waiting)
            unacked.add_metric([self.group, subject, name], backlog.delivered)
        yield lag
        yield unacked

    def _ages(self, ages_ms: Mapping[Key, int]) -> Iterator[Metric]:
        text = "Age of a group's oldest message without ack, for the groups with the oldest ones"
        ages = self.gauges("oldest_unacked_seconds", text, "subject", "consumer_group")
        for (subject, name), ms in ages_ms.items():
            ages.add_metric([self.group, subject, name], ms / 1000)
        yield ages

    def _first_unacked(self, found: Mapping[Key, int]) -> Iterator[Metric]:
        text = (
            "Longest time that a consumer of the group has had the same first unacked message, for the slowest groups"
        )
        ages = self.gauges("oldest_delivered_seconds", text, "subject", "consumer_group")
        for (subject, name), ms in found.items():
            ages.add_metric([self.group, subject, name], ms / 1000)
        yield ages

    def _causes(self, found: Mapping[Key, Sequence[Cause]]) -> Iterator[Metric]:
        stopped = self.gauges(
            "group_cause", "1 for the cause that stops or slows a consumer group", "subject", "consumer_group", "cause"
        )
        for (subject, name), causes in found.items():
            for cause in causes:
                stopped.add_metric([self.group, subject, name, cause], 1)
        yield stopped


def open_http(
    service: Service[BrokerMaster], counters: Counters, settings: BrokerSettings, retention: Retention
) -> HttpPort:
    """Open the HTTP port."""
    loop = asyncio.get_running_loop()
    return http_port(BrokerCollector(service, counters, loop, retention, settings), service, settings)
