"""Shell. What a delay server tells Prometheus besides what all of a pair do: what pends, and how late it goes out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client.core import Metric

from delayserver.counters import LATENESS_MS_BUCKETS, Counters
from delayserver.filing import Filing
from delayserver.master import DelayMaster
from delayserver.settings import DelaySettings
from qmq.server.metrics import PairCollector, Reading, serve_collector
from qmq.server.service import Service

NAME = "qmq_delayserver"


class DelayCollector(PairCollector[DelayMaster]):
    """Made by `serve_metrics`."""

    def __init__(
        self, service: Service[DelayMaster], counters: Counters, filing: Filing, settings: DelaySettings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        super().__init__(NAME, service, counters, settings, loop)
        self._counters, self._filing = counters, filing

    def read(self) -> Iterator[Metric]:
        yield from super().read()
        yield from map(self.gauge, self._schedule())
        yield from map(self.count, self._outcomes())
        yield self.histogram(
            "lateness_seconds", "Time from when a message was due until a broker group had stored it",
            LATENESS_MS_BUCKETS, self._counters.lateness_ms_counts, self._counters.lateness_ms_sum,
        )  # fmt: skip
        if (master := self._service.node.master) is not None:
            yield from self._dispatch(master)

    def _schedule(self) -> Iterator[Reading]:
        schedule = self._filing.schedule
        behind = max(self._service.node.log.flushed_end - schedule.filed_end, 0)
        yield "pending_messages", "Messages that are neither sent nor cancelled", schedule.pending_messages
        yield "pending_bytes", "Bytes of those messages", schedule.pending_bytes
        yield "schedule_segments", "Segments of the schedule", schedule.segments
        yield "unfiled_bytes", "Bytes of the log on this disk that the schedule does not have yet", behind

    def _dispatch(self, master: DelayMaster) -> Iterator[Metric]:
        stats = master.stats()
        yield self.gauge(("loaded_messages", "Messages in the wheel, to be due soon", stats["loaded_messages"]))
        yield self.gauge(("loaded_bytes", "Memory of the wheel", stats["loaded_bytes"]))
        yield self.gauge(("waiting_messages", "Messages that are due and not under way", stats["waiting_messages"]))
        off_s = stats["clock_off_ms"] / 1000
        yield self.gauge(("clock_difference_seconds", "How far the machine's clock is ahead of due times'", off_s))
        flights = self.gauges("in_flight_messages", "Messages under way to a broker group", "to_group")
        for name, messages in stats["in_flight"].items():
            flights.add_metric([self.group, name], messages)
        yield flights
        blocked = self.gauges("blocked_messages", "Messages that are due and have nowhere to go", "subject")
        for subject, (messages, why) in stats["waiting"].items():
            if why:
                blocked.add_metric([self.group, subject], messages)
        yield blocked

    def _outcomes(self) -> Iterator[Reading]:
        counters = self._counters
        yield "sent_messages", "Messages that broker groups stored", counters.sent_messages
        yield "sent_batches", "Batches that broker groups stored", counters.sent_batches
        yield "not_stored_batches", "Batches that were not stored and are due again", counters.not_stored_batches
        yield "unknown_answers", "Attempts whose outcome nobody knew; repeated unchanged", counters.unknown_answers
        rejected = counters.refused_messages_later
        yield "rejected_messages", "Messages that a broker does not take as they are; tried again later", rejected
        yield "cancelled_messages", "Messages that were cancelled", counters.cancelled_messages
        yield "rescheduled_messages", "Messages that got another due time", counters.rescheduled_messages
        yield "recurred_messages", "Occurrences of recurring schedules that came due", counters.recurred_messages
        skipped = counters.skipped_occurrences
        yield "skipped_occurrences", "Occurrences that were missed, and are not sent: only the latest is", skipped
        yield "carried_messages", "Messages written again because their part of the log went", counters.carried_messages


def serve_metrics(
    service: Service[DelayMaster], counters: Counters, filing: Filing, settings: DelaySettings
) -> tuple[WSGIServer, threading.Thread]:
    """Serve /metrics on a thread of its own."""
    loop = asyncio.get_running_loop()
    return serve_collector(DelayCollector(service, counters, filing, settings, loop), service, settings, loop)
