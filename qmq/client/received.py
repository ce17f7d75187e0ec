"""Core. A message as a consumer receives it, and what may be decided about it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Protocol

from qmq.client.terms import BROKER_DELAY_S_MAX, DIGITS_MAX, Refused, RetryPolicy, refused, refused_for_good
from qmq.codec import counts_from, decode_envelope, decode_properties, due_of, properties_begin
from qmq.errors import InvalidMessage
from qmq.message import EXPIRES_AFTER, ORDER_KEY, RETRIES_MAX, TIMES, Message, Value
from qmq.ranges import Range
from qmq.remoting.commands import Verdict

OPEN, DONE, SENT, SETTLED, NACKED = range(5)
"""States of one message: not decided; done, the broker does not know; the ack is on its way; the broker keeps the
decision; nacked, waits or is on its way."""

_UNSETTLED_RUN = re.compile(b"[^\3]+")

EXPIRES_DIGITS_MAX = 13
"""Of a hundred years in ms."""


class Acker(Protocol):
    """Who carries decisions to the broker: the session that a piece came from."""

    policy: RetryPolicy
    source: str
    group: str
    is_mailbox: bool

    def begin(self, piece: UnackedPiece, at: int) -> Awaitable[memoryview] | None: ...

    def done(self, piece: UnackedPiece) -> None: ...

    def nack(
        self,
        piece: UnackedPiece,
        at: int,
        *,
        delay_s: float,
        verdict: Verdict,
        reason: str,
        message: ReceivedMessage | None = None,
    ) -> None: ...

    def not_begun(self, message: ReceivedMessage) -> None: ...

    def expired(self, message: ReceivedMessage) -> None: ...

    def defer(self, message: ReceivedMessage, *, delay_s: float, reason: str) -> None: ...

    def on_loop(self, call: Callable[[], None]) -> None: ...


class UnackedPiece:
    """Consecutive pull sequences `[begin, end)` that were delivered together; `states[i]` is that of `begin + i`.

    `open` counts its messages that are not decided, `unsettled` those whose decision the broker has not confirmed.
    `is_dropped`: they were given back and come again, as other messages. `suspected`: a consumer that had
    them vanished (qmq.client.listener). `may_expire`: some of them say when they expire. `is_uneven`: they
    differ in how often they were delivered in all, or in how often they may be.
    """

    __slots__ = (
        "begin",
        "end",
        "times",
        "states",
        "open",
        "unsettled",
        "acker",
        "broker_group",
        "is_dropped",
        "suspected",
        "may_expire",
        "is_uneven",
        "_decided",
    )

    def __init__(
        self, begin: int, count: int, times: int, acker: Acker, broker_group: str, decided: list[UnackedPiece]
    ) -> None:
        self.begin = begin
        self.end = begin + count
        self.times = times
        self.states = bytearray(count)
        self.open = self.unsettled = count
        self.acker = acker
        self.broker_group = broker_group
        self.is_dropped = self.suspected = self.may_expire = self.is_uneven = False
        self._decided = decided

    def mark(self, at: int) -> None:
        """The message at position `at` is done; nothing happens if it was decided before."""
        if not self.states[at]:
            self.states[at] = DONE
            self.open -= 1
            if not self.open:
                self._decided.append(self)

    def refuse(self, at: int) -> bool:
        """The message at position `at` is nacked; returns False if it was decided before."""
        if self.states[at]:
            return False
        self.states[at] = NACKED
        self.open -= 1
        if not self.open:
            self._decided.append(self)
        return True

    def done_after_all(self, at: int) -> None:
        """The nacked message at position `at`, of which no broker was told, is done after all."""
        if self.states[at] == NACKED:
            self.states[at] = DONE
            if not self.open:
                self._decided.append(self)

    def settle(self, begin: int, end: int) -> None:
        """The broker keeps the decisions on positions `[begin, end)`."""
        part = self.states[begin:end]
        self.open -= part.count(OPEN)
        self.unsettled -= end - begin - part.count(SETTLED)
        self.states[begin:end] = bytes((SETTLED,)) * (end - begin)

    def unsettled_ranges(self) -> list[Range]:
        """Return the pull sequences whose decision the broker has not confirmed, as ranges."""
        runs = (found.span() for found in _UNSETTLED_RUN.finditer(self.states))
        return [(self.begin + begin, self.begin + end) for begin, end in runs]

    def open_positions(self, end: int) -> Iterator[int]:
        """Yield the positions before `end` that are not decided."""
        at = self.states.find(OPEN, 0, end)
        while at >= 0:
            yield at
            at = self.states.find(OPEN, at + 1, end)


class ReceivedMessage(Message):
    """A message delivered to a consumer. Its id, tags and properties are decoded when they are first looked at.

    `sequence` is its place among the messages of `source`, in `broker_group`. It is decided once, by `ack`, `nack` or
    `dead_letter`; the first counts. Decisions travel in the background, together with others; closing waits for them.
    The `_nowait` ones may be called from any thread.
    """

    __slots__ = ("sequence", "_data", "_piece", "_at")

    sequence: int

    def __init__(self, subject: str, sequence: int, data: bytes, piece: UnackedPiece, at: int) -> None:
        # Message's own attributes stay unset: reading one ends in __getattr__, which decodes. So a message costs
        # 0.4 µs until somebody looks into it, 2 µs afterwards.
        self.subject = subject
        self.sequence = sequence
        self._data = data
        self._piece = piece
        self._at = at

    @property
    def times(self) -> int:
        """How often it was delivered to its group, as far as a handler may have begun, this time included."""
        piece = self._piece
        return piece.times if not piece.acker.is_mailbox else piece.times + self._times_before()

    @property
    def is_suspected(self) -> bool:
        """Whether a consumer that vanished had it, maybe begun: that does not count in `times`."""
        return self._piece.suspected

    def _times_before(self) -> int:
        """Return how often it was delivered before it came to the group's mailbox."""
        try:
            first = _number(self.properties.get(TIMES, ""), DIGITS_MAX)
        except InvalidMessage:  # bytes that no producer of ours has made
            return 0
        return max(0, first - 1) if first is not None else 0

    @property
    def group(self) -> str:
        """The consumer group that it was delivered to; of a broadcast, the consumer's own id."""
        return self._piece.acker.group

    @property
    def broker_group(self) -> str:
        return self._piece.broker_group

    @property
    def source(self) -> str:
        """The subject that it lies in: `subject`, or the group's retry subject."""
        return self._piece.acker.source

    @property
    def pull_sequence(self) -> int:
        """Its number among those delivered to this consumer out of `source` by `broker_group`."""
        return self._piece.begin + self._at

    @property
    def due_ms(self) -> int | None:
        """When it was due, in ms since 1970 UTC, if it was sent with a delay; raises InvalidMessage."""
        return due_of(self._data)

    @property
    def expires_ms(self) -> int | None:
        """When it expires, in ms since 1970 UTC, if its producer said so; raises InvalidMessage."""
        after_ms = _number(self.properties.get(EXPIRES_AFTER, ""), EXPIRES_DIGITS_MAX)
        return None if after_ms is None else counts_from(self._data) + after_ms

    def has_expired(self, now_ms: int) -> bool:
        """Return whether no handler should get it any more."""
        try:
            expires_ms = self.expires_ms
        except InvalidMessage:  # its handler will find out
            return False
        return expires_ms is not None and expires_ms <= now_ms

    @property
    def is_dropped(self) -> bool:
        """Whether it is not this consumer's any more: it comes again, here or elsewhere, as another object."""
        return self._piece.is_dropped

    @property
    def is_decided(self) -> bool:
        """Whether it was acked, nacked or made a dead letter."""
        return self._piece.states[self._at] != OPEN

    @property
    def is_settled(self) -> bool:
        """Whether the broker keeps what was decided."""
        return self._piece.states[self._at] == SETTLED and not self._piece.is_dropped

    async def ack(self) -> None:
        """This message is done."""
        self.ack_nowait()

    async def nack(self, reason: str = "", *, delay: float | timedelta | None = None) -> None:
        """Have this message delivered again, to any consumer: after `delay` (seconds; else the listener's).

        A delay of more than a day needs a delay group; without one it is a day. If it was delivered as often as it
        may, it becomes a dead letter instead, with `reason`.

        Raises:
            InvalidRequest: the delay is negative, or it is longer than a day and this is a broadcast or a dead letter;
                the reason is no str.
        """
        self.nack_nowait(reason, delay=delay)

    async def dead_letter(self, reason: str) -> None:
        """Never hand this message over again: keep it in the group's dead-letter subject, with `reason`."""
        self.dead_letter_nowait(reason)

    def ack_nowait(self) -> None:
        """As `ack`."""
        self._piece.acker.on_loop(self._done)

    def nack_nowait(self, reason: str = "", *, delay: float | timedelta | None = None) -> None:
        """As `nack`."""
        self._refuse(refused(self, self._piece.acker.policy, reason, delay))

    def dead_letter_nowait(self, reason: str) -> None:
        """As `dead_letter`."""
        self._refuse(refused_for_good(self, self._piece.acker.policy, reason))

    def _done(self) -> None:
        piece = self._piece
        piece.mark(self._at)
        piece.acker.done(piece)

    def _refuse(self, decision: Refused) -> None:
        piece = self._piece
        verdict, delay_s, reason, _ = decision
        if delay_s > BROKER_DELAY_S_MAX:
            piece.acker.on_loop(partial(piece.acker.defer, self, delay_s=delay_s, reason=reason))
            return
        nack = partial(piece.acker.nack, delay_s=delay_s, verdict=verdict, reason=reason, message=self)
        piece.acker.on_loop(partial(nack, piece, self._at))

    def __getattr__(self, name: str) -> object:
        """Decode what was not looked at yet; raises InvalidMessage if the producer sent something else."""
        if name == "properties":
            self.properties = decode_properties(self._data, properties_begin(self._data))
        elif name in ("id", "tags", "created_ms"):
            _, self.created_ms, _, self.id, self.tags, _ = decode_envelope(self._data)
        elif name == "order_key":
            key = self.properties.get(ORDER_KEY)
            self.order_key = None if key is None else str(key)
        elif name == "retries_max":
            self.retries_max = _number(self.properties.get(RETRIES_MAX, ""), DIGITS_MAX)
        elif name == "expires_after":
            after_ms = _number(self.properties.get(EXPIRES_AFTER, ""), EXPIRES_DIGITS_MAX)
            self.expires_after = None if after_ms is None else after_ms / 1000
        else:
            raise AttributeError(f"a message has no attribute {name!r}")
        return object.__getattribute__(self, name)


def _number(value: Value, digits_max: int) -> int | None:
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= digits_max else None
