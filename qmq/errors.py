"""Core. Tree of errors: the class determines the next step of the caller.

QmqError
├── CallError             fix the call; repeating it changes nothing
│   ├── InvalidName           subject, consumer group or consumer id
│   ├── InvalidMessage        message that cannot be encoded or stored as it is
│   │   └── MessageTooLarge
│   ├── InvalidRequest        packet or argument that does not parse
│   ├── InvalidAck            range that was not delivered to this consumer
│   ├── UnknownSubscription   subscribe first (again, after a reconnect)
│   ├── SubscriptionReplaced  another connection uses this consumer id
│   └── ClientClosed          the producer or consumer is not open: open a new one
├── AccessError           get a valid token, then reconnect
│   └── MissingRight          the token is valid and lacks a right: get one that has it
├── AskAnotherBroker      nothing was stored; another broker group may take it
│   ├── BrokerReadOnly        with its reasons
│   ├── NotMaster             the route is old: fetch it again
│   └── Overloaded            or wait, then ask this broker again
├── OutcomeUnknown        maybe stored: repeat the same batch to the same group
│   └── NoAnswer              maybe handled: repeat the request if it may be handled twice
├── NotServed             temporary: wait, the client retries by itself
│   ├── NoRoute               the metaserver has no broker group for the subject
│   ├── SubjectFull           a consumer group's lag is above an operator's limit
│   ├── PostponesTooMuch      the broker's limit of delayed retries of a consumer group is reached
│   └── QueueFull             the producer's own queue: nothing was queued, retry later
├── RolledBack            a message's transaction was rolled back: nothing was written or sent
├── RetryLater            raised by a handler: deliver the message again later
├── DeadLetter            raised by a handler: do not deliver it again, store it for operators
│   └── InvalidPayload        the body does not validate: the message becomes a dead letter at once
├── UnreadablePayload     a codec or key is missing here: register it; the message stays in its group
│   └── MissingExtra          install the library named in the text; the message is unchanged
├── OperatorError         an operator's action was refused; nothing changed
├── IllegalTransition     bug of qmq: a table of states lacks the transition; the part ends, not its process
└── LogError              this copy of a log needs repair, or its process must end
    ├── CorruptFrame          fetch the range from the other broker
    │   └── ForeignSegment        the same; its frames are whole, and of another history
    ├── DiskFailed            fence and end the process; never retry that descriptor
    ├── Diverged              the other copy differs: stop, call the operator
    ├── CopyRolledBack        this copy lacks acknowledged frames: start the other one, which refills it
    ├── Fenced                a newer epoch has begun
    └── BrokenInvariant       bug of qmq: stop before it does harm
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any


class ErrorCode(IntEnum):
    """Response codes of packets: QMQ's below 100, qmq's from 300."""

    SUCCESS = 0
    UNKNOWN_COMMAND = 3
    NO_MESSAGE = 4
    BROKER_ERROR = 51
    NOT_MASTER = 52
    INVALID_REQUEST = 53
    INVALID_NAME = 301
    INVALID_MESSAGE = 302
    MESSAGE_TOO_LARGE = 303
    INVALID_ACK = 304
    UNKNOWN_SUBSCRIPTION = 305
    SUBSCRIPTION_REPLACED = 306
    UNAUTHORIZED = 310
    MISSING_RIGHT = 311
    READ_ONLY = 320
    OVERLOADED = 321
    SUBJECT_FULL = 322
    POSTPONES_TOO_MUCH = 323
    OUTCOME_UNKNOWN = 330
    NOT_SERVED = 331
    NO_ROUTE = 332
    REFUSED = 340
    CORRUPT = 350
    DISK_FAILED = 351
    DIVERGED = 352
    FENCED = 353
    BROKEN_INVARIANT = 354
    ILLEGAL_TRANSITION = 355
    ROLLED_BACK = 356


class QmqError(Exception):
    """Root of all errors of qmq.

    `code` goes on the wire; `retryable` is set if the same call may succeed later. In the process that raised it,
    `limit` is the setting of a limit that was reached, and `limited_subject` the subject of an operator's limit.
    """

    code: ErrorCode = ErrorCode.BROKER_ERROR
    retryable: bool = False
    limit: str = ""
    limited_subject: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without `__init__`, which takes more arguments than the text. Errors must leave process
        pools.
        """
        return _restored, (type(self), self.args, self.__dict__)


def _restored(cls: type[QmqError], args: tuple[Any, ...], fields: dict[str, Any]) -> QmqError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


class CallError(QmqError):
    """The call is not valid; repeating it changes nothing."""

    code = ErrorCode.INVALID_REQUEST


class InvalidName(CallError):
    """A subject, consumer group or consumer id breaks the rules of `qmq.subjects`."""

    code = ErrorCode.INVALID_NAME


class InvalidMessage(CallError):
    """A message cannot be encoded or stored as it is. Other messages of its batch are not affected."""

    code = ErrorCode.INVALID_MESSAGE


class MessageTooLarge(InvalidMessage):
    """A message is above the broker's limit. Split it, or raise `message_bytes_max` on the brokers."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class InvalidRequest(CallError):
    """A packet or an argument does not parse."""


class InvalidAck(CallError):
    """An acked range was not delivered to this consumer. Nothing changed."""

    code = ErrorCode.INVALID_ACK


class UnknownSubscription(CallError):
    """This connection has no such subscription. Subscribe first; after a reconnect, again."""

    code = ErrorCode.UNKNOWN_SUBSCRIPTION


class SubscriptionReplaced(CallError):
    """A newer connection subscribed with the same consumer id. Give each consumer an id of its own."""

    code = ErrorCode.SUBSCRIPTION_REPLACED


class ClientClosed(CallError):
    """The producer or consumer is closed, or was never opened. Open a new one."""


class AccessError(QmqError):
    """The token is missing or not valid. Get a valid one, then reconnect."""

    code = ErrorCode.UNAUTHORIZED


class MissingRight(AccessError):
    """The token is valid, but its role or scope does not allow this. Get a token with the right in the text."""

    code = ErrorCode.MISSING_RIGHT


class AskAnotherBroker(QmqError):
    """Nothing was stored here; another broker group may take it."""

    retryable = True


class BrokerReadOnly(AskAnotherBroker):
    """The broker group is readonly."""

    code = ErrorCode.READ_ONLY


class NotMaster(AskAnotherBroker):
    """This broker is not the master of its group. Fetch the route again."""

    code = ErrorCode.NOT_MASTER


class Overloaded(AskAnotherBroker):
    """A limit of the broker is reached. Wait, or send to another group."""

    code = ErrorCode.OVERLOADED

    def __init__(self, reason: str, limit: str = "") -> None:
        super().__init__(reason)
        self.limit = limit


class OutcomeUnknown(QmqError):
    """The batch may or may not be stored. Repeat the same batch to the same group: it is stored once."""

    code = ErrorCode.OUTCOME_UNKNOWN
    retryable = True


class NoAnswer(OutcomeUnknown):
    """A request got no answer in time. It may have been handled: repeat it if it may be handled twice."""


class NotServed(QmqError):
    """The request cannot be served now. Wait and retry."""

    code = ErrorCode.NOT_SERVED
    retryable = True


class NoRoute(NotServed):
    """The metaserver has no broker group for the subject now."""

    code = ErrorCode.NO_ROUTE


class SubjectFull(NotServed):
    """A consumer group's lag on the subject is above an operator's limit. Nothing was stored; send again when the lag
    is lower.
    """

    code = ErrorCode.SUBJECT_FULL

    def __init__(self, reason: str, limit: str = "", subject: str = "") -> None:
        super().__init__(reason)
        self.limit = limit
        self.limited_subject = subject


class PostponesTooMuch(NotServed):
    """The broker's limit of delayed retries of a consumer group is reached. Use a delay group, or retry."""

    code = ErrorCode.POSTPONES_TOO_MUCH


class QueueFull(NotServed):
    """The producer's own queue is full; the message was not queued. Wait for receipts, then send it again."""


class OperatorError(QmqError):
    """An operator's action was refused, for the reason in the text. Nothing changed."""

    code = ErrorCode.REFUSED


class IllegalTransition(QmqError):
    """Bug of qmq: a state's table has no transition for an event (qmq.states). Nothing changed. End the session, link
    or mastership concerned; the process continues.
    """

    code = ErrorCode.ILLEGAL_TRANSITION


class LogError(QmqError):
    """A copy of a message log needs repair, or its process must end."""


class CorruptFrame(LogError):
    """Bytes of a log do not form a frame. This copy is damaged; fetch the range from the other broker."""

    code = ErrorCode.CORRUPT

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"no frame at offset {offset}: {reason}")
        self.offset = offset
        self.reason = reason


class NewerFormat(CorruptFrame):
    """A newer version wrote this part of a data directory. Nothing was changed: start that version again."""

    def __init__(self, offset: int, part: str) -> None:
        super().__init__(
            offset,
            f"{part} is unknown to this version; nothing was changed. Start the newer version that wrote it; to return "
            "to this one, move the data directory aside and let the broker be seeded",
        )


class ForeignSegment(CorruptFrame):
    """A closed segment is whole but does not join its neighbours: its file was replaced or restored. Fetch the range
    `[offset, end)` from the other broker.
    """

    def __init__(self, base: int, end: int) -> None:
        super().__init__(base, f"the segment up to {end} is whole, and of another history")
        self.end = end


class DiskFailed(LogError):
    """A write or fsync failed. The process ends as fenced; that descriptor must not be used again."""

    code = ErrorCode.DISK_FAILED


class Diverged(LogError):
    """Two copies differ where they must be equal. The link is closed, the group is readonly: call the operator."""

    code = ErrorCode.DIVERGED


class CopyRolledBack(LogError):
    """A copy lacks acknowledged frames: its disk was restored, or lost fsynced data. It is refilled from the other copy
    and is no master until then.
    """

    code = ErrorCode.ROLLED_BACK


class Fenced(LogError):
    """A newer epoch has begun; this broker must not act in its own epoch any more."""

    code = ErrorCode.FENCED


class BrokenInvariant(LogError):
    """A bug of qmq was stopped before it did harm."""

    code = ErrorCode.BROKEN_INVARIANT


class RolledBack(QmqError):
    """The transaction of a message was rolled back. Nothing was written or sent."""


class RetryLater(QmqError):
    """Raised by a handler: deliver this message again, after `delay_s` seconds or at `at`. It is not a failure.

    Args:
        delay_s: seconds from now, or a timedelta. More than a day needs a delay group (docs/consuming.md).
        at: a datetime with its time zone, instead of the delay.
    """

    def __init__(self, delay_s: float | timedelta | None = None, *, at: datetime | None = None) -> None:
        if isinstance(delay_s, timedelta):
            delay_s = delay_s.total_seconds()
        if (delay_s is None) == (at is None):
            raise InvalidRequest("RetryLater takes one of delay_s and at")
        if at is not None and at.tzinfo is None:
            raise InvalidRequest(f"{at} has no time zone: write .astimezone() if it is local time")
        if delay_s is not None and not delay_s >= 0:
            raise InvalidRequest(f"a delay is 0 s or more, not {delay_s}")
        # The plus turns a member of an enumeration into a plain number.
        super().__init__(f"retry in {+delay_s} s" if delay_s is not None else f"retry at {at and at.isoformat()}")
        self.delay_s = delay_s
        self.at = at


class DeadLetter(QmqError):
    """Raised by a handler: a retry is of no use. The message becomes a dead letter with this reason."""


class InvalidPayload(DeadLetter):
    """The body of a message does not validate; the text names the field and the reason. A retry is of no use."""


class UnreadablePayload(QmqError):
    """This process cannot decode the body: a codec, a key or a library is missing. A listener keeps the message in its
    group, without counting an attempt, until a consumer can decode it.
    """


class MissingExtra(UnreadablePayload):
    """An optional library of qmq is not installed here. Install the extra named in the text, then retry."""


def cause_of(error: BaseException) -> str:
    """Return the text of an error, also if it has none, such as a TimeoutError, or only wraps another error."""
    if isinstance(inner := getattr(error, "reason", None), BaseException):
        return cause_of(inner)  # urllib's error, whose own text is "<urlopen error …>"
    if text := str(error).strip():
        is_pair = len(error.args) == 2 and text == str(error.args)  # MariaDB's error: (2003, "Can't connect")
        return f"{error.args[1]} ({error.args[0]})" if is_pair else text
    return "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__


def require(condition: bool, invariant: str) -> None:
    """Raise BrokenInvariant unless `condition` holds. Not an `assert`, because `python -O` must not remove it."""
    if not condition:
        raise BrokenInvariant(invariant)


def _by_code(error: type[QmqError]) -> dict[ErrorCode, type[QmqError]]:
    table = {error.code: error}
    for child in error.__subclasses__():
        for code, cls in _by_code(child).items():
            table.setdefault(code, cls)
    return table


_CLASSES = _by_code(QmqError)


def from_code(code: int, text: str) -> QmqError:
    """Return the error that a packet's response code and text stand for."""
    cls = _CLASSES.get(ErrorCode(code), QmqError) if code in ErrorCode._value2member_map_ else QmqError
    return _restored(cls, (text or f"response code {code}",), {})
