"""Core. What a delay server takes: batches as a broker does, of messages that say when they are due."""

from __future__ import annotations

from collections.abc import Callable

from qmq.codec import BatchCheck, Buffer
from qmq.delayserver.due import DAY_MS, check_delayed
from qmq.delayserver.settings import DelaySettings
from qmq.replication.mastership import Mastership
from qmq.server.producing import ProduceCounters, Producing


class Intake(Producing):
    """Made by the master; ends with the mastership."""

    def __init__(
        self, mastership: Mastership, counters: ProduceCounters, settings: DelaySettings, wake: Callable[[str], None]
    ) -> None:
        super().__init__(mastership, counters, wake)
        self.longest_ms = int(settings.delay_days_max * DAY_MS)

    def check(self, batch: Buffer, count: int) -> BatchCheck:
        """Check each message, and when it is due; a time that has passed is due at once."""
        mastership = self._mastership
        return check_delayed(
            batch,
            count,
            message_bytes_max=mastership.settings.message_bytes_max,
            now_ms=mastership.retry_ms(),
            longest_ms=self.longest_ms,
        )
