"""Core. The master of a group of delay servers, for one reign: it takes messages, keeps them until they are due, and
sends them to the broker groups of their subjects.

    producer ── delayserver.intake ────────┐
    cancels  ── delayserver.cancelling ────┼── the log ── delayserver.filing ── schedule ── wheel
    brokers  ◄─ delayserver.dispatching ───┘                                                 │
                        ▲────────────────────────────── what is due ─────────────────────────┘

Everything that is decided about a message is a frame (delayserver.decisions). The schedule follows the frames, the
wheel follows the schedule: after a crash or a swap the next master is where this one was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from delayserver.cancelling import Cancelling, Fates, Named
from delayserver.counters import Counters
from delayserver.decisions import Decisions
from delayserver.dispatching import Dispatching, Senders
from delayserver.filing import Filing
from delayserver.intake import Intake
from delayserver.keeping import Carrying
from delayserver.loading import Loading
from delayserver.messages import Records
from delayserver.recurring import Recurring
from delayserver.schedule import DamagedSchedule, Filed
from delayserver.settings import DelaySettings
from delayserver.templates import LABEL
from delayserver.wheel import Wheel
from qmq.errors import InvalidRequest, LogError, QmqError
from qmq.remoting import commands
from qmq.remoting.commands import Cancelled, Command, DelayState
from qmq.remoting.packet import Packet
from qmq.replication.master import Appointment, Master
from qmq.replication.ports import Link

log = logging.getLogger(__name__)

DUE_AT_ONCE = 5000
"""Messages taken from the wheel in one turn."""


class DelayMaster(Master):
    """One reign. Made by the node; `counters`, `filing` and `senders` go on from one reign to the next."""

    def __init__(
        self, appointment: Appointment, settings: DelaySettings, counters: Counters, filing: Filing, senders: Senders
    ) -> None:
        super().__init__(appointment)
        reign = self._reign
        self._settings, self._filing = settings, filing
        decisions = Decisions(reign)
        self._decisions = decisions
        self._dispatching = Dispatching(
            reign, senders, decisions, counters, self._subject, self._planned, settings.unknown_ms
        )
        self._cancelling = Cancelling(reign, filing, decisions, counters)
        self._recurring = Recurring(reign, filing, decisions, counters, settings, self._dispatching.due)
        self._carrying = Carrying(reign, filing, decisions, counters, settings)
        self._intake = Intake(reign, counters, settings, lambda subject: None)
        self._handlers |= {
            Command.PRODUCE: self._intake.produce,
            Command.CANCEL: self._cancel,
            Command.RESCHEDULE: self._reschedule,
            Command.RECUR: self._recurring.request,
        }
        self._clock_is_off = False
        self._has_begun = self._has_resumed = False
        self._follow()

    def _subject(self, index: int) -> str:
        return self._filing.schedule.subjects[index]

    def _planned(self, producer: int, batch: int, records: Records) -> None:
        self._filing.schedule.planned(producer, batch, records)

    def _follow(self) -> None:
        """Begin with an empty wheel, and hear of what is filed from here on."""
        self._filing.told, self._filing.anew = self._filed, self._made_anew
        self._filing.schedule.forget_loads()
        self.wheel = Wheel()
        self._loading = Loading(
            self._filing, self.wheel, self._reign.host, self._settings, self._dispatching.expect
        )  # fmt: skip
        self._has_begun = False

    def _made_anew(self) -> None:
        self._dispatching.forget_lines()
        self._carrying.forget()
        self._recurring.forget()
        self._follow()

    def _filed(self, filed: Filed) -> None:
        if len(filed.done):
            self.wheel.remove(filed.done)
            self._dispatching.remove(filed.done)
            self._recurring.remove(filed.done["number"])
        if len(filed.added):
            self.wheel.add(filed.added)
            self._dispatching.expect(filed.added)
        for flight, _ in filed.settled:
            self._dispatching.filed(flight.subject, flight.group, (flight.producer, flight.batch))

    # Events.

    def committed(self, end: int, chain: int) -> None:
        super().committed(end, chain)
        self._reign.host.turn_soon()  # what is on our disk now is filed

    def end_of_turn(self) -> None:
        """File what is on our disk, then plan what is due; plans and answers leave with what else was written."""
        self.go_on()
        super().end_of_turn()

    def go_on(self) -> None:
        reign, filing, flushed_end = self._reign, self._filing, self._reign.log.flushed_end
        filing.go_on(flushed_end)
        self._decisions.filed(filing.schedule.filed_end)
        if not filing.reaches(flushed_end):
            if not filing.is_waiting:
                reign.host.turn_soon()
        elif reign.may_progress and (self._has_begun or self._begin(flushed_end)):
            self._send_due()

    def _begin(self, flushed_end: int) -> bool:
        """Take up what earlier reigns planned, once everything they wrote is filed."""
        if flushed_end <= self._reign.log.state.epochs[-1].offset:
            return False
        if not self._has_resumed:  # later, what the schedule does not know to be settled is ours
            for flight in list(self._filing.schedule.in_flight.values()):
                self._dispatching.resume(flight.producer, flight.batch, flight.subject, flight.group, flight.records)
        self._has_begun = self._has_resumed = True
        return True

    def _send_due(self) -> None:
        reign = self._reign
        now_ms = reign.retry_ms()
        self._loading.go_on(now_ms)
        self._carrying.go_on(reign.host.monotonic_ms())
        due = self._loading.take(now_ms, DUE_AT_ONCE)
        if len(due):
            self._due(due)
            reign.host.turn_soon()
        self._recurring.go_on(reign.host.monotonic_ms())
        self._dispatching.go_on(reign.host.monotonic_ms())

    def _due(self, records: Records) -> None:
        recurs = records["label"] == LABEL
        if recurs.any():
            self._recurring.due(records[recurs])
            records = records[~recurs]
        if len(records):
            self._dispatching.due(records)

    def beat(self) -> None:
        """Called about every 10 ms: something may be due, or rested enough."""
        self._reign.host.turn_soon()

    def tick(self, now_ms: int) -> None:
        super().tick(now_ms)
        self._watch_clock()

    def _watch_clock(self) -> None:
        """The reign's clock does not follow one that jumps; operators hear of it and decide."""
        if not self._reign.in_office:
            return
        off_ms = self.clock_off_ms
        is_off = abs(off_ms) > self._settings.clock_alarm_ms
        if is_off != self._clock_is_off:
            self._clock_is_off = is_off
            if is_off:
                log.error(
                    "clock jumped group=%s by_ms=%d: due times follow the clock from before; if the new one is right, "
                    "SwapRoles begins a reign with it", self._reign.group, off_ms,
                )  # fmt: skip
            else:
                log.warning("clock agrees again group=%s", self._reign.group)

    @property
    def clock_off_ms(self) -> int:
        """How far this machine's clock is ahead of the reign's; 0 before the reign has one."""
        reign = self._reign
        return reign.host.now_ms() - reign.retry_ms() if reign.in_office else 0

    def resign(self) -> None:
        self._filing.told = self._filing.anew = None
        self._dispatching.resign()
        self._recurring.resign()
        super().resign()
        self._cancelling.resign()

    # Requests.

    def _cancel(self, link: Link, packet: Packet) -> None:
        subject, ids, keys, due_ms = commands.decode_cancel(packet.body)

        def answer(fates: list[DelayState] | QmqError) -> None:
            if isinstance(fates, QmqError):
                link.refuse(packet, fates)
            else:
                link.answer(packet, commands.encode_cancelled(Cancelled(fates[: len(ids)], fates[len(ids) :])))

        self._cancelling.cancel(Named(subject, ids, keys, due_ms), answer)

    def _reschedule(self, link: Link, packet: Packet) -> None:
        subject, id, key, due_ms = commands.decode_reschedule(packet.body)
        self.check_due(due_ms)

        def answer(fates: list[DelayState] | QmqError) -> None:
            if isinstance(fates, QmqError):
                link.refuse(packet, fates)
            else:
                link.answer(packet, commands.encode_rescheduled(fates[0]))

        self._cancelling.reschedule(Named(subject, [id] if id else [], [key] if key else []), due_ms, answer)

    def check_due(self, due_ms: int) -> None:
        """Raise InvalidRequest for a time that lies too far ahead."""
        ahead_ms = due_ms - self._reign.retry_ms()
        if not 0 <= due_ms or ahead_ms > self._intake.longest_ms:
            raise InvalidRequest(f"due in {ahead_ms / 86_400_000:.1f} days: at most {self._settings.delay_days_max:g}")

    # For operators.

    def cancel(self, subject: str, ids: Sequence[str], keys: Sequence[str], due_ms: int, answer: Fates) -> None:
        """Cancel messages; `answer` gets what became of each, ids first, or an error."""
        self._cancelling.cancel(Named(subject, ids, keys, due_ms), answer)

    def list(
        self, begin_ms: int, end_ms: int, subject: str | None, most: int, after: tuple[int, int] | None,
        done: Callable[[Records | LogError], None],
    ) -> None:  # fmt: skip
        """List what is due in [begin_ms, end_ms), ascending by (due, number); `after` is the last one seen."""
        self._reign.check_in_office()
        schedule = self._filing.schedule

        def listed(result: Records | LogError) -> None:
            if isinstance(result, DamagedSchedule):
                self._filing.is_damaged(schedule, result)
            done(result)

        self._reign.host.read(schedule.list(begin_ms, end_ms, subject, most, after=after), listed)

    def stats(self) -> dict[str, Any]:
        """Return how much pends, is loaded, due and under way."""
        schedule, dispatching = self._filing.schedule, self._dispatching
        return {
            "pending_messages": schedule.pending_messages,
            "pending_bytes": schedule.pending_bytes,
            "loaded_messages": len(self.wheel),
            "loaded_bytes": self.wheel.bytes,
            "waiting_messages": dispatching.waiting,
            "recurring_due": self._recurring.waiting,
            "waiting": dispatching.waiting_by_subject(),
            "in_flight": dispatching.in_flight,
            "in_flight_batches": len(dispatching.open),
            "next_due_ms": self.wheel.next_due_ms,
            "clock_off_ms": self.clock_off_ms,
            "filed_end": schedule.filed_end,
        }
