"""Core. Delivery to consumers: subscriptions, pulls and acks become frames of progress, then answers.

`broker.choice` decides which messages a pull gets; `broker.answers` sends them once that is safe.

Keeps I9.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from qmq.broker import group_status, positions
from qmq.broker.answers import AnswerSender, Counters
from qmq.broker.choice import UNACKED_MESSAGES_MAX, Chosen, choose
from qmq.broker.dead_letters import DeadLetters
from qmq.broker.filtered_scan import Filters, Reading
from qmq.broker.group_status import Backlogs
from qmq.broker.labels import LabelsRead, TagRule
from qmq.broker.positions import Ask, Begin, GroupBegins, Key
from qmq.broker.service_queue import OWED_BYTES_MAX, TRY_BYTES, OfflineRules, Rates, ServiceQueue
from qmq.broker.settings import BrokerSettings
from qmq.broker.subject_limits import SubjectLimits
from qmq.broker.subscriptions import Subscription, Subscriptions, WaitingPull, read_terms
from qmq.dead_letters import PRUNER, delivered
from qmq.errors import (
    CorruptFrame,
    ErrorCode,
    InvalidRequest,
    LogError,
    NotServed,
    OperatorError,
    PostponesTooMuch,
    QmqError,
)
from qmq.log.frame import FrameKind
from qmq.log.group import Consumer, Group
from qmq.log.progress_frame import EXPIRED, NOT_BEGUN, Entry
from qmq.operator_limits import OperatorLimits, by_key
from qmq.remoting import commands
from qmq.remoting.commands import RANGES_MAX, Pull, Verdict
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import Answer
from qmq.replication.clocks import Clocks
from qmq.replication.mastership import Mastership
from qmq.replication.ports import Link
from qmq.subjects import is_dead_letter_subject, real_subject, retry_subject

FORGET_EVERY_MS = 60_000
log = logging.getLogger(__name__)


class Delivery:
    """Consumer side of a master. Made by the master; ends with the mastership."""

    def __init__(
        self,
        mastership: Mastership,
        settings: BrokerSettings,
        counters: Counters,
        clocks: Clocks,
        ask: Ask | None = None,
    ) -> None:
        self._mastership = mastership
        self._settings = settings
        self._counters = counters
        self.consumption = Subscriptions(
            mastership.log, lease_ms=settings.lease_ms, now_ms=mastership.host.monotonic_ms()
        )
        self._passes = ServiceQueue()
        self.beginning = GroupBegins(mastership.log, ask)
        self._dead_letters = DeadLetters(mastership, counters, self.consumption, self._passes, self.wake)
        self.pruning = SubjectLimits(mastership, clocks, self._dead_letters, self.wake)
        self._filtering = Filters(mastership.log, lambda: self.consumption.connected, self._passes)
        mastership.before_progress, mastership.at_begin = self._changing, self._begin_mastership
        self._woken: dict[str, None] = {}
        self._sending = AnswerSender(mastership, counters, self._passes, self.writable_again)
        self._offline = OfflineRules()
        self._rates = Rates()
        self._forgot_ms = 0
        self.causes = group_status.Causes(self._facts)
        self.backlogs = Backlogs(mastership, settings.metrics_subjects)

    def _begin_mastership(self) -> None:
        self.consumption.begin_mastership(self._mastership.host.monotonic_ms())
        self.pruning.begin_mastership()

    # Requests.

    def subscribe(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        mastership.check_may_progress()
        f = read_terms(packet)
        subject, group, consumer = key = f["subject"], f["group"], f["consumer"]
        position, began_ms = None, 0
        # With `held_end` a group without a position is refused below, and does not begin.
        if key[:2] not in mastership.log.state.groups and not f["held_end"]:
            if self.beginning.is_first(key[:2]):
                self._check_may_begin(link, subject, group)
            if (begin := self.beginning.answer_for(f, link, packet)) is None:
                return
            position, began_ms = self.begins_at(key[:2], begin), begin.began_ms
        subscription = self.consumption.subscribe(
            link,
            subject=subject,
            group=group,
            consumer=consumer,
            held_end=f["held_end"],
            now_ms=mastership.host.monotonic_ms(),
            deliveries_max=f["deliveries_max"],
            begins=f["begins"],
            rule=TagRule.of(f["tags"], is_all=f["tag_mode"] == "all"),
            exclusive_ms=f["exclusive_ms"],
        )
        self._filtering.joined(subscription)
        known = self.consumption.consumer(*subscription.key)
        if position is not None:
            # The position of a new group is written at once: a restart would move it otherwise (W8).
            self.beginning.begun(key[:2])
            entry = position, int(f["broadcast"]), began_ms
            mastership.append_progress(FrameKind.POSITION, (subject, group, ""), [entry])
        elif known is not None and known.unacked and f["is_new"] and not f["held_end"]:
            # A new process uses an old consumer id. The messages that the old one had begun count as delivered;
            # otherwise a message that kills every process would never become a dead letter.
            self._consumer_leaves(subscription.key, begun_none=False)
            known = None
        elif known is not None and (dead := known.delivered_more_than(subscription.deliveries_max)):
            self._make_dead(subscription, dead)  # the former master did not get to it
        self.consumption.note_reporting(subscription)
        joined = mastership.log.state.groups[subject, group]
        if joined.is_broadcast and consumer not in joined.consumers:
            # Records the consumer, so that its absence is noticed even if no message came for it.
            mastership.append_progress(FrameKind.PULL, subscription.key, [])
        unacked = known.unacked_below(f["held_end"], subscription.deliveries_max) if known else []
        answer = commands.encode_json(
            subscription=subscription.id,
            acked_end=known.acked_end if known else 0,
            unacked=unacked[:RANGES_MAX],
            lease_ms=self._settings.lease_ms,
            begins=True,
            expires=True,
        )
        mastership.answer_when_safe(link, packet, answer)

    def _check_may_begin(self, link: Link, subject: str, group: str) -> None:
        """Count a new group against its token's ration: it stays in the log and in memory. The group's own retry
        subject is free. Raises Overloaded: the ration is used up.
        """
        real = real_subject(subject)
        is_own_retry = subject != real and subject == retry_subject(real, group)
        if not (is_own_retry and (real, group) in self._mastership.log.state.groups):
            link.ration.begin_group()

    def begins_at(self, key: Key, begin: Begin) -> int:
        """Return where a group without a position begins. Raises NotServed: this copy is damaged there."""
        log, (subject, _) = self._mastership.log, key
        if (noted := self.beginning.noted(begin, key)) is not None:
            return noted
        try:
            first, _ = positions.sequences_kept(log, subject)
            return positions.first_since(log, subject, begin.since_ms) if begin.since_ms else first
        except CorruptFrame as problem:
            self._mastership.found_damage(problem)
            raise NotServed("this copy is damaged there and is being repaired; repeat the request") from None

    def pull(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        mastership.check_may_progress()
        pull = commands.decode_pull(packet.body)
        if not pull.messages_max:
            raise InvalidRequest("messages_max of a pull is 0; request at least one message")
        now_ms = mastership.host.monotonic_ms()
        subscription = self.consumption.find(link, pull.subscription, now_ms)
        waiting = WaitingPull(link, packet, pull, now_ms + pull.timeout_ms)
        self.consumption.wait(subscription, waiting, now_ms)
        self._offer(subscription)

    def ack(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        mastership.check_may_progress()
        ack = commands.decode_ack(packet.body)
        subscription = self.consumption.find(link, ack.subscription, mastership.host.monotonic_ms())
        consumer = self._consumer(subscription)
        held = [span for begin, end in ack.ranges for span in consumer.unacked_in(begin, end)]
        was_full = consumer.has_as_many_as(UNACKED_MESSAGES_MAX)
        if held:
            mastership.append_progress(FrameKind.ACK, subscription.key, _entries(held))
            self._counters.acked_messages += sum(end - begin for begin, end in held)
            if was_full:  # else its pulls do not wait for acks
                self._offer(subscription)
        mastership.answer_when_safe(link, packet, commands.encode_acked(consumer.acked_end))

    def nack(self, link: Link, packet: Packet) -> None:
        """Requeue messages or make dead letters of them; the answer follows when that is done."""
        mastership = self._mastership
        mastership.check_may_progress()
        nack = commands.decode_nack(packet.body)
        subscription = self.consumption.find(link, nack.subscription, mastership.host.monotonic_ms())
        consumer = self._consumer(subscription)
        now_ms = mastership.retry_ms()
        later: list[Entry] = []
        dead: list[tuple[int, int]] = []
        expired: list[tuple[int, int]] = []
        for begin, end, delay_ms, verdict in nack.entries:
            held = consumer.unacked_in(begin, end)
            if verdict == Verdict.DEAD_LETTER:
                dead += held
            elif verdict == Verdict.EXPIRED:
                expired += held
            else:
                due_ms = NOT_BEGUN if verdict == Verdict.NOT_BEGUN else now_ms + delay_ms if delay_ms else 0
                later += [(*span, due_ms) for span in held]
        if any(due_ms not in (0, NOT_BEGUN) for _, _, due_ms in later):
            self._check_may_postpone(subscription)
        if self.pruning.expired_die(subscription.subject):
            dead += expired
        if dead:
            self._check_may_make_dead(subscription)
        if expired:
            self._over_unhandled(subscription, expired)
        if later:
            mastership.append_progress(FrameKind.NACK, subscription.key, later)
            self._counters.nacked_messages += sum(end - begin for begin, end, _ in later)
            for _, _, due_ms in later:
                self.consumption.note_due(subscription.subject, subscription.group, due_ms)
            self.wake(subscription.subject)

        def answer(error: QmqError | None) -> None:
            if error is not None:
                link.refuse(packet, error)
                return
            self._offer(subscription)
            mastership.answer_when_safe(link, packet, commands.encode_acked(self._consumer(subscription).acked_end))

        self._dead_letters.make_dead(subscription.key, dead, nack.reason, answer)

    def _over_unhandled(self, subscription: Subscription, expired: list[tuple[int, int]]) -> None:
        """Settle messages that a consumer found expired, unless they become dead letters."""
        self.pruning.note_expired(subscription.key[:2], sum(end - begin for begin, end in expired))
        if not self.pruning.expired_die(subscription.subject):
            entries = [(begin, end, EXPIRED) for begin, end in expired]
            self._mastership.append_progress(FrameKind.ACK, subscription.key, entries)

    def begin(self, link: Link, packet: Packet) -> None:
        """Note which messages a consumer begins with. This is not stored: after a swap at that moment one attempt is
        missing from the count.
        """
        begun = commands.decode_ack(packet.body)
        subscription = self.consumption.find(link, begun.subscription, self._mastership.host.monotonic_ms())
        consumer = self._consumer(subscription)
        for begin, end in begun.ranges:
            consumer.check_given(begin, end)
        self.consumption.begin(subscription, begun.ranges)
        link.answer(packet)

    def _check_may_postpone(self, subscription: Subscription) -> None:
        """Raise PostponesTooMuch at the limit of requeued ranges. The client then uses a delay group, or keeps the
        messages.
        """
        key = subscription.key[:2]
        if len(self._mastership.log.state.groups[key].requeued) >= group_status.REQUEUED_RANGES_MAX:
            raise PostponesTooMuch(
                f"{key[1]} has {group_status.REQUEUED_RANGES_MAX} postponed ranges of {key[0]}; repeat later"
            )

    def _facts(self, key: tuple[str, str]) -> group_status.Facts | None:
        """Return the facts from which the causes of a group follow, or None if the group does not exist."""
        mastership, (subject, name) = self._mastership, key
        state, gate = mastership.log.state, mastership.gate
        if (group := state.groups.get(key)) is None:
            return None
        connected = self.consumption.connected_to(subject, name)
        may_progress = mastership.may_progress
        return group_status.Facts(
            group,
            connected,
            self._is_offline,
            may_progress,
            not gate.too_few_in_sync,
            self._rates.is_slowed(key, mastership.host.monotonic_ms()),
            all(
                subscription.exclusive_ms and not self.consumption.has_its_turn(subscription, self._is_offline)
                for subscription in connected
            ),
            any(map(self._filtering.is_looking, connected)),
            subject in state.ordered,
            state.next_sequence.get(subject, 0) - group.position,
            len(group.requeued.due(mastership.retry_ms(), 1)) if may_progress else 0,
        )

    def _is_offline(self, subscription: Subscription) -> bool:
        return subscription.key in self._offline

    def _check_may_make_dead(self, subscription: Subscription) -> None:
        if is_dead_letter_subject(subscription.subject):
            raise InvalidRequest("a dead letter cannot become one again; ack it or retry it")
        if self._mastership.gate.too_few_in_sync:
            raise NotServed(f"the slave of {self._mastership.group} is missing; nothing new is stored until it is back")

    def _consumer(self, subscription: Subscription) -> Consumer:
        return self.consumption.consumer(*subscription.key) or Consumer()

    def _changing(self, kind: FrameKind, key: tuple[str, str, str], entries: list[Entry]) -> None:
        """Prepare for progress that is about to be written: settled messages free their order keys."""
        self._filtering.changing(kind, key, entries)
        if not key[2]:  # the group's own position
            self.pruning.changing(key[:2], is_known=bool(entries))
            if not entries:  # the group is forgotten
                self.backlogs.forget(key[:2])
                self.causes.forget(key[:2])
                self.consumption.skipped.pop(key[:2], None)
        if kind != FrameKind.PULL and key[0] in self._mastership.log.state.ordered:
            self.wake(key[0])

    def move_group(
        self,
        subject: str,
        group: str,
        to: str,
        value: int,
        *,
        dry_run: bool,
        answer: Answer,
        begin: Begin | None = None,
    ) -> positions.Reset:
        """Move `group` to another position of `subject`; `answer` is called once both copies have that.

        `begin` is set if the cluster knows the group. A group without a position here gets one.

        Retention deletes messages that the group had acked by age alone. The slave may have deleted some that this copy
        still has; if it is promoted before the group has consumed them, they are skipped and counted as skipped.

        Raises:
            OperatorError, NotServed, NotMaster: not possible now. Nothing changed.
        """
        mastership = self._mastership
        mastership.check_may_progress()
        known = mastership.log.state.groups.get((subject, group))
        if known is None and begin is not None:
            known = Group(position=self.begins_at((subject, group), begin))
        try:
            reset = positions.plan_reset(mastership.log, subject, group, known, to, value)
        except CorruptFrame as problem:
            mastership.found_damage(problem)
            raise NotServed("this copy is damaged there and is being repaired; repeat the request") from None
        if mastership.gate.too_few_in_sync:
            # Consumers would act on the move at once, and a promoted slave without it would undo it.
            raise OperatorError(
                f"the slave of {mastership.group} is missing and would not get the move: start it first"
            )
        if not dry_run:
            assert known is not None  # else it is refused
            entry = reset.after, int(known.is_broadcast), 0
            mastership.append_progress(FrameKind.POSITION, (subject, group, ""), [entry])
            self.consumption.move(subject, group)
            mastership.gate.stored(mastership.log.end, answer)
        return reset

    def heartbeat(self, link: Link, packet: Packet) -> None:
        self.consumption.heartbeat(link, self._mastership.host.monotonic_ms())
        link.answer(packet)

    def unsubscribe(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        mastership.check_may_progress()
        f = commands.decode_json(packet.body, subscription=int)
        subscription = self.consumption.find(link, f["subscription"], mastership.host.monotonic_ms())
        for waiting in subscription.waiting:
            link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        self.consumption.forget(subscription)
        self.consumption.left(*subscription.key)
        if subscription.consumer in mastership.log.state.groups[subscription.subject, subscription.group].consumers:
            self._consumer_leaves(subscription.key, begun_none=True)
            mastership.answer_when_safe(link, packet, b"")
        else:
            link.answer(packet)

    # Events.

    def wake(self, subject: str) -> None:
        """Mark a subject that got new or requeued messages: waiting pulls are served at the end of the pass."""
        self._woken[subject] = None

    def serve_all(self) -> None:
        """Serve every waiting pull again."""
        self._line_up(self.consumption.all_waiting())

    def writable_again(self, link: Link) -> None:
        """Serve the pulls of a connection that accepts answers again."""
        self._line_up(self.consumption.waiting_at(link))

    def _line_up(self, entries: Iterable[Subscription | tuple[str, str]]) -> None:
        for entry in entries:
            self._passes.add(entry)
        self._mastership.host.pass_soon()

    def run_pass(self) -> None:
        """Serve waiting pulls at the end of a pass of the loop, within its budget."""
        passes, tired = self._passes, self._filtering.tired
        has_more_letters = passes.copies_left <= 0
        passes.begin()
        if has_more_letters:
            self._dead_letters.go_on()
        woken, self._woken = self._woken | tired, {}
        tired.clear()
        for subject in woken:
            for key in self.consumption.groups_waiting_on(subject):
                passes.add(key)
        while (entry := passes.next()) is not None:
            if self._take_turn(entry):
                passes.add(entry)
        if not passes.is_over:
            self._mastership.host.pass_soon()

    def _take_turn(self, entry: Subscription | tuple[str, str]) -> bool:
        """Serve one pull; return whether there may be more for the same group or consumer."""
        if isinstance(entry, Subscription):
            return self._serve_or_answer(entry)
        for subscription in self.consumption.waiting_in(*entry):
            if self._serve(subscription):
                # Otherwise each message would try 199 of 200 consumers of a group in vain.
                return self._may_have_more(*entry)
        return False

    def _may_have_more(self, subject: str, name: str) -> bool:
        state = self._mastership.log.state
        group = state.groups[subject, name]
        return bool(group.requeued) or group.position < state.next_sequence[subject]

    def apply_operator_settings(
        self, *, limits: tuple[OperatorLimits, ...], offline: Iterable[tuple[str, str, str]]
    ) -> None:
        """Replace operators' limits and the list of switched-off consumers, then serve the others."""
        self.pruning.limit(by_key(limits))
        self._dead_letters.limit(limits)
        self._rates.limit(by_key(limits), self._mastership.host.monotonic_ms())
        self._offline = OfflineRules(offline)
        self.serve_all()

    def answer_overdue(self, now_ms: int) -> None:
        for waiting in self.consumption.overdue(now_ms, self._filtering.is_looking):
            waiting.link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)

    def quiet_ms(self) -> int:
        """See `Master.quiet_ms`: until then no pull is overdue, no lease ends, and no retry is due."""
        mastership, now_ms = self._mastership, self._mastership.host.monotonic_ms()
        if not mastership.has_begun or self._dead_letters.has_any or self._filtering.has_unwritten:
            return 0
        if self._rates.has_dry or self.consumption.exclusive_waiting:
            return 0
        if len(mastership.log.state.groups) > group_status.LOOKED_AT_ONCE:  # each tick looks at some
            return 0
        due_in_ms = self.consumption.due_in_ms(mastership.retry_ms())
        return min(self.consumption.quiet_ms(now_ms), due_in_ms, self.pruning.due_in_ms(now_ms))

    def tick(self, now_ms: int) -> None:
        """Handle due retries, expired leases and forgotten broadcasts. `now_ms` never jumps."""
        self.consumption.ticked(now_ms)
        if self._mastership.may_progress:
            retry_ms = self._mastership.retry_ms()
            for subject in (*self.consumption.due(retry_ms), *self._filtering.overdue(retry_ms)):
                self.wake(subject)
            for key in self.consumption.expired(now_ms):
                self._consumer_leaves(key, begun_none=False)
            self._dead_letters.go_on()
            self.pruning.tick(now_ms)
            self._line_up([*self.consumption.exclusive_waiting, *self._rates.take_dry()])
            if now_ms - self._forgot_ms >= FORGET_EVERY_MS and self.pruning.clock_is_right():
                self._forgot_ms = now_ms
                self._forget_broadcasts()
        looked_at = self.causes.look(self._mastership.log.state.groups, now_ms)
        try:
            self.backlogs.look(looked_at)
        except CorruptFrame as problem:
            self._mastership.found_damage(problem)

    def _forget_broadcasts(self) -> None:
        """Forget broadcast consumers that stay away: they would pin the log and fill the memory (W20)."""
        mastership = self._mastership
        oldest_ms = mastership.host.now_ms() - int(self._settings.broadcast_forget_hours * 3_600_000)
        for (subject, name), group in list(mastership.log.state.groups.items()):
            if group.is_broadcast and group.left_ms < oldest_ms and not _is_held(group):
                mastership.append_progress(FrameKind.POSITION, (subject, name, ""), [])

    def step_down(self, error: QmqError) -> None:
        """End the mastership: refuse all waiting requests, which go to the next master."""
        self._dead_letters.step_down(error)
        self.beginning.step_down(error)
        for subscription in self.consumption.all_waiting():
            while subscription.waiting:
                waiting = self.consumption.take_waiting(subscription)
                subscription.link.refuse(waiting.packet, error)

    # Serving.

    def _offer(self, subscription: Subscription) -> None:
        """Serve a subscription now, or in a later pass if this one has spent its budget."""
        while self._passes.has_time:
            if not self._serve_or_answer(subscription):
                return
        self._line_up([subscription])

    def _serve_or_answer(self, subscription: Subscription) -> bool:
        """Serve a subscription; if there is nothing for it, answer its pulls that do not wait."""
        if self._serve(subscription):
            return True
        if self._filtering.is_looking(subscription):
            return False
        for waiting in [waiting for waiting in subscription.waiting if not waiting.pull.timeout_ms]:
            self.consumption.give_up(subscription, waiting)
            waiting.link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        return False

    def _serve(self, subscription: Subscription) -> bool:
        """Answer the oldest waiting pull if there are messages for it; return whether there were."""
        if not subscription.waiting or not self._mastership.may_progress or subscription.key in self._offline:
            return False
        if subscription.exclusive_ms and not self.consumption.has_its_turn(subscription, self._is_offline):
            return False
        key = subscription.key[:2]
        while (pull := self._next_pull(subscription)) is not None:
            if (allowed := self._rates.allows(key, self._mastership.host.monotonic_ms())) is not None:
                if not allowed:
                    return False
                pull = pull._replace(messages_max=min(pull.messages_max, allowed))
            chosen = self._choose(subscription, pull)
            if chosen is None:
                return False
            self._write_down(subscription, chosen)
            if chosen.parts:
                self._rates.spend(key, sum(part.end - part.begin for part in chosen.parts))
                self._sending.begin(subscription, self.consumption.take_waiting(subscription), chosen)
                return True
        return False

    def _next_pull(self, subscription: Subscription) -> Pull | None:
        """Return the oldest pull that may be answered. Overdue pulls get NO_MESSAGE first, and cost no message."""
        link, now_ms = subscription.link, self._mastership.host.monotonic_ms()
        while subscription.waiting and link.writable and link.owed_bytes < OWED_BYTES_MAX:
            waiting = subscription.waiting[0]
            if not waiting.pull.timeout_ms or waiting.deadline_ms > now_ms:
                return waiting.pull
            self.consumption.take_waiting(subscription)
            link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        return None

    def _choose(self, subscription: Subscription, pull: Pull) -> Chosen | None:
        mastership = self._mastership
        self._passes.spend(TRY_BYTES)
        limit = mastership.gate.high_watermark if mastership.gate.too_few_in_sync else mastership.log.end
        now_ms, single = mastership.retry_ms(), None
        if self._filtering.concerns(subscription):
            single = partial(self._filtering.choose, subscription, now_ms)
        try:
            return choose(mastership.log, subscription, pull, data_limit=limit, now_ms=now_ms, single=single)
        except CorruptFrame as problem:  # an index is rebuilt, and its segment is damaged
            mastership.found_damage(problem)
            return None
        finally:
            if single is not None:
                self._read_on()

    def _read_on(self) -> None:
        """Start the readings that filtered pulls wait for."""
        if self._filtering.tired:
            self._mastership.host.pass_soon()
        for reading in self._filtering.take_readings():
            self._mastership.host.read(reading.job, partial(self._was_read, reading))

    def _was_read(self, reading: Reading, found: LabelsRead | LogError) -> None:
        self._filtering.was_read(reading, found)
        if isinstance(found, CorruptFrame):  # or retention deleted it; waiting pulls are served soon in either case
            self._mastership.found_damage(found)
        elif isinstance(found, LogError):
            raise found
        else:
            self._line_up(self.consumption.waiting_in(reading.subject, reading.group))

    def _write_down(self, subscription: Subscription, chosen: Chosen) -> None:
        mastership = self._mastership
        if chosen.entries:
            if self._filtering.asks_for_others(subscription):
                # Otherwise the log would not show why a redelivery was skipped.
                mastership.append_progress(FrameKind.PULL, subscription.key, [])
            mastership.append_progress(FrameKind.PULL, subscription.key, chosen.entries)
            self._filtering.delivered(subscription)
        if chosen.gone:  # else each returning consumer would search for them and count them again
            mastership.append_progress(FrameKind.ACK, subscription.key, _entries(chosen.gone))
        if chosen.skipped:
            self.consumption.note_skipped(subscription.subject, subscription.group, chosen.skipped)
        subscription.resend = max([subscription.resend, *chosen.pull_ends])
        if chosen.dead:
            self._make_dead(subscription, chosen.dead)

    def _make_dead(self, subscription: Subscription, dead: list[tuple[int, int]]) -> None:
        reason = f"{delivered(subscription.deliveries_max)}, and never acked"
        self._dead_letters.make_dead(subscription.key, dead, reason, None)

    def _consumer_leaves(self, key: tuple[str, str, str], *, begun_none: bool) -> None:
        """Requeue the unacked messages of a consumer that leaves (W1).

        Args:
            begun_none: the consumer reported that it had begun none of them; otherwise it vanished.
        """
        mastership = self._mastership
        mastership.append_progress(FrameKind.POSITION, key, self.consumption.departure(key, begun_none=begun_none))
        self.wake(key[0])
        self._counters.returned_consumers += 1


def _is_held(group: Group) -> bool:
    """Return whether a broadcast group has a consumer: subscribing and leaving are both written. The pruner counts only
    while it has unacked messages.
    """
    return any(name != PRUNER or consumer.unacked for name, consumer in group.consumers.items())


def _entries(ranges: list[tuple[int, int]]) -> list[Entry]:
    return [(begin, end, 0) for begin, end in ranges]
