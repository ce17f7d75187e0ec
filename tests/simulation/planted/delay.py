"""Planted bugs of delay servers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from qmq.delayserver.decisions import Decisions
from qmq.delayserver.flights import Flights
from qmq.delayserver.schedule import Filed, state
from qmq.delayserver.schedule.record import read_batch
from qmq.delayserver.schedule.state import Book
from qmq.delayserver.upkeep import DelayRetention
from qmq.log.delay_frames import Outcome, batch_begin
from qmq.log.frame import FrameKind
from qmq.replication.clocks import DueClock
from tests.simulation.bugs import Patch, bug, plant


@bug("delay", Flights, "_when_safe")
def sent_before_its_plan_is_safe(self: Flights, batch: Any) -> None:
    batch.is_safe = True
    self._read(batch)


plant(
    "delay",
    "segment with pending messages is dropped",
    patch.object(DelayRetention, "used_from", lambda self, message_log: message_log.end),
)
plant(
    "delay",
    "unfiled frames decide nothing",
    patch.object(Decisions, "not_named", lambda self, records: records),
    first=14,
)


@bug("delay", Flights, "resume", first=10)
def batches_of_earlier_masterships_are_put_together_anew(real: Any, self: Flights, batch: Any) -> None:
    real(self, batch)
    self._settle(self.open[batch.producer, batch.batch], Outcome.NOT_STORED, 0)


plant(
    "delay",
    "due times go by this machine alone",
    patch.object(DueClock, "_target", lambda self, clocks: clocks[0]),
    first=46,
)


@bug("delay")
def carried_message_pends_twice() -> list[Patch]:
    def carry(book: Book, frame: Any, body: Any) -> Filed:
        records = read_batch(frame, body, batch_begin(frame.count, True), book.position(frame.subject))
        return Filed(added=state._add(book, records))

    return [patch.dict(state._CHANGES, {FrameKind.CARRY: carry})]
