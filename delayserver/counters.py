"""Core. What a delay server did as master, for metrics; goes on from one mastership to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from qmq.server.producing import ProduceCounters

LATENESS_MS_BUCKETS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000, 600_000)


@dataclass(slots=True)
class Counters(ProduceCounters):
    sent_messages: int = 0
    sent_batches: int = 0
    not_stored_batches: int = 0
    """Batches that a broker group certainly did not store; their messages were due again."""
    unknown_answers: int = 0
    """Attempts after which nobody knew; the same batch was repeated."""
    refused_messages_later: int = 0
    """Messages that a broker never takes as they are; they are tried again much later."""
    cancelled_messages: int = 0
    rescheduled_messages: int = 0
    carried_messages: int = 0
    recurred_messages: int = 0
    """Occurrences of recurring schedules."""
    skipped_occurrences: int = 0
    """Those that were missed while nobody was there, and are not sent."""
    lateness_ms_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_MS_BUCKETS) + 1))
    """Messages sent, by time from due until stored; the last place is for those later than every bucket."""
    lateness_ms_sum: int = 0
