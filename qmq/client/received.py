"""Core. Delivered messages: the message as a consumer receives it, its decision, and the piece it was delivered in."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

from qmq.client.terms import BROKER_DELAY_S_MAX, Refused, RetryPolicy, refused, refused_for_good
from qmq.codec import (
    Content,
    counts_from,
    decode_body,
    decode_content,
    decode_envelope,
    decode_typed_properties,
    due_of,
    has_body,
)
from qmq.dead_letters import DIGITS_MAX, earlier_deliveries
from qmq.errors import ClientClosed, InvalidMessage
from qmq.message import EXPIRES_AFTER, ORDER_KEY, RETRIES_MAX, TIMES, Message, Value
from qmq.ranges import Range
from qmq.remoting.commands import Verdict

OPEN, DONE, SENT, SETTLED, NACKED = range(5)
"""States of one message: not decided; done, not yet sent; ack in flight; decision stored by the broker; nacked, waiting
or in flight.
"""

_UNSETTLED_RUN = re.compile(b"[^\3]+")

EXPIRES_DIGITS_MAX = 13
"""A hundred years in ms."""


class Acker(Protocol):
    """Session of a piece, which sends its decisions to the broker."""

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
    """Consecutive pull sequences `[begin, end)` that were delivered together; `states[i]` belongs to `begin + i`.

    `open` counts undecided messages, `unsettled` those without a confirmed decision. `is_dropped`: the
    messages returned to the group and are delivered again as other objects. `suspected`: a consumer that had them
    unacked vanished (qmq.client.listener). `may_expire`: some messages have an expiry. `is_uneven`: their numbers of
    deliveries, or their limits, differ.
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
        self.begin: int = begin
        self.end: int = begin + count
        self.times: int = times
        self.states: bytearray = bytearray(count)
        self.open: int = count
        self.unsettled: int = count
        self.acker: Acker = acker
        self.broker_group: str = broker_group
        self.is_dropped: bool = False
        self.suspected: bool = False
        self.may_expire: bool = False
        self.is_uneven: bool = False
        self._decided = decided

    def mark(self, at: int) -> None:
        """Mark the message at position `at` as done, unless it is decided."""
        if not self.states[at]:
            self.states[at] = DONE
            self.open -= 1
            if not self.open:
                self._decided.append(self)

    def refuse(self, at: int) -> bool:
        """Mark the message at position `at` as nacked; return False if it is decided."""
        if self.states[at]:
            return False
        self.states[at] = NACKED
        self.open -= 1
        if not self.open:
            self._decided.append(self)
        return True

    def done_after_all(self, at: int) -> None:
        """Mark a nacked message as done if its nack was not sent."""
        if self.states[at] == NACKED:
            self.states[at] = DONE
            if not self.open:
                self._decided.append(self)

    def settle(self, begin: int, end: int) -> None:
        """Mark the decisions on positions `[begin, end)` as stored by the broker."""
        part = self.states[begin:end]
        self.open -= part.count(OPEN)
        self.unsettled -= end - begin - part.count(SETTLED)
        self.states[begin:end] = bytes((SETTLED,)) * (end - begin)

    def unsettled_ranges(self) -> list[Range]:
        """Return the pull sequences with a decision that the broker has not confirmed, as ranges."""
        runs = (found.span() for found in _UNSETTLED_RUN.finditer(self.states))
        return [(self.begin + begin, self.begin + end) for begin, end in runs]

    def open_positions(self, end: int) -> Iterator[int]:
        """Yield the undecided positions before `end`."""
        at = self.states.find(OPEN, 0, end)
        while at >= 0:
            yield at
            at = self.states.find(OPEN, at + 1, end)


class ReceivedMessage(Message):
    """Message delivered to a consumer. Id, tags, properties and body are decoded on first access.

    `sequence` counts the messages of `source` in `broker_group`. The first call of `ack`, `nack` or `dead_letter`
    decides the message. Decisions are sent in the background, several at a time; closing waits for them. The `_nowait`
    methods may be called from any thread.

    A pickled message, for instance in a process pool, has the content and the facts of the delivery. Only the process
    that received the message can decide it.
    """

    __slots__ = ("sequence", "_data", "_piece", "_at", "_content")

    sequence: int
    _content: Content | None
    """Decoded at the first access."""
    # Declared as in Message, because __getattr__ sets them.
    properties: Mapping[str, Value]
    body: bytes | None
    content_type: str | None
    tags: frozenset[str] | tuple[()]
    id: str | None
    order_key: str | None
    retries_max: int | None
    expires_after: float | timedelta | None
    created_ms: int

    def __init__(self, subject: str, sequence: int, data: bytes, piece: UnackedPiece, at: int) -> None:
        # Message's own attributes stay unset, so that reading one ends in __getattr__, which decodes. A message costs
        # 0.4 µs before its first access, 2 µs after it.
        self.subject = subject
        self.sequence = sequence
        self._data = data
        self._piece = piece
        self._at = at
        self._content = None

    def __reduce__(self) -> tuple[Any, ...]:
        piece = self._piece
        session = piece.acker.source, piece.acker.group, piece.acker.is_mailbox
        facts = piece.times, piece.broker_group, piece.states[self._at], piece.is_dropped, piece.suspected
        delivery = self.subject, self.sequence, self._data, self.pull_sequence
        return _from_elsewhere, (*delivery, session, facts), (None, self._decoded())

    def __copy__(self) -> ReceivedMessage:
        copied = ReceivedMessage(self.subject, self.sequence, self._data, self._piece, self._at)
        for name, value in self._decoded().items():
            setattr(copied, name, value)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> ReceivedMessage:
        copied = self.__copy__()
        copied.properties = dict(copied.properties)
        return copied

    def _decoded(self) -> dict[str, Any]:
        """Return the attributes that were decoded or set."""
        found = {}
        for name in Message.__slots__:
            with suppress(AttributeError):
                found[name] = object.__getattribute__(self, name)
        return found

    @property
    def encoded(self) -> bytes:
        """The message as brokers store it (`qmq.codec`)."""
        return self._data

    @property
    def times(self) -> int:
        """Number of attempts of the group, this one included: deliveries with which a handler may have begun."""
        piece = self._piece
        return piece.times if not piece.acker.is_mailbox else piece.times + self._times_before()

    @property
    def is_suspected(self) -> bool:
        """Whether this message was unacked at a consumer that vanished. That delivery does not count in `times`."""
        return self._piece.suspected

    def _times_before(self) -> int:
        """Return the number of deliveries before the message came to the group's mailbox."""
        try:
            return earlier_deliveries(self.properties.get(TIMES, ""))
        except InvalidMessage:  # bytes of a foreign producer
            return 0

    @property
    def group(self) -> str:
        """Consumer group of the delivery; of a broadcast, the consumer's id."""
        return self._piece.acker.group

    @property
    def broker_group(self) -> str:
        return self._piece.broker_group

    @property
    def source(self) -> str:
        """Subject that stores the message: `subject`, or the group's retry subject."""
        return self._piece.acker.source

    @property
    def pull_sequence(self) -> int:
        """Number among the messages of `source` that `broker_group` delivered to this consumer."""
        return self._piece.begin + self._at

    @property
    def due_ms(self) -> int | None:
        """Due time of a delayed message, in ms since 1970 UTC, or None; raises InvalidMessage."""
        return due_of(self._data)

    @property
    def expires_ms(self) -> int | None:
        """Expiry, in ms since 1970 UTC, or None; raises InvalidMessage."""
        after_ms = _number(self.properties.get(EXPIRES_AFTER, ""), EXPIRES_DIGITS_MAX)
        return None if after_ms is None else counts_from(self._data) + after_ms

    def has_expired(self, now_ms: int) -> bool:
        """Return whether the message expired before `now_ms`, so no handler should get it."""
        try:
            expires_ms = self.expires_ms
        except InvalidMessage:  # the handler's access raises the same error
            return False
        return expires_ms is not None and expires_ms <= now_ms

    @property
    def is_dropped(self) -> bool:
        """Whether this consumer lost the message: it is delivered again, here or elsewhere, as another object."""
        return self._piece.is_dropped

    @property
    def is_decided(self) -> bool:
        """Whether the message was acked, nacked or made a dead letter."""
        return self._piece.states[self._at] != OPEN

    @property
    def is_settled(self) -> bool:
        """Whether the broker has stored the decision."""
        return self._piece.states[self._at] == SETTLED and not self._piece.is_dropped

    async def ack(self) -> None:
        """Ack this message: it is done."""
        self.ack_nowait()

    async def nack(self, reason: str = "", *, delay: float | timedelta | None = None) -> None:
        """Have this message delivered again to any consumer, after `delay` seconds or the listener's `retry_delay`.

        A delay above a day needs a delay group; without one it is a day. A message that reached its delivery limit
        becomes a dead letter instead, with `reason`.

        Raises:
            InvalidRequest: the delay is negative; it is longer than a day, for a broadcast or a dead letter; or the
                reason is no str.
        """
        self.nack_nowait(reason, delay=delay)

    async def dead_letter(self, reason: str) -> None:
        """Store this message in the group's dead-letter subject, with `reason`; it is not delivered again."""
        self.dead_letter_nowait(reason)

    def ack_nowait(self) -> None:
        """Ack this message, from any thread; see `ack`."""
        self._piece.acker.on_loop(self._done)

    def nack_nowait(self, reason: str = "", *, delay: float | timedelta | None = None) -> None:
        """Have this message delivered again, from any thread; see `nack`."""
        self._refuse(refused(self, self._piece.acker.policy, reason, delay))

    def dead_letter_nowait(self, reason: str) -> None:
        """Make this message a dead letter, from any thread; see `dead_letter`."""
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
        """Decode attributes on first access; raises InvalidMessage for bytes of another format, and MissingExtra if
        this process cannot decompress the body.
        """
        if name == "properties" and self._content is None and not has_body(self._data):
            self.properties = decode_typed_properties(self._data)
        elif name in ("properties", "content_type", "body"):
            content = self._content = self._content or decode_content(self._data)
            if name == "properties":
                self.properties = content.properties
            elif name == "content_type":
                self.content_type = content.type
            else:
                self.body = decode_body(self._data, content)
        elif name in ("id", "tags", "created_ms"):
            _, self.created_ms, _, self.id, self.tags = decode_envelope(self._data)
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


class _Elsewhere:
    """Session of pickled messages, which only the process that received them can decide."""

    def __init__(self, source: str, group: str, is_mailbox: bool) -> None:
        self.source = source
        self.group = group
        self.is_mailbox = is_mailbox

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ClientClosed("A pickled message has no session. Decide the original, in the process that received it.")


def _from_elsewhere(
    subject: str,
    sequence: int,
    data: bytes,
    pull_sequence: int,
    session: tuple[str, str, bool],
    facts: tuple[int, str, int, bool, bool],
) -> ReceivedMessage:
    """Return a message that another process received."""
    times, broker_group, state, is_dropped, suspected = facts
    piece = UnackedPiece(pull_sequence, 1, times, cast(Acker, _Elsewhere(*session)), broker_group, [])
    piece.states[0], piece.is_dropped, piece.suspected = state, is_dropped, suspected
    return ReceivedMessage(subject, sequence, data, piece, 0)


def _number(value: Value, digits_max: int) -> int | None:
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= digits_max else None
