"""Shell. Metrics of a delay server, besides those of every copy: pending messages, and lateness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Any

from prometheus_client.core import Metric

from qmq.delayserver.decisions import LATENESS_MS_BUCKETS, Counters
from qmq.delayserver.dispatching import SUBJECTS_MAX
from qmq.delayserver.master import DelayMaster
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.upkeep import ScheduleFiler
from qmq.http_port import HttpPort
from qmq.server.metrics import CopyCollector, Reading, http_port
from qmq.server.service import Service

NAME = "qmq_delayserver"


class DelayCollector(CopyCollector[DelayMaster]):
    """Collector of a delay server's metrics. Made by `open_http`."""

    def __init__(
        self,
        service: Service[DelayMaster],
        counters: Counters,
        filing: ScheduleFiler,
        loop: asyncio.AbstractEventLoop,
        refusals: Callable[[], Collection[str]],
        settings: DelaySettings,
    ) -> None:
        super().__init__(NAME, service, counters, loop, settings)
        self._counters = counters
        self._filing = filing
        self._refusals = refusals

    def read(self) -> Iterator[Metric]:
        yield from super().read()
        yield from map(self.gauge, self._schedule())
        yield from map(self.count, self._outcomes())
        yield self.histogram(
            "lateness_seconds",
            "Time from when a message was due until a broker group had stored it",
            LATENESS_MS_BUCKETS,
            self._counters.lateness_ms_counts,
            self._counters.lateness_ms_sum,
        )
        if (master := self._service.node.master) is not None:
            yield from self._dispatch(master)

    def _refused_routes(self) -> int:
        """Return the number of refused subjects; the entry "" means that no metaserver answers."""
        return sum(bool(subject) for subject in self._refusals())

    def readiness(self) -> dict[str, object]:
        return super().readiness() | {"refusedRoutes": self._refused_routes()}

    def _schedule(self) -> Iterator[Reading]:
        schedule = self._filing.schedule
        behind = max(self._service.node.log.flushed_end - schedule.filed_end, 0)
        yield "pending_messages", "Messages that are neither sent nor cancelled", schedule.pending_messages
        yield "pending_bytes", "Bytes of messages that are neither sent nor cancelled", schedule.pending_bytes
        yield "refused_routes", "Subjects without a route, refused by the metaserver", self._refused_routes()
        yield "schedule_segments", "Segments of the schedule", schedule.segments
        yield "unfiled_bytes", "Bytes of the log on this disk that the schedule does not have yet", behind

    def _dispatch(self, master: DelayMaster) -> Iterator[Metric]:
        stats = master.stats()
        yield self.gauge(("loaded_messages", "Messages in the wheel, to be due soon", stats["loaded_messages"]))
        yield self.gauge(("loaded_bytes", "Memory of the wheel", stats["loaded_bytes"]))
        yield self.gauge(("waiting_messages", "Messages that are due and not under way", stats["waiting_messages"]))
        on_disk = stats["due_on_disk_messages"]
        yield self.gauge(("due_on_disk_messages", "Due messages on disk alone, which return to memory", on_disk))
        off_s = stats["clock_off_ms"] / 1000
        yield self.gauge(("clock_difference_seconds", "How far the machine's clock is ahead of the due clock", off_s))
        yield self.gauge(("clocks", "Clocks of machine, copy and metaserver that set due times", stats["clocks"]))
        messages, age_s = stats["overdue_messages"], stats["overdue_ms"] / 1000
        yield self.gauge(("due_messages", "Messages that are due and not sent, under way or not", messages))
        yield self.gauge(("due_age_seconds", "How long the oldest due and unsent message has been due", age_s))
        yield from self._overdue(stats)

    def _overdue(self, stats: dict[str, Any]) -> Iterator[Metric]:
        """Yield ages and counts by broker group, and by subject for the longest-waiting ones."""
        flights = self.gauges("in_flight_messages", "Messages under way to a broker group", "to_group")
        flight_age = self.gauges(
            "in_flight_age_seconds", "How long the oldest of these messages has been due", "to_group"
        )
        for name, (messages, age_ms) in stats["overdue_groups"].items():
            flights.add_metric([self.group, name], messages)
            flight_age.add_metric([self.group, name], age_ms / 1000)
        scope = f"of the {SUBJECTS_MAX} subjects that wait longest"
        due = self.gauges("due_subject_messages", f"Messages that are due and not sent, {scope}", "subject")
        age = self.gauges(
            "due_subject_age_seconds", f"How long the oldest unsent message has been due, {scope}", "subject"
        )
        blocked = self.gauges("blocked_messages", f"Messages that are due and have nowhere to go, {scope}", "subject")
        for name, (messages, age_ms, why) in stats["overdue_subjects"].items():
            due.add_metric([self.group, name], messages)
            age.add_metric([self.group, name], age_ms / 1000)
            if why:
                blocked.add_metric([self.group, name], messages)
        yield from (flights, flight_age, due, age, blocked)

    def _outcomes(self) -> Iterator[Reading]:
        counters = self._counters
        yield "sent_messages", "Messages that broker groups stored", counters.sent_messages
        yield "sent_batches", "Batches that broker groups stored", counters.sent_batches
        yield "not_stored_batches", "Batches that were not stored and are due again", counters.not_stored_batches
        yield "unknown_answers", "Attempts with unknown outcome, repeated unchanged", counters.unknown_answers
        rejected = counters.refused_messages_later
        yield "rejected_messages", "Messages that a broker refused as they are; tried again later", rejected
        yield "cancelled_messages", "Messages that were cancelled", counters.cancelled_messages
        yield "rescheduled_messages", "Messages that got another due time", counters.rescheduled_messages
        yield "recurred_messages", "Occurrences of recurring schedules that came due", counters.recurred_messages
        skipped = counters.skipped_occurrences
        yield "skipped_occurrences", "Occurrences that were missed, and are not sent: only the latest is", skipped
        yield (
            "carried_messages",
            "Messages written again before their part of the log is deleted",
            counters.carried_messages,
        )


def open_http(
    service: Service[DelayMaster],
    counters: Counters,
    filing: ScheduleFiler,
    settings: DelaySettings,
    refusals: Callable[[], Collection[str]],
) -> HttpPort:
    """Open the HTTP port. `refusals` returns subjects with a refused route; called on the loop."""
    loop = asyncio.get_running_loop()
    return http_port(DelayCollector(service, counters, filing, loop, refusals, settings), service, settings)
