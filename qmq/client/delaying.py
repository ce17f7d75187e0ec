"""Core. When a delayed message is due, by which key its sender may take it back, and what became of that."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple, TypedDict

from qmq.client.batching import Receipt
from qmq.codec import delayed_encoder, with_properties
from qmq.errors import CallError, InvalidRequest
from qmq.message import DELAY_KEY, Message
from qmq.plain import plain
from qmq.remoting.commands import DELAY_KEY_BYTES_MAX, DelayState

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
DUE_MS_MAX = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MS
"""The end of the year 9999. How far off a due time may be is for the delay server to say."""


class Delay(NamedTuple):
    """`due_ms` since 1970 UTC; `key`, if its sender gave one."""

    due_ms: int
    key: str | None

    @property
    def at(self) -> datetime:
        return _EPOCH + self.due_ms * _MS

    def encode(self, message: Message, now_ms: int) -> bytes:
        """Encode a message with its due time and key; raises InvalidMessage."""
        data = delayed_encoder(message.subject, now_ms, self.due_ms)(message)
        return data if self.key is None else with_properties(data, {DELAY_KEY: self.key})


class DelayArguments(TypedDict, total=False):
    """What `Producer.send` and its siblings take, for those that pass it on."""

    delay: float | timedelta | None
    at: datetime | None
    key: str | None


class DelayOutcome(StrEnum):
    """What became of the wish to take a delayed message back, or to send it at another time."""

    CANCELLED = "cancelled"
    """It is not sent. Also if an earlier call has cancelled it."""
    RESCHEDULED = "rescheduled"
    """It is due at the new time."""
    SENT = "sent"
    """Too late: it was given to a broker, or is on its way there. Nothing was changed."""
    UNKNOWN = "unknown"
    """No delay server has such a message, or it was sent or cancelled so long ago that it is forgotten."""


def delay_of(delay: float | timedelta | None, at: datetime | None, key: str | None, *, now_ms: int) -> Delay:
    """Read the arguments of a call.

    Raises:
        InvalidRequest: says which of them is wrong, and what to write instead.
    """
    due_ms = due_of_call(delay, at, now_ms=now_ms)
    return Delay(due_ms, None if key is None else check_key(key))


def due_of_call(delay: float | timedelta | None, at: datetime | None, *, now_ms: int) -> int:
    """Return when a message is due; raises InvalidRequest."""
    if (delay is None) == (at is None):
        raise InvalidRequest("a delayed message has delay= (seconds, or a timedelta) or at= (a datetime), one of them")
    if at is not None:
        return _moment(at)
    if isinstance(delay, timedelta):
        delay = delay.total_seconds()
    if not isinstance(delay, int | float) or isinstance(delay, bool) or not 0 <= delay < math.inf:
        raise InvalidRequest(f"a delay is 0 seconds or more, or a timedelta; not {delay!r}")
    if now_ms + delay * 1000 > DUE_MS_MAX:
        raise InvalidRequest(f"a delay of {delay} s ends after the year 9999")
    return now_ms + math.ceil(delay * 1000)


def _moment(at: datetime) -> int:
    if not isinstance(at, datetime):
        raise InvalidRequest(f"at is a datetime with its time zone, not {type(at).__name__}")
    if at.utcoffset() is None:
        raise InvalidRequest(
            f"at={at} has no time zone, so it names no moment: write at.astimezone() if it is this "
            "computer's local time, at.replace(tzinfo=…) if it is another, or datetime.now(UTC) + timedelta(…)"
        )
    return -((_EPOCH - at) // _MS)  # rounded up: never early


def check_key(key: str) -> str:
    """Return a key for cancelling if it is one; raises InvalidRequest."""
    if not isinstance(key, str) or not 0 < len(key.encode("utf-8", "replace")) <= DELAY_KEY_BYTES_MAX:
        raise InvalidRequest(f"a key for cancelling is a word of 1 to {DELAY_KEY_BYTES_MAX} bytes, not {key!r:.50}")
    return plain(key)


class Wanted(NamedTuple):
    """Which messages of a subject a call means: the one of an id, or those of a key; the other is "".

    `group`: the delay group that has it, "" if any may; `due_ms`: about when it is due, 0 if that is not known.
    """

    subject: str
    id: str
    key: str
    group: str = ""
    due_ms: int = 0


def wanted(receipt: Receipt | None, subject: str | None, id: str | None, key: str | None) -> Wanted:
    """Read which message is meant.

    Raises:
        InvalidRequest: the arguments name none, or more than one way; or the message was not delayed.
    """
    if receipt is not None:
        if (subject, id, key) != (None, None, None):
            raise InvalidRequest("a receipt names its message: give it alone, or subject= and id= or key=")
        if receipt.due_ms is None:
            raise InvalidRequest(f"message {receipt.message_id} was not delayed: it was sent at once")
        group = receipt.broker_group if receipt.is_stored else ""  # else some group may have it
        return Wanted(receipt.subject, receipt.message_id, "", group, receipt.due_ms)
    if not subject or bool(id) == bool(key):
        raise InvalidRequest("give the receipt, or subject= and one of id= and key=")
    return Wanted(plain(subject), plain(id) or "", check_key(key) if key else "")


_BEST = (DelayState.RESCHEDULED, DelayState.CANCELLED, DelayState.SENT, DelayState.UNKNOWN)
"""What one group did counts more than what another one does not know."""


def outcome_of(one: Wanted, states: Iterable[DelayState], silent: Iterable[Exception]) -> DelayOutcome:
    """Join what delay groups answered, and the errors of those that did not.

    Raises:
        CallError: what a group refused for good.
        Exception: a group that may have the message gave no answer; its error says why.
    """
    errors = list(silent)
    best = min(states, key=_BEST.index, default=DelayState.UNKNOWN)
    if errors and (not one.id or best is DelayState.UNKNOWN):  # of an id there is one message, of a key maybe many
        raise next((error for error in errors if isinstance(error, CallError)), errors[0])
    return DelayOutcome(best.value)
