"""Core. What becomes of a message whose handler failed, or that the application refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

from qmq.dead_letters import delivered
from qmq.errors import DeadLetter, InvalidMessage, InvalidRequest, RetryLater
from qmq.message import RETRIES_MAX, Value
from qmq.plain import plain
from qmq.remoting.commands import DELAY_MS_MAX, REASON_BYTES_MAX, Verdict

BACKSTOP = 1_000
"""Delivery attempts after which a broker itself makes a dead letter of a message: one that ends each process before it
is looked at. All others are counted here, for a broker does not know the limit that a message has of its own."""
BROKER_DELAY_S_MAX = DELAY_MS_MAX / 1000
"""A longer delay is a delay server's (docs/decisions/0015)."""
DELAY_S_MAX = 36_500 * 86_400.0
"""What delay servers take at most; most are set to less, and say so."""
DIGITS_MAX = 9
"""Of a number in a message; Python reads no number of thousands of them."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a group tries a message.

    `deliveries_max` delivery attempts in all, 0 for no limit (of a dead letter, which stays where it is);
    `delay_s` between them, unless a handler says otherwise: up to `delay_s_max`.
    """

    deliveries_max: int
    delay_s: float
    delay_s_max: float = BROKER_DELAY_S_MAX

    @property
    def backstop(self) -> int:
        """The limit that SUBSCRIBE states."""
        return max(BACKSTOP, 2 * self.deliveries_max) if self.deliveries_max else 0


class Refused(NamedTuple):
    """The decision for the broker. `is_failure`: the application did not ask for it, so it is logged."""

    verdict: Verdict
    delay_s: float
    reason: str
    is_failure: bool


class Refusable(Protocol):
    """A message that may be delivered again."""

    @property
    def times(self) -> int: ...

    @property
    def properties(self) -> Mapping[str, Value]: ...


def refused_by_error(message: Refusable, policy: RetryPolicy, error: BaseException, now: datetime) -> Refused:
    """Decide after a handler raised `error` at `now`."""
    if isinstance(error, DeadLetter):
        is_plain = type(error).__str__ is BaseException.__str__ and len(error.args) == 1
        reason = error.args[0] if is_plain and isinstance(error.args[0], str) else str(error)
        return refused_for_good(message, policy, reason)
    if not isinstance(error, RetryLater):
        return refused(message, policy, text_of_error(error), None, is_failure=True)
    delay_s = error.delay_s if error.at is None else max(0.0, (error.at - now).total_seconds())
    try:
        return refused(message, policy, str(error), delay_s)
    except InvalidRequest as wrong:
        return refused(message, policy, f"{error}: {wrong}", None, is_failure=True)


def refused(
    message: Refusable, policy: RetryPolicy, reason: str, delay: float | timedelta | None, *, is_failure: bool = False
) -> Refused:
    """Decide on a message that is to come again: after `delay` (seconds), or never if its limit is reached.

    Raises:
        InvalidRequest: the delay is negative or longer than the policy's limit; the reason is no str.
    """
    reason = _check_reason(reason)
    delay_s = delay.total_seconds() if isinstance(delay, timedelta) else delay
    delay_s = policy.delay_s if delay_s is None else check_delay(delay_s, policy.delay_s_max)
    limit = _limit(message, policy)
    if limit and message.times >= limit:
        return Refused(Verdict.DEAD_LETTER, 0.0, f"{delivered(message.times)}; {reason}", True)
    return Refused(Verdict.RETRY, delay_s, reason, is_failure)


def worn_out(message: Refusable, policy: RetryPolicy) -> Refused | None:
    """Decide on a message that has just come: it was delivered as often as it may be, and each consumer was gone
    before it decided. No handler begins with it once more."""
    limit = _limit(message, policy)
    if not limit or message.times <= limit:
        return None
    return Refused(Verdict.DEAD_LETTER, 0.0, f"{delivered(limit)}, and never acked", True)


def batch_of(message: Refusable, policy: RetryPolicy, batch: int) -> int:
    """Return how many messages a call gets whose first one is `message`: `batch`, half of it after each failure, and
    one at the last attempt. So a message that fails each call it is in becomes a dead letter alone."""
    if (times := message.times) == 1:
        return batch
    limit = _limit(message, policy)
    return 1 if limit and times >= limit else max(1, batch >> times - 1)


def refused_for_good(message: Refusable, policy: RetryPolicy, reason: str) -> Refused:
    """Decide on a message that is of no use to try again. A dead letter itself has no other place to go to.

    Raises:
        InvalidRequest: the reason is no str.
    """
    reason = _check_reason(reason)
    if policy.deliveries_max:
        return Refused(Verdict.DEAD_LETTER, 0.0, reason, False)
    return Refused(Verdict.RETRY, policy.delay_s, reason, True)


def check_delay(delay_s: float, most_s: float = BROKER_DELAY_S_MAX) -> float:
    """Return a delay of 0 s up to a limit, by default what a broker takes: a day; raises InvalidRequest."""
    if not isinstance(delay_s, int | float) or not 0 <= delay_s <= most_s:
        raise InvalidRequest(f"a delay is 0 to {most_s:.0f} s, not {delay_s!r}")
    return plain(delay_s)


def _check_reason(reason: str) -> str:
    """Return a reason as a plain str, or refuse what no nack can carry: found out only when the nack is sent, it would
    be in the way of others."""
    if not isinstance(reason, str):
        raise InvalidRequest(f"a reason is a str, not {text_of_error(reason)}; write str() around it")
    return plain(reason)


def text_of_error(error: object) -> str:
    """Return an exception as a reason, however badly it was written."""
    try:
        return repr(error)[:REASON_BYTES_MAX]
    except Exception:
        return type(error).__name__


def _limit(message: Refusable, policy: RetryPolicy) -> int:
    """Return how often a message may be delivered; it may say so itself."""
    if not policy.deliveries_max:
        return 0
    try:
        own = str(message.properties.get(RETRIES_MAX, ""))
    except InvalidMessage:  # bytes that no producer of ours has made
        return policy.deliveries_max
    if own.isascii() and own.isdecimal():  # QMQ writes -1 for "not set"
        return max(1, int(own) if len(own) <= DIGITS_MAX else 10**DIGITS_MAX)
    return policy.deliveries_max
