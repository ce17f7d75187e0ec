"""Core. Master of a delay group, for one mastership: it stores delayed messages, and sends each to a broker group of
its subject when it is due.

    producer ── qmq.server.producing ──────┐
    cancels  ── delayserver.cancellation ──┼── the log ── delayserver.upkeep ── schedule ── wheel
    brokers  ◄─ delayserver.dispatching ───┘                                                 │
                        ▲────────────────────────────── due messages ────────────────────────┘

Every decision about a message is a frame (delayserver.decisions). The schedule follows the frames and the wheel follows
the schedule: after a crash or a swap the next master continues at the same place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qmq.client.batch import BatchSender
from qmq.codec import Buffer
from qmq.delayserver.cancellation import Cancellations, Fates, Named
from qmq.delayserver.decisions import Counters, Decisions
from qmq.delayserver.dispatching import Dispatcher
from qmq.delayserver.pending_queue import Leftovers
from qmq.delayserver.recurring import Recurring
from qmq.delayserver.schedule import DamagedSchedule, Filed
from qmq.delayserver.schedule.record import DAY_MS, DUE_MAX_MS, Records, check_delayed, order_of
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.templates import LABEL
from qmq.delayserver.upkeep import Carrier, ScheduleFiler
from qmq.delayserver.wheel import Wheel, WheelLoader
from qmq.errors import InvalidRequest, LogError, QmqError
from qmq.remoting import commands
from qmq.remoting.commands import Cancelled, Command, DelayState
from qmq.remoting.packet import Packet
from qmq.replication.clocks import DueClock
from qmq.replication.master import Master, Promotion
from qmq.replication.ports import QUIET_MS, Link
from qmq.server.producing import Producing

log = logging.getLogger(__name__)

DUE_AT_ONCE = 65_536
"""Messages taken from the wheel in one pass, 5 ms. That is many more than one pass plans, so newly due messages reach
their queues soon even behind a million others.
"""


class DelayMaster(Master):
    """One mastership. Made by the node; `counters`, `filing` and `senders` outlive it."""

    def __init__(
        self,
        promotion: Promotion,
        settings: DelaySettings,
        counters: Counters,
        filing: ScheduleFiler,
        senders: BatchSender,
    ) -> None:
        super().__init__(promotion)
        mastership = self._mastership
        self._settings = settings
        self._filing = filing
        decisions = Decisions(mastership)
        self._decisions = decisions
        self._dispatching = Dispatcher(
            mastership,
            senders,
            decisions,
            counters,
            self._subject,
            self._planned,
            settings.unknown_ms,
            partial(Leftovers, filing, mastership.host, decisions, settings.loaded_messages_max),
        )
        self._cancelling = Cancellations(mastership, filing, decisions, counters)
        self._recurring = Recurring(mastership, filing, decisions, counters, settings, self._dispatching.due)
        self._carrying = Carrier(mastership, filing, decisions, counters, settings)
        self._longest_ms = int(settings.delay_days_max * DAY_MS)
        producing = Producing(mastership, counters, check=self._check)
        self._handlers |= {
            Command.PRODUCE: producing.produce,
            Command.CANCEL: self._cancel,
            Command.RESCHEDULE: self._reschedule,
            Command.RECUR: self._recurring.request,
        }
        self._clocks = promotion.clocks
        self._due_clock = DueClock()
        self._compared_ms = -1
        self._clock_is_off = self._has_much_due = False
        self._has_begun = self._has_resumed = False
        self._follow()

    def _subject(self, index: int) -> str:
        return self._filing.schedule.subjects[index]

    def _check(self, batch: Buffer, count: int, message_bytes_max: int) -> list[tuple[int, str]]:
        """Check each message and its due time; a past time means due at once."""
        now_ms = self._mastership.retry_ms()
        return check_delayed(
            batch, count, message_bytes_max=message_bytes_max, now_ms=now_ms, longest_ms=self._longest_ms
        )

    def _planned(self, producer: int, batch: int, records: Records) -> None:
        self._filing.schedule.planned(producer, batch, records)

    def _follow(self) -> None:
        """Start with an empty wheel, and subscribe to messages filed from here on."""
        self._filing.on_filed, self._filing.on_rebuilt = self._filed, self._rebuilt
        self._filing.schedule.forget_loads()
        self.wheel = Wheel()
        self._loading = WheelLoader(
            self._filing, self.wheel, self._mastership.host, self._settings, self._dispatching.expect
        )
        self._has_begun = False

    def _rebuilt(self) -> None:
        self._dispatching.forget_queues()
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
            self._dispatching.flights.filed(flight.subject, flight.group, (flight.producer, flight.batch))

    # Events.

    def committed(self, end: int, chain: int) -> None:
        super().committed(end, chain)
        self._mastership.host.pass_soon()  # files the messages on this disk

    def end_of_pass(self) -> None:
        """File frames on this disk, then plan due messages; plans and answers leave with the other frames."""
        self.go_on()
        super().end_of_pass()

    def go_on(self) -> None:
        mastership, filing, flushed_end = self._mastership, self._filing, self._mastership.log.flushed_end
        if mastership.has_begun:
            self._compare_clocks()
        filing.go_on(flushed_end)
        self._decisions.filed(filing.schedule.filed_end)
        if not filing.reaches(flushed_end):
            if not filing.is_waiting:
                mastership.host.pass_soon()
        elif mastership.may_progress and (self._has_begun or self._begin(flushed_end)):
            self._send_due()
        if self._cancelling.looked:
            self._cancelling.go_on()

    def _begin(self, flushed_end: int) -> bool:
        """Resume plans of earlier masterships once all their frames are filed."""
        if flushed_end <= self._mastership.log.state.epochs[-1].offset:
            return False
        if not self._has_resumed:  # later, open dispatches in the schedule are of this mastership
            for batch in list(self._filing.schedule.in_flight.values()):
                self._dispatching.flights.resume(batch)
        self._has_begun = self._has_resumed = True
        return True

    def _send_due(self) -> None:
        mastership = self._mastership
        now_ms = mastership.retry_ms()
        self._loading.go_on(now_ms)
        self._carrying.go_on(mastership.host.monotonic_ms())
        due = self._loading.take(now_ms, DUE_AT_ONCE)
        if len(due):
            self._due(due)
            mastership.host.pass_soon()
        leftovers = self._dispatching.leftovers
        if len(back := leftovers.go_on(self._loading.taken_ms, all_taken=self._loading.all_taken)):
            self._dispatching.due(back)
        self._recurring.go_on(mastership.host.monotonic_ms())
        self._dispatching.go_on(mastership.host.monotonic_ms())

    def _due(self, records: Records) -> None:
        recurs = records["label"] == LABEL
        if recurs.any():
            self._recurring.due(records[recurs])
            records = records[~recurs]
        if len(records):
            self._dispatching.due(records)

    def due_in_ms(self) -> int:
        """Return for how long no pass is needed unless a packet or an answer comes in; 0: a pass is needed soon.

        It is positive only if the due clock is settled and everything is filed.
        """
        mastership, filing = self._mastership, self._filing
        is_idle = self._due_clock.is_settled and filing.reaches(mastership.log.flushed_end) and self._has_begun
        parts = (self._dispatching, self._recurring, self._carrying, self._loading)
        if not is_idle or not self.quiet_ms() or not all(part.is_idle for part in parts):
            return 0
        next_ms = self.wheel.next_due_ms
        return QUIET_MS if next_ms is None else max(0, min(QUIET_MS, next_ms - mastership.retry_ms()))

    def beat(self) -> None:
        """Start a pass, about every 10 ms or after `due_in_ms`: messages may be due, or pauses over."""
        self._mastership.host.pass_soon()

    def tick(self, now_ms: int) -> None:
        super().tick(now_ms)
        self._watch_clock()
        self._watch_due()

    def _watch_due(self) -> None:
        """Log a warning when due messages exceed the limit in memory: the rest stays on disk."""
        waiting, most = self._dispatching.waiting, self._settings.loaded_messages_max
        if not self._has_much_due and waiting > most:
            self._has_much_due = True
            log.warning(
                "due messages pile up, most on disk alone group=%s messages=%d: they become due faster than brokers "
                "store them, or brokers refuse some subjects; DelayStats names the subjects",
                self._mastership.group,
                waiting,
            )
        elif waiting < most // 2:
            self._has_much_due = False

    def _watch_clock(self) -> None:
        """Log when this machine's clock differs from the due clock, and when it agrees again."""
        if not self._mastership.has_begun:
            return
        off_ms = self.clock_off_ms
        is_off = abs(off_ms) > self._settings.clock_alarm_ms
        if is_off != self._clock_is_off:
            self._clock_is_off = is_off
            if is_off:
                log.error(
                    "clock is wrong group=%s by_ms=%d: messages come due by %s; set it right, and run a time service",
                    self._mastership.group,
                    off_ms,
                    self._due_clock.other_clocks or "unchanged",
                )
            else:
                log.warning("clock agrees again group=%s", self._mastership.group)

    def _compare_clocks(self) -> None:
        """Let the due clock follow the clocks that report (`DueClock`)."""
        host = self._mastership.host
        own_ms, monotonic_ms = host.now_ms(), host.monotonic_ms()
        if self._compared_ms == monotonic_ms:
            return
        self._compared_ms = monotonic_ms
        ahead_ms = self._clocks.ahead_ms(now_ms=own_ms, monotonic_ms=monotonic_ms) if self._clocks is not None else {}
        self._due_clock.compare(own_ms=own_ms, monotonic_ms=monotonic_ms, ahead_ms=ahead_ms)
        self._mastership.retry_begin_ms = self._due_clock.offset_ms

    @property
    def clock_off_ms(self) -> int:
        """How far this machine's clock is ahead of the due clock; 0 before the mastership has begun."""
        mastership = self._mastership
        return mastership.host.now_ms() - mastership.retry_ms() if mastership.has_begun else 0

    def step_down(self) -> None:
        self._filing.on_filed = self._filing.on_rebuilt = None
        self._dispatching.flights.step_down()
        self._recurring.step_down()
        super().step_down()
        self._cancelling.step_down()

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

        named = Named(subject, [id] if id else [], [key] if key else [])
        self._cancelling.reschedule(named, due_ms, link.ration, answer)

    def check_due(self, due_ms: int) -> None:
        """Raise InvalidRequest for a due time that is too far ahead."""
        ahead_ms = max(-DUE_MAX_MS, min(due_ms, DUE_MAX_MS)) - self._mastership.retry_ms()  # JSON has longer numbers
        if not 0 <= due_ms or ahead_ms > self._longest_ms:
            most = f"{self._settings.delay_days_max:g} (delay_days_max)"
            raise InvalidRequest(f"due in {ahead_ms / DAY_MS:.1f} days: at most {most}")

    # For operators.

    def cancel(self, subject: str, ids: Sequence[str], keys: Sequence[str], due_ms: int, answer: Fates) -> None:
        """Cancel messages; `answer` gets the fate of each, ids first, or an error."""
        self._cancelling.cancel(Named(subject, ids, keys, due_ms), answer)

    def list(
        self,
        begin_ms: int,
        end_ms: int,
        subject: str | None,
        most: int,
        after: tuple[int, int] | None,
        done: Callable[[Records | LogError], None],
    ) -> None:
        """List messages due in [begin_ms, end_ms), ascending by (due, number), after the position `after`."""
        self._mastership.check_has_begun()
        schedule = self._filing.schedule

        def listed(result: Records | LogError) -> None:
            if isinstance(result, DamagedSchedule):
                self._filing.rebuild_damaged(schedule, result)
            done(result)

        self._mastership.host.read(schedule.list(begin_ms, end_ms, subject, most, after=after), listed)

    def list_recurring(self, subject: str | None, most: int, done: Callable[[Records | LogError], None]) -> None:
        """List templates by (due, number), among them ordinary messages with their label by mistake."""
        self._mastership.check_has_begun()
        schedule = self._filing.schedule
        look = schedule.pending_labelled(subject, LABEL)

        def job() -> Records:
            records = look()
            return records.take(order_of(records["due"], records["number"])[:most])

        def listed(result: Records | LogError) -> None:
            if isinstance(result, DamagedSchedule):
                self._filing.rebuild_damaged(schedule, result)
            done(result)

        self._mastership.host.read(job, listed)

    def stats(self) -> dict[str, Any]:
        """Return counts of pending, loaded, due and in-flight messages."""
        schedule, dispatching = self._filing.schedule, self._dispatching
        overdue = dispatching.overdue(self._loading.due, self.wheel.next_due_ms)
        now_ms = self._mastership.retry_ms() if self._mastership.has_begun else 0
        return {
            "pending_messages": schedule.pending_messages,
            "pending_bytes": schedule.pending_bytes,
            "loaded_messages": len(self.wheel),
            "loaded_bytes": self.wheel.bytes,
            "waiting_messages": dispatching.waiting + self._loading.due,
            "due_on_disk_messages": dispatching.leftovers.messages,
            "recurring_due": self._recurring.waiting,
            "overdue_messages": overdue.messages,
            "overdue_ms": 0 if overdue.oldest_ms is None else max(0, now_ms - overdue.oldest_ms),
            "overdue_subjects": {
                name: (part.messages, max(0, now_ms - part.oldest_ms), dispatching.why_not(name))
                for name, part in overdue.subjects.items()
            },
            "overdue_groups": {
                name: (part.messages, max(0, now_ms - part.oldest_ms)) for name, part in overdue.groups.items()
            },
            "in_flight": dispatching.flights.in_flight,
            "in_flight_batches": len(dispatching.flights.open),
            "next_due_ms": self.wheel.next_due_ms,
            "clock_off_ms": self.clock_off_ms,
            "clocks": 1 + len(self._due_clock.other_clocks),
            "filed_end": schedule.filed_end,
        }
