"""Core. Consumers' requests and departures, which become frames of progress; `broker.serving` answers their pulls.

Keeps I9.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from qmq.broker import group_status, positions
from qmq.broker.answers import Counters
from qmq.broker.choice import UNACKED_MESSAGES_MAX
from qmq.broker.dead_letters import DeadRange
from qmq.broker.group_status import Backlogs, Key
from qmq.broker.labels import TagRule
from qmq.broker.positions import Ask, Begin, GroupBegins
from qmq.broker.serving import Serving
from qmq.broker.settings import BrokerSettings
from qmq.broker.subject_limits import SubjectLimits
from qmq.broker.subscriptions import Subscription, Subscriptions, WaitingPull, read_terms
from qmq.dead_letters import PRUNER
from qmq.errors import (
    CorruptFrame,
    ErrorCode,
    InvalidRequest,
    NotServed,
    OperatorError,
    PostponesTooMuch,
    QmqError,
)
from qmq.log.frame import FrameKind
from qmq.log.group import Consumer, Group
from qmq.log.progress_frame import EXPIRED, NOT_BEGUN, Entry
from qmq.operator_limits import OperatorLimits, by_key
from qmq.plain import first_of
from qmq.rations import Ration
from qmq.remoting import commands
from qmq.remoting.commands import RANGES_MAX, Verdict
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import Answer
from qmq.replication.clocks import Clocks
from qmq.replication.mastership import Mastership
from qmq.replication.ports import Link
from qmq.subjects import is_dead_letter_subject, real_subject, retry_subject

FORGET_EVERY_MS = 60_000
RECORD_AFTER_MS = 86_400_000
"""Age of a group's newest departure at which its connected consumers are written to the log."""
RECORDED_AT_ONCE = 1_000
GONE_AFTER_MS = 3_600_000
"""Age of a mastership at which consumers that did not come back count as gone."""


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
        self.beginning = GroupBegins(mastership.log, ask)
        self.serving = Serving(mastership, counters, self.consumption)
        self.pruning = SubjectLimits(mastership, clocks, self.serving.dead_letters, self.serving.wake)
        mastership.before_progress = self._changing
        mastership.at_begin = self._begin_mastership
        self._forgot_ms = 0
        self._makers: dict[Key, Ration] = {}
        """Rations that count the groups begun in this mastership."""
        self._began_ms = mastership.host.monotonic_ms()
        self.causes = group_status.Causes(self._facts)
        self.backlogs = Backlogs(mastership, settings.metrics_subjects)

    def _begin_mastership(self) -> None:
        self._began_ms = self._mastership.host.monotonic_ms()
        self.consumption.begin_mastership(self._began_ms)
        self.pruning.begin_mastership()

    # Requests.

    def subscribe(self, link: Link, packet: Packet) -> None:
        """Subscribe a consumer. A group without a position here begins; its SUBSCRIBE may wait for the metaserver."""
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
        self.serving.filters.joined(subscription)
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
            self.serving.make_dead(subscription, dead)  # the former master did not get to it
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
            worn_out=True,
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
            self._makers[subject, group] = link.ration

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
            raise NotServed("this copy is damaged and is being repaired; repeat the request") from None

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
        self.serving.offer(subscription)

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
                self.serving.offer(subscription)
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
        dead: list[DeadRange] = []
        expired: list[tuple[int, int]] = []
        for begin, end, delay_ms, verdict in nack.entries:
            held = consumer.unacked_in(begin, end)
            if verdict == Verdict.DEAD_LETTER:
                dead += [DeadRange(*span, True) for span in held]
            elif verdict == Verdict.WORN_OUT:
                dead += [DeadRange(*span, False) for span in held]
            elif verdict == Verdict.EXPIRED:
                expired += held
            else:
                due_ms = NOT_BEGUN if verdict == Verdict.NOT_BEGUN else now_ms + delay_ms if delay_ms else 0
                later += [(*span, due_ms) for span in held]
        if any(due_ms not in (0, NOT_BEGUN) for _, _, due_ms in later):
            self._check_may_postpone(subscription)
        if self.pruning.expired_die(subscription.subject):
            dead += [DeadRange(*span, False) for span in expired]
        if dead:
            self._check_may_make_dead(subscription)
        if expired:
            self._settle_expired(subscription, expired)
        if later:
            mastership.append_progress(FrameKind.NACK, subscription.key, later)
            for _, _, due_ms in later:
                self.consumption.note_due(subscription.subject, subscription.group, due_ms)
            self.serving.wake(subscription.subject)

        def answer(error: QmqError | None) -> None:
            if error is not None:
                link.refuse(packet, error)
                return
            self.serving.offer(subscription)
            mastership.answer_when_safe(link, packet, commands.encode_acked(self._consumer(subscription).acked_end))

        self.serving.dead_letters.make_dead(subscription.key, dead, nack.reason, answer)

    def _settle_expired(self, subscription: Subscription, expired: list[tuple[int, int]]) -> None:
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
            self.serving.is_offline,
            may_progress,
            not gate.too_few_in_sync,
            self.serving.rates.is_slowed(key, mastership.host.monotonic_ms()),
            all(
                subscription.exclusive_ms and not self.consumption.has_its_turn(subscription, self.serving.is_offline)
                for subscription in connected
            ),
            any(map(self.serving.filters.is_looking, connected)),
            subject in state.ordered,
            state.next_sequence.get(subject, 0) - group.position,
            len(group.requeued.due(mastership.retry_ms(), 1)) if may_progress else 0,
        )

    def _check_may_make_dead(self, subscription: Subscription) -> None:
        if is_dead_letter_subject(subscription.subject):
            raise InvalidRequest("a dead letter cannot become one again; ack it or retry it")
        if self._mastership.gate.too_few_in_sync:
            raise NotServed(
                f"the slave of {self._mastership.group} is missing; no new message is stored until it returns"
            )

    def _consumer(self, subscription: Subscription) -> Consumer:
        return self.consumption.consumer(*subscription.key) or Consumer()

    def _changing(self, kind: FrameKind, key: tuple[str, str, str], entries: list[Entry]) -> None:
        """Prepare for progress that is about to be written: settled messages free their order keys."""
        self.serving.filters.changing(kind, key, entries)
        if not key[2]:  # the group's own position
            self.pruning.changing(key[:2], is_known=bool(entries))
            if not entries:  # the group is forgotten
                self.backlogs.forget(key[:2])
                self.causes.forget(key[:2])
                self.consumption.skipped.pop(key[:2], None)
                self._makers.pop(key[:2], Ration()).end_group()
        if kind != FrameKind.PULL and key[0] in self._mastership.log.state.ordered:
            self.serving.wake(key[0])

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
        """Move `group` to another position of `subject`; `answer` is called once both copies have the move.

        `begin` is set if the cluster has a row of the group. A group without a position here gets one.

        Acked messages are deleted by age alone, so the slave may lack some that this copy still has. If the slave is
        promoted before the group has consumed them again, they are skipped and counted as skipped.

        Raises:
            OperatorError, NotServed, NotMaster: not possible now. Nothing changed.
        """
        mastership = self._mastership
        mastership.check_may_progress()
        known = mastership.log.state.groups.get((subject, group))
        if to == positions.To.REMOVED:
            self._check_may_be_removed(subject, group)
            known = known or Group(
                position=positions.sequences_kept(mastership.log, subject)[1]
            )  # removed before: nothing left
        if known is None and begin is not None:
            known = Group(position=self.begins_at((subject, group), begin))
        try:
            reset = positions.plan_reset(mastership.log, subject, group, known, to, value)
        except CorruptFrame as problem:
            mastership.found_damage(problem)
            raise NotServed("this copy is damaged and is being repaired; repeat the request") from None
        if mastership.gate.too_few_in_sync:
            # Consumers would act on the move at once, and a promoted slave without it would undo it.
            raise OperatorError(
                f"the slave of {mastership.group} is missing and would not get the new position: start it first"
            )
        if not dry_run:
            assert known is not None  # else it is refused
            if to == positions.To.REMOVED:
                self._remove_group(subject, group)
            else:
                entry = reset.after, int(known.is_broadcast), 0
                mastership.append_progress(FrameKind.POSITION, (subject, group, ""), [entry])
                self.consumption.move(subject, group)
            mastership.gate.stored(mastership.log.end, answer)
        return reset

    def _check_may_be_removed(self, subject: str, group: str) -> None:
        """Raise OperatorError while the group has consumers: they would begin it anew, and late acks would hit it."""
        known = self._mastership.log.state.groups
        names: set[str] = set()
        for key in _with_mailbox(subject, group):
            names |= {subscription.consumer for subscription in self.consumption.connected_to(*key)}
            if key in known and _has_consumer(known[key]):
                names |= known[key].consumers.keys() - {PRUNER}
        if names:
            raise OperatorError(
                f"consumer group {group!r} has consumers: {first_of(sorted(names), 5)}. Stop them; one that vanished "
                "leaves when its lease ends"
            )

    def _remove_group(self, subject: str, group: str) -> None:
        """Forget the group and its mailbox. Dead letters stay; they are messages of a subject of their own.

        A mailbox that has messages in the log gets a position behind them: the next group of this name must not get
        them again. `_forget_idle` forgets it when retention has deleted them.
        """
        mastership = self._mastership
        for key in reversed(_with_mailbox(subject, group)):
            known, (first, end) = mastership.log.state.groups.get(key), self._kept(key[0])
            if key[0] != subject and first < end:
                if known is None or known.unconsumed(end):
                    mastership.append_progress(FrameKind.POSITION, (*key, ""), [(end, 0, 0)])
                    self.consumption.move(*key)
            elif known is not None:
                mastership.append_progress(FrameKind.POSITION, (*key, ""), [])

    def _kept(self, subject: str) -> tuple[int, int]:
        """Return the sequences of a subject in the log. Raises NotServed: this copy is damaged there."""
        try:
            return positions.sequences_kept(self._mastership.log, subject)
        except CorruptFrame as problem:
            self._mastership.found_damage(problem)
            raise NotServed("this copy is damaged and is being repaired; repeat the request") from None

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

    def apply_operator_settings(
        self, *, limits: tuple[OperatorLimits, ...], offline: Iterable[tuple[str, str, str]]
    ) -> None:
        """Replace operators' limits and the list of switched-off consumers, then serve the others."""
        self.pruning.limit(by_key(limits))
        self.serving.dead_letters.limit(limits)
        self.serving.limit(by_key(limits), offline)

    def answer_overdue(self, now_ms: int) -> None:
        for waiting in self.consumption.overdue(now_ms, self.serving.filters.is_looking):
            waiting.link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)

    def quiet_ms(self) -> int:
        """Return for how long no pull is overdue, no lease ends, and no retry is due; see `Master.quiet_ms`."""
        mastership, now_ms = self._mastership, self._mastership.host.monotonic_ms()
        if not mastership.has_begun or self.serving.dead_letters.has_any or self.serving.filters.has_unwritten:
            return 0
        if self.serving.rates.has_dry or self.consumption.exclusive_waiting:
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
            for subject in (*self.consumption.due(retry_ms), *self.serving.filters.overdue(retry_ms)):
                self.serving.wake(subject)
            for key in self.consumption.expired(now_ms):
                self._consumer_leaves(key, begun_none=False)
            self.serving.dead_letters.go_on()
            self.pruning.tick(now_ms)
            self.serving.enqueue([*self.consumption.exclusive_waiting, *self.serving.rates.take_dry()])
            if now_ms - self._forgot_ms >= FORGET_EVERY_MS and self.pruning.clock_is_right():
                self._forgot_ms = now_ms
                self._forget_idle()
        looked_at = self.causes.look(self._mastership.log.state.groups, now_ms)
        try:
            self.backlogs.look(looked_at)
        except CorruptFrame as problem:
            self._mastership.found_damage(problem)

    def _forget_idle(self) -> None:
        """Forget broadcast consumers that stay away, which would pin the log and fill the memory (W20). Also forget the
        empty mailboxes of removed groups.

        A consumer that is connected for a day is written to the log, so its departure is, too. Thus `unused_since_ms`
        is right to a day, also for consumers without messages and after a change of masters.
        """
        mastership, recorded = self._mastership, 0
        now_ms = mastership.host.now_ms()
        oldest_ms = now_ms - int(self._settings.broadcast_forget_hours * 3_600_000)
        for (subject, name), group in list(mastership.log.state.groups.items()):
            if _has_consumer(group):
                continue
            if connected := self.consumption.connected_to(subject, name):
                if group.left_ms <= now_ms - RECORD_AFTER_MS and recorded < RECORDED_AT_ONCE:
                    mastership.append_progress(FrameKind.PULL, connected[0].key, [])
                    recorded += 1
                continue
            is_away = group.is_broadcast and group.left_ms < oldest_ms
            if is_away or self._is_removed_mailbox(subject, name):
                mastership.append_progress(FrameKind.POSITION, (subject, name, ""), [])

    def _is_removed_mailbox(self, subject: str, name: str) -> bool:
        """Return whether a subject without messages is the mailbox of a group that does not exist."""
        log, real = self._mastership.log, real_subject(subject)
        if subject == real or subject != retry_subject(real, name) or (real, name) in log.state.groups:
            return False
        with suppress(NotServed):
            first, end = self._kept(subject)
            return first == end
        return False

    def unused_since_ms(self, key: Key) -> int:
        """Return the time at which the last consumer of a group left, or the group began; 0: it has a consumer, or this
        mastership is too young for an answer.
        """
        mastership, group = self._mastership, self._mastership.log.state.groups.get(key)
        is_young = mastership.host.monotonic_ms() - self._began_ms < GONE_AFTER_MS
        if group is None or is_young or _has_consumer(group) or self.consumption.connected_to(*key):
            return 0
        return group.left_ms

    def step_down(self, error: QmqError) -> None:
        """End the mastership: refuse all waiting requests, which go to the next master."""
        self.serving.dead_letters.step_down(error)
        self.beginning.step_down(error)
        for maker in self._makers.values():
            maker.end_group()
        for subscription in self.consumption.all_waiting():
            while subscription.waiting:
                waiting = self.consumption.take_waiting(subscription)
                subscription.link.refuse(waiting.packet, error)

    def _consumer_leaves(self, key: tuple[str, str, str], *, begun_none: bool) -> None:
        """Requeue the unacked messages of a consumer that leaves (W1).

        Args:
            begun_none: the consumer reported that it had begun none of them; otherwise it vanished.
        """
        mastership = self._mastership
        mastership.append_progress(FrameKind.POSITION, key, self.consumption.departure(key, begun_none=begun_none))
        self.serving.wake(key[0])
        self._counters.returned_consumers += 1


def _with_mailbox(subject: str, group: str) -> list[Key]:
    """Return the keys of a group and of its mailbox, the subject of the messages for this group alone."""
    mailbox = [] if is_dead_letter_subject(subject) else [(retry_subject(subject, group), group)]
    return [(subject, group), *mailbox]


def _has_consumer(group: Group) -> bool:
    """Return whether a group has a consumer, connected or not: the log records both subscribing and leaving. `PRUNER`
    counts only while it has unacked messages.
    """
    return any(name != PRUNER or consumer.unacked for name, consumer in group.consumers.items())


def _entries(ranges: list[tuple[int, int]]) -> list[Entry]:
    return [(begin, end, 0) for begin, end in ranges]
