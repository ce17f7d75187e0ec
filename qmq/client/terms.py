"""Core. Terms of a subscription, checked as a whole, and its retry policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol

from qmq.codec import TAGS_MAX
from qmq.dead_letters import DIGITS_MAX, delivered
from qmq.errors import DeadLetter, InvalidMessage, InvalidRequest, RetryLater
from qmq.message import RETRIES_MAX, Value
from qmq.plain import plain
from qmq.remoting.commands import DELAY_MS_MAX, REASON_BYTES_MAX, Verdict
from qmq.subjects import check_name, check_subject, is_dead_letter_subject, parse_derived, retry_subject

CONCURRENCY_MAX = 10_000
BATCH_MAX = 10_000
"""Messages in one call of a handler; a broker delivers no more in one piece."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of a subscription.

    `prefetch_*` limit messages that wait or are requested, `unacked_max` those that are not settled. `since_ms` applies
    if `start` is "since". A broadcast's group is the consumer itself.
    """

    subject: str
    group: str
    consumer: str
    broadcast: bool
    start: str
    since_ms: int
    tags: tuple[str, ...]
    tag_mode: str
    policy: RetryPolicy
    most_once: bool
    prefetch_messages: int
    prefetch_bytes: int
    unacked_max: int
    exclusive_ms: int = 0
    """Time since when an exclusive consumer waits for its turn, ms since 1970 UTC; 0 shares with others."""
    ephemeral: bool = False
    """A broadcast without a fixed consumer id: the next process has another one."""

    @property
    def mailbox(self) -> str | None:
        """Subject of the messages for this group alone, or None."""
        return _mailbox(self.subject, self.group, self.broadcast)

    def of_consumer(self, consumer: str) -> Terms:
        """Return these terms for another consumer."""
        return replace(self, consumer=consumer, group=consumer if self.broadcast else self.group)


def make_terms(
    *,
    subject: str,
    group: str | None,
    consumer: str,
    broadcast: bool,
    start: str | datetime,
    tags: Iterable[str],
    tag_mode: str,
    retries_max: int,
    retry_delay: float | timedelta,
    most_once: bool,
    prefetch_messages: int,
    prefetch_bytes: int,
    unacked_max: int,
    exclusive_ms: int = 0,
    has_id: bool = True,
) -> Terms:
    """Return the checked arguments of `Consumer.listen` or `Consumer.pull`.

    Raises:
        InvalidName: subject or group is not valid.
        InvalidRequest: another argument is not valid.
    """
    subject = check_subject(subject)
    if broadcast and group is not None:
        raise InvalidRequest("a broadcast's group is the consumer itself: leave out group=, or broadcast=True")
    if group == "":
        raise InvalidRequest("the consumer group is empty: name it, or leave out group= to broadcast")
    broadcast = group is None
    group = consumer if group is None else check_name("consumer group", group)
    begin, since_ms = _start(start)
    if tag_mode not in ("any", "all"):
        raise InvalidRequest(f'tag_mode is "any" or "all", not {tag_mode!r}')
    tag_mode = plain(tag_mode)
    retries_max = check_whole("retries_max", retries_max, 0)
    prefetch_messages = check_whole("prefetch_messages", prefetch_messages, 1)
    prefetch_bytes = check_whole("prefetch_bytes", prefetch_bytes, 1)
    unacked_max = check_whole("unacked_max", unacked_max, 1)
    if exclusive_ms and broadcast:
        raise InvalidRequest("a broadcast's group has one consumer: leave out exclusive=")
    deliveries_max = 0 if is_dead_letter_subject(subject) else max(1, retries_max)
    longest_s = DELAY_S_MAX if _mailbox(subject, group, broadcast) else BROKER_DELAY_S_MAX
    policy = RetryPolicy(deliveries_max, check_delay(retry_delay), longest_s)
    return Terms(
        subject,
        group,
        consumer,
        broadcast,
        begin,
        since_ms,
        _tags(tags),
        tag_mode,
        policy,
        most_once,
        prefetch_messages,
        prefetch_bytes,
        unacked_max,
        exclusive_ms,
        broadcast and not has_id,
    )


def _mailbox(subject: str, group: str, broadcast: bool) -> str | None:
    return None if broadcast or parse_derived(subject) is not None else retry_subject(subject, group)


def check_seconds(name: str, seconds: float, *, is_zero_allowed: bool = True) -> float:
    """Return `seconds`, checked; raises InvalidRequest with the argument's name."""
    if not isinstance(seconds, int | float) or not (seconds > 0 or (is_zero_allowed and seconds == 0)):
        least = "0 or more" if is_zero_allowed else "more than 0"
        raise InvalidRequest(f"{name} is seconds, {least}, not {seconds!r}")
    return plain(seconds)


def check_whole(name: str, count: int, least: int, most: int | None = None) -> int:
    """Return `count`, checked against its bounds; raises InvalidRequest with the argument's name."""
    is_whole = isinstance(count, int) and not isinstance(count, bool)
    if not is_whole or count < least or (most is not None and count > most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        raise InvalidRequest(f"{name} is a whole number, {bounds}, not {count!r}")
    return plain(count)


def check_concurrency(concurrency: int) -> int:
    return check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)


def check_batch(batch: int | None) -> int:
    """Return the size limit of a handler's call; None stands for single messages."""
    return 1 if batch is None else check_whole("batch", batch, 1, BATCH_MAX)


def _start(start: str | datetime) -> tuple[str, int]:
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidRequest(
                f"start={start} has no time zone, so its time is not defined: write start.astimezone()"
            )
        return "since", max(0, (start - _EPOCH) // timedelta(milliseconds=1))
    if start not in ("latest", "earliest"):
        raise InvalidRequest(f'start is "latest", "earliest" or a datetime with its time zone, not {start!r}')
    return plain(start), 0


def _tags(tags: Iterable[str]) -> tuple[str, ...]:
    words = list(tags)
    if isinstance(tags, str) or not all(isinstance(word, str) and word.strip() for word in words):
        raise InvalidRequest(f"tags are a list of str that are not blank, not {tags!r}")
    if len(words) > TAGS_MAX:
        raise InvalidRequest(f"{len(words)} tags are more than {TAGS_MAX}")
    return tuple(sorted(set(map(plain, words))))


BACKSTOP = 1_000
"""Delivery attempts after which the broker itself makes a dead letter, for instance of a message that ends each process
at once. Consumers enforce lower limits themselves, because brokers do not read a message's own limit.
"""
BROKER_DELAY_S_MAX = DELAY_MS_MAX / 1000
"""Delay servers store longer delays (docs/decisions/0015)."""
DELAY_S_MAX = 36_500 * 86_400.0
"""Longest delay of any delay server; most have a lower setting."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retry policy of a group.

    `deliveries_max` limits delivery attempts; 0 means no limit, for dead letters, which stay in their subject.
    `delay_s` is the time between attempts, unless a handler gives a delay of up to `delay_s_max`.
    """

    deliveries_max: int
    delay_s: float
    delay_s_max: float = BROKER_DELAY_S_MAX

    @property
    def backstop(self) -> int:
        """Limit that SUBSCRIBE sends to the broker."""
        return max(BACKSTOP, 2 * self.deliveries_max) if self.deliveries_max else 0


class Refused(NamedTuple):
    """Decision on a failed message. `is_failure`: not requested by the application, so it is logged."""

    verdict: Verdict
    delay_s: float
    reason: str
    is_failure: bool


class Refusable(Protocol):
    """Message that may be delivered again."""

    @property
    def times(self) -> int: ...

    @property
    def properties(self) -> Mapping[str, Value]: ...


def refused_by_error(message: Refusable, policy: RetryPolicy, error: BaseException, now: datetime) -> Refused:
    """Return the decision after a handler raised `error` at `now`."""
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
    """Return the decision on a retry: after `delay` seconds, or a dead letter at the delivery limit.

    Raises:
        InvalidRequest: the delay is negative or above the policy's limit, or the reason is no str.
    """
    reason = _check_reason(reason)
    delay_s = policy.delay_s if delay is None else check_delay(delay, policy.delay_s_max)
    limit = _limit(message, policy)
    if limit and message.times >= limit:
        return Refused(Verdict.DEAD_LETTER, 0.0, f"{delivered(message.times)}; {reason}", True)
    return Refused(Verdict.RETRY, delay_s, reason, is_failure)


def worn_out(message: Refusable, policy: RetryPolicy) -> Refused | None:
    """Return the decision on a message above its delivery limit, or None. No handler begins with it again."""
    limit = _limit(message, policy)
    if not limit or message.times <= limit:
        return None
    return Refused(Verdict.WORN_OUT, 0.0, f"{delivered(message.times - 1)}, and never acked", True)


def batch_of(message: Refusable, policy: RetryPolicy, batch: int) -> int:
    """Return the size limit of a call that starts with `message`: `batch`, half of it after each failure, 1 at the last
    attempt. So a message that fails its calls becomes a dead letter alone.
    """
    if (times := message.times) == 1:
        return batch
    limit = _limit(message, policy)
    return 1 if limit and times >= limit else max(1, batch >> times - 1)


def refused_for_good(message: Refusable, policy: RetryPolicy, reason: str) -> Refused:
    """Return the decision on a message that must not be retried. A dead letter itself is retried, because no other
    subject could store it.

    Raises:
        InvalidRequest: the reason is no str.
    """
    reason = _check_reason(reason)
    if policy.deliveries_max:
        return Refused(Verdict.DEAD_LETTER, 0.0, reason, False)
    return Refused(Verdict.RETRY, policy.delay_s, reason, True)


def check_delay(delay: float | timedelta, most_s: float = BROKER_DELAY_S_MAX) -> float:
    """Return the seconds of a delay, from 0 to a limit, by default that of brokers, a day; raises InvalidRequest."""
    delay_s = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if not isinstance(delay_s, int | float) or not 0 <= delay_s <= most_s:
        raise InvalidRequest(f"a delay is 0 to {most_s:.0f} s, or a timedelta, not {delay!r}")
    return plain(delay_s)


def _check_reason(reason: str) -> str:
    """Return a reason as a plain str. Raises InvalidRequest here, because an invalid reason would later block other
    nacks.
    """
    if not isinstance(reason, str):
        raise InvalidRequest(f"a reason is a str, not {text_of_error(reason)}; write str() around it")
    return plain(reason)


def text_of_error(error: object) -> str:
    """Return an exception as a reason, also if its repr raises."""
    try:
        return repr(error)[:REASON_BYTES_MAX]
    except Exception:
        return type(error).__name__


def _limit(message: Refusable, policy: RetryPolicy) -> int:
    """Return the delivery limit of a message: its own, or the policy's."""
    if not policy.deliveries_max:
        return 0
    try:
        own = str(message.properties.get(RETRIES_MAX, ""))
    except InvalidMessage:  # bytes of a foreign producer
        return policy.deliveries_max
    if own.isascii() and own.isdecimal():  # QMQ writes -1 for "not set"
        return max(1, int(own) if len(own) <= DIGITS_MAX else 10**DIGITS_MAX)
    return policy.deliveries_max
