"""Core. The error tree: a class tells its catcher what to do next.

QmqError
├── CallError             fix the call; repeating it changes nothing
│   ├── InvalidName           subject, consumer group or consumer id
│   ├── InvalidMessage        message that cannot be encoded or stored as it is
│   │   └── MessageTooLarge
│   ├── InvalidRequest        packet or argument that does not parse
│   ├── InvalidAck            range that was not handed to this consumer
│   ├── UnknownSubscription   subscribe first (again, after a reconnect)
│   ├── SubscriptionReplaced  another connection uses this consumer id
│   └── ClientClosed          the producer or consumer is not open: open a new one
├── AccessError           get a valid token, then reconnect
│   └── MissingRight          the token is valid, but not for this: get one that is
├── AskAnotherBroker      nothing was stored; another broker group may take it
│   ├── BrokerReadOnly        with its reasons
│   ├── NotMaster             the route is old: fetch it again
│   └── Overloaded            or wait, then ask this one again
├── OutcomeUnknown        maybe stored: repeat the same batch to the same group
│   └── NoAnswer              maybe handled: send the request again if it may be handled twice
├── NotServed             nobody can serve this now: wait, the client retries by itself
│   ├── NoRoute               the metaserver knows no broker group for the subject
│   ├── SubjectFull           a consumer group is so far behind that an operator's limit refuses more
│   ├── PostponesTooMuch      a broker keeps no more messages of a consumer group that wait for their time
│   └── QueueFull             the producer's own queue: nothing was taken, send again later
├── RolledBack            a message's transaction was rolled back: nothing was written or sent
├── RetryLater            raised by a handler: hand the message over again later
├── DeadLetter            raised by a handler: never hand it over again, keep it for people to look at
├── OperatorError         an operator's action was refused; nothing changed
├── IllegalTransition     our own bug: the part whose table of states lacks the move ends, not its process
└── LogError              this copy of a log needs repair, or its process must end
    ├── CorruptFrame          fetch the range from the other broker
    │   └── ForeignSegment        the same; its frames are whole, and of another history
    ├── DiskFailed            fence and end the process; never retry that descriptor
    ├── Diverged              the other copy differs: stop, call the operator
    ├── CopyRolledBack        this copy lacks what was acknowledged: start the other one, which refills it
    ├── Fenced                a newer epoch has begun
    └── BrokenInvariant       our own bug: stop before it spreads
"""

from __future__ import annotations

from datetime import datetime
from enum import IntEnum


class ErrorCode(IntEnum):
    """Response codes of packets. Below 100: QMQ's own; from 300: ours."""

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
    """Root of all errors of qmq. `code` goes on the wire; `retryable` says whether the same call may succeed later.
    `limit` is the setting of which the bound was reached, if one was, and `limited_subject` the subject if it is an
    operator's limit of one; only its own process has them."""

    code: ErrorCode = ErrorCode.BROKER_ERROR
    retryable: bool = False
    limit: str = ""
    limited_subject: str = ""


class CallError(QmqError):
    """The call is wrong; repeating it changes nothing."""

    code = ErrorCode.INVALID_REQUEST


class InvalidName(CallError):
    """A subject, consumer group or consumer id breaks the rules of `qmq.subjects`."""

    code = ErrorCode.INVALID_NAME


class InvalidMessage(CallError):
    """A message cannot be encoded or stored as it is. Its batch-mates are not affected."""

    code = ErrorCode.INVALID_MESSAGE


class MessageTooLarge(InvalidMessage):
    """A message is larger than the broker takes. Split it, or raise `message_bytes_max` on the brokers."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class InvalidRequest(CallError):
    """A packet or an argument does not parse."""


class InvalidAck(CallError):
    """A range was acked that was not handed to this consumer. Nothing changed."""

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
    """The token is valid, but its role or scope does not allow this. Get a token that has the right it names."""

    code = ErrorCode.MISSING_RIGHT


class AskAnotherBroker(QmqError):
    """Nothing was stored here; another broker group may take it."""

    retryable = True


class BrokerReadOnly(AskAnotherBroker):
    """The broker group takes no new messages now."""

    code = ErrorCode.READ_ONLY


class NotMaster(AskAnotherBroker):
    """This broker is not the master of its group. Fetch the route again."""

    code = ErrorCode.NOT_MASTER


class Overloaded(AskAnotherBroker):
    """A limit of the broker is reached. Wait, or ask another group."""

    code = ErrorCode.OVERLOADED

    def __init__(self, reason: str, limit: str = "") -> None:
        super().__init__(reason)
        self.limit = limit


class OutcomeUnknown(QmqError):
    """The batch may or may not be stored. Repeat the same batch to the same group: it is stored once."""

    code, retryable = ErrorCode.OUTCOME_UNKNOWN, True


class NoAnswer(OutcomeUnknown):
    """Nobody answered a request in time. It may have been handled: ask again if it may be handled twice."""


class NotServed(QmqError):
    """Nobody can serve this now. Wait and try again."""

    code, retryable = ErrorCode.NOT_SERVED, True


class NoRoute(NotServed):
    """The metaserver knows no broker group that serves the subject now."""

    code = ErrorCode.NO_ROUTE


class SubjectFull(NotServed):
    """A consumer group has not consumed as many messages of the subject as an operator allows. Nothing was stored; send
    again when it has caught up."""

    code = ErrorCode.SUBJECT_FULL

    def __init__(self, reason: str, limit: str = "", subject: str = "") -> None:
        super().__init__(reason)
        self.limit = limit
        self.limited_subject = subject


class PostponesTooMuch(NotServed):
    """A broker keeps no more messages of a consumer group that wait for their time. A delay group may keep this one; or
    ask again."""

    code = ErrorCode.POSTPONES_TOO_MUCH


class QueueFull(NotServed):
    """The producer's own queue is full; the message was not taken. Wait for receipts, then send it again."""


class OperatorError(QmqError):
    """An operator's action was refused, for the reason it names. Nothing changed."""

    code = ErrorCode.REFUSED


class IllegalTransition(QmqError):
    """Something happened in a state that does not know it (qmq.states): our own bug. Nothing was changed by it. End
    the session, link or mastership that it happened to; the process goes on."""

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


class ForeignSegment(CorruptFrame):
    """A closed segment is whole, and does not join the log before it or behind it: its file was exchanged, or put back.
    What this copy should have there, `[offset, end)`, is fetched from the other broker."""

    def __init__(self, base: int, end: int) -> None:
        super().__init__(base, f"the segment up to {end} is whole, and of another history")
        self.end = end


class DiskFailed(LogError):
    """A write or fsync failed. The process ends as fenced; nobody retries on that descriptor."""

    code = ErrorCode.DISK_FAILED


class Diverged(LogError):
    """Two copies differ where they must be equal. The link is closed, the group is readonly: call the operator."""

    code = ErrorCode.DIVERGED


class CopyRolledBack(LogError):
    """A copy lacks what was acknowledged: its disk was put back, or forgot what it had fsynced. It is refilled from the
    other copy; until then it is no master."""

    code = ErrorCode.ROLLED_BACK


class Fenced(LogError):
    """A newer epoch has begun; this broker must not act in its own any more."""

    code = ErrorCode.FENCED


class BrokenInvariant(LogError):
    """Our own bug was about to do harm; it was stopped."""

    code = ErrorCode.BROKEN_INVARIANT


class RolledBack(QmqError):
    """The transaction that a message belongs to was rolled back. Nothing was written or sent."""


class RetryLater(QmqError):
    """Raised by a handler: hand me this message again, after `delay_s` seconds or at `at`. Nothing failed.

    Args:
        delay_s: seconds from now. More than a day needs a delay group (docs/consuming.md).
        at: a datetime with its time zone, instead of the delay.
    """

    def __init__(self, delay_s: float | None = None, *, at: datetime | None = None) -> None:
        if (delay_s is None) == (at is None):
            raise InvalidRequest("RetryLater takes delay_s or at, one of them")
        if at is not None and at.tzinfo is None:
            raise InvalidRequest(f"{at} has no time zone: nobody can tell when that is")
        if delay_s is not None and not delay_s >= 0:
            raise InvalidRequest(f"a delay is 0 s or more, not {delay_s}")
        # The plus makes a plain number of one of an enumeration.
        super().__init__(f"retry in {+delay_s} s" if delay_s is not None else f"retry at {at and at.isoformat()}")
        self.delay_s = delay_s
        self.at = at


class DeadLetter(QmqError):
    """Raised by a handler: trying this message again is of no use. It becomes a dead letter, with this reason."""


def cause_of(error: BaseException) -> str:
    """Say why, also of an error that has no text of its own, such as a TimeoutError, or only wraps another one."""
    if isinstance(inner := getattr(error, "reason", None), BaseException):
        return cause_of(inner)  # urllib's: its own text is "<urlopen error …>"
    if text := str(error).strip():
        is_pair = len(error.args) == 2 and text == str(error.args)  # MariaDB's: (2003, "Can't connect")
        return f"{error.args[1]} ({error.args[0]})" if is_pair else text
    return "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__


def require(condition: bool, invariant: str) -> None:
    """Stop before our own bug does harm. Not an `assert`: `python -O` must not remove it."""
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
    """Turn a packet's response code and text back into the error that was raised at the other end."""
    cls = _CLASSES.get(ErrorCode(code), QmqError) if code in ErrorCode._value2member_map_ else QmqError
    error = cls.__new__(cls)
    Exception.__init__(error, text or f"response code {code}")
    return error
