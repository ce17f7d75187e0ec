"""Planted bugs of delay servers."""

from __future__ import annotations

from typing import Any
from unittest import mock

from qmq.delayserver.decisions import Decisions
from qmq.delayserver.flights import Flights
from qmq.delayserver.schedule import Filed, state
from qmq.delayserver.schedule.record import read_batch
from qmq.delayserver.schedule.state import Book
from qmq.delayserver.upkeep import DelayRetention
from qmq.log.delay_frames import Outcome, batch_begin
from qmq.log.frame import FrameKind
from qmq.replication.clocks import DueClock
from tests.simulation.bugs import Patch, bug


@bug("delay")
def sent_before_its_plan_is_safe() -> list[Patch]:
    def when_safe(self: Flights, batch: Any) -> None:
        batch.is_safe = True
        self._read(batch)

    return [mock.patch.object(Flights, "_when_safe", when_safe)]


@bug("delay")
def segment_with_pending_messages_is_dropped() -> list[Patch]:
    return [mock.patch.object(DelayRetention, "used_from", lambda self, message_log: message_log.end)]


@bug("delay", first=14)
def unfiled_frames_decide_nothing() -> list[Patch]:
    return [mock.patch.object(Decisions, "not_named", lambda self, records: records)]


@bug("delay", first=10)
def batches_of_earlier_masterships_are_put_together_anew() -> list[Patch]:
    resume = Flights.resume

    def anew(self: Flights, batch: Any) -> None:
        resume(self, batch)
        self._settle(self.open[batch.producer, batch.batch], Outcome.NOT_STORED, 0)

    return [mock.patch.object(Flights, "resume", anew)]


@bug("delay", first=46)
def due_times_go_by_this_machine_alone() -> list[Patch]:
    return [mock.patch.object(DueClock, "_target", lambda self, clocks: clocks[0])]


@bug("delay")
def carried_message_pends_twice() -> list[Patch]:
    def carry(book: Book, frame: Any, body: Any) -> Filed:
        records = read_batch(frame, body, batch_begin(frame.count, True), book.position(frame.subject))
        return Filed(added=state._add(book, records))

    return [mock.patch.dict(state._CHANGES, {FrameKind.CARRY: carry})]
