"""Core. Serving of waiting pulls: the next consumer, within the budget of a pass, gets its messages.

`broker.service_queue` orders the consumers and holds the budget, `broker.choice` and `broker.filtered_scan` choose
messages, a pull frame records them, and `broker.answers` sends them once that is safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from qmq.broker.answers import AnswerSender, Counters
from qmq.broker.choice import Chosen, choose
from qmq.broker.dead_letters import DeadLetters, DeadRange
from qmq.broker.filtered_scan import Filters, Reading
from qmq.broker.labels import LabelsRead
from qmq.broker.service_queue import OWED_BYTES_MAX, TRY_BYTES, Entry, OfflineRules, Rates, ServiceQueue
from qmq.broker.subscriptions import Subscription, Subscriptions
from qmq.errors import CorruptFrame, ErrorCode, LogError
from qmq.log.frame import FrameKind
from qmq.operator_limits import OperatorLimits
from qmq.remoting.commands import Pull
from qmq.replication.mastership import Mastership
from qmq.replication.ports import Link


class Serving:
    """Serves the waiting pulls of a master. Made by the delivery; ends with the mastership."""

    def __init__(self, mastership: Mastership, counters: Counters, subscriptions: Subscriptions) -> None:
        self._mastership = mastership
        self._subscriptions = subscriptions
        self._queue = ServiceQueue()
        self._woken: dict[str, None] = {}
        """Subjects with new or requeued messages."""
        self.dead_letters = DeadLetters(mastership, counters, subscriptions, self._queue, self.wake)
        self.filters = Filters(mastership.log, lambda: subscriptions.connected, self._queue)
        self._answers = AnswerSender(mastership, counters, self._queue, self.writable_again)
        self._offline = OfflineRules()
        self.rates = Rates()

    def wake(self, subject: str) -> None:
        """Mark a subject that got new or requeued messages: waiting pulls are served at the end of the pass."""
        self._woken[subject] = None

    def serve_all(self) -> None:
        """Serve every waiting pull again."""
        self.enqueue(self._subscriptions.all_waiting())

    def writable_again(self, link: Link) -> None:
        """Serve the pulls of a connection that accepts answers again."""
        self.enqueue(self._subscriptions.waiting_at(link))

    def limit(self, limits: dict[tuple[str, str], OperatorLimits], offline: Iterable[tuple[str, str, str]]) -> None:
        """Replace operators' rates and the list of switched-off consumers, then serve the others."""
        self.rates.limit(limits, self._mastership.host.monotonic_ms())
        self._offline = OfflineRules(offline)
        self.serve_all()

    def enqueue(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._queue.add(entry)
        self._mastership.host.pass_soon()

    def run_pass(self) -> None:
        """Serve waiting pulls at the end of a pass of the loop, within its budget."""
        queue, tired = self._queue, self.filters.tired
        has_more_letters = queue.copies_left <= 0
        queue.begin()
        if has_more_letters:
            self.dead_letters.go_on()
        woken, self._woken = self._woken | tired, {}
        tired.clear()
        for subject in woken:
            for key in self._subscriptions.groups_waiting_on(subject):
                queue.add(key)
        while (entry := queue.next()) is not None:
            if self._take_turn(entry):
                queue.add(entry)
        if not queue.is_over:
            self._mastership.host.pass_soon()

    def _take_turn(self, entry: Entry) -> bool:
        """Serve one pull; return whether there may be more for the same group or consumer."""
        if isinstance(entry, Subscription):
            return self._serve_or_answer(entry)
        for subscription in self._subscriptions.waiting_in(*entry):
            if self._serve(subscription):
                # Otherwise each message would try 199 of 200 consumers of a group in vain.
                return self._may_have_more(*entry)
        return False

    def _may_have_more(self, subject: str, name: str) -> bool:
        state = self._mastership.log.state
        group = state.groups[subject, name]
        return bool(group.requeued) or group.position < state.next_sequence[subject]

    def offer(self, subscription: Subscription) -> None:
        """Serve a subscription now, or in a later pass if this one has spent its budget."""
        while self._queue.has_time:
            if not self._serve_or_answer(subscription):
                return
        self.enqueue([subscription])

    def _serve_or_answer(self, subscription: Subscription) -> bool:
        """Serve a subscription; if there is nothing for it, answer its pulls that do not wait."""
        if self._serve(subscription):
            return True
        if self.filters.is_looking(subscription):
            return False
        for waiting in [waiting for waiting in subscription.waiting if not waiting.pull.timeout_ms]:
            self._subscriptions.give_up(subscription, waiting)
            waiting.link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        return False

    def _serve(self, subscription: Subscription) -> bool:
        """Answer the oldest waiting pull if there are messages for it; return whether there were."""
        if not subscription.waiting or not self._mastership.may_progress or subscription.key in self._offline:
            return False
        if subscription.exclusive_ms and not self._subscriptions.has_its_turn(subscription, self.is_offline):
            return False
        key = subscription.key[:2]
        while (pull := self._next_pull(subscription)) is not None:
            if (allowed := self.rates.allows(key, self._mastership.host.monotonic_ms())) is not None:
                if not allowed:
                    return False
                pull = pull._replace(messages_max=min(pull.messages_max, allowed))
            chosen = self._choose(subscription, pull)
            if chosen is None:
                return False
            self._write_down(subscription, chosen)
            if chosen.parts:
                self.rates.spend(key, sum(part.end - part.begin for part in chosen.parts))
                self._answers.begin(subscription, self._subscriptions.take_waiting(subscription), chosen)
                return True
        return False

    def _next_pull(self, subscription: Subscription) -> Pull | None:
        """Return the oldest pull that may be answered. Overdue pulls get NO_MESSAGE first, and cost no message."""
        link, now_ms = subscription.link, self._mastership.host.monotonic_ms()
        while subscription.waiting and link.writable and link.owed_bytes < OWED_BYTES_MAX:
            waiting = subscription.waiting[0]
            if not waiting.pull.timeout_ms or waiting.deadline_ms > now_ms:
                return waiting.pull
            self._subscriptions.take_waiting(subscription)
            link.answer(waiting.packet, code=ErrorCode.NO_MESSAGE)
        return None

    def _choose(self, subscription: Subscription, pull: Pull) -> Chosen | None:
        mastership = self._mastership
        self._queue.spend(TRY_BYTES)
        limit = mastership.gate.high_watermark if mastership.gate.too_few_in_sync else mastership.log.end
        now_ms, single = mastership.retry_ms(), None
        if self.filters.concerns(subscription):
            single = partial(self.filters.choose, subscription, now_ms)
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
        if self.filters.tired:
            self._mastership.host.pass_soon()
        for reading in self.filters.take_readings():
            self._mastership.host.read(reading.job, partial(self._was_read, reading))

    def _was_read(self, reading: Reading, found: LabelsRead | LogError) -> None:
        self.filters.was_read(reading, found)
        if isinstance(found, CorruptFrame):  # or retention deleted it; waiting pulls are served soon in either case
            self._mastership.found_damage(found)
        elif isinstance(found, LogError):
            raise found
        else:
            self.enqueue(self._subscriptions.waiting_in(reading.subject, reading.group))

    def _write_down(self, subscription: Subscription, chosen: Chosen) -> None:
        mastership = self._mastership
        if chosen.entries:
            if self.filters.asks_for_others(subscription):
                # Otherwise the log would not show why a redelivery was skipped.
                mastership.append_progress(FrameKind.PULL, subscription.key, [])
            mastership.append_progress(FrameKind.PULL, subscription.key, chosen.entries)
            self.filters.delivered(subscription)
        if chosen.gone:  # else each returning consumer would search for them and count them again
            mastership.append_progress(FrameKind.ACK, subscription.key, [(begin, end, 0) for begin, end in chosen.gone])
        if chosen.skipped:
            self._subscriptions.note_skipped(subscription.subject, subscription.group, chosen.skipped)
        subscription.resend = max([subscription.resend, *chosen.pull_ends])
        if chosen.dead:
            self.make_dead(subscription, chosen.dead)

    def make_dead(self, subscription: Subscription, dead: list[tuple[int, int]]) -> None:
        """Make dead letters of messages above the delivery limit. They were delivered for that alone, and not sent."""
        self.dead_letters.make_dead(subscription.key, [DeadRange(*range_, False) for range_ in dead], None, None)

    def is_offline(self, subscription: Subscription) -> bool:
        return subscription.key in self._offline
