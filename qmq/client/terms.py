"""Core. What an application asks for when it listens or pulls, checked as a whole before anything begins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from qmq.client.retrying import BROKER_DELAY_S_MAX, DELAY_S_MAX, RetryPolicy, check_delay
from qmq.codec import TAGS_MAX
from qmq.errors import InvalidRequest
from qmq.plain import plain
from qmq.subjects import check_name, check_subject, is_dead_letter_subject, parse_derived, retry_subject

CONCURRENCY_MAX = 10_000
BATCH_MAX = 10_000
"""Messages in one call of a handler; a broker delivers no more in one piece."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a subscription asks for; `prefetch_*` bound what is on its way or waits, `unacked_max` what is not settled.

    `since_ms` counts if `start` is "since". A broadcast's group is the consumer itself.
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
    """Since when it takes its turn among exclusive consumers, ms since 1970 UTC; 0: it shares with others."""
    ephemeral: bool = False
    """A broadcast whose consumer was given no id: the next process has another name."""

    @property
    def mailbox(self) -> str | None:
        """The subject of the messages that are meant for this group alone; None if it has none."""
        return _mailbox(self.subject, self.group, self.broadcast)

    def of_consumer(self, consumer: str) -> Terms:
        """Return the same terms for another consumer."""
        return replace(self, consumer=consumer, group=consumer if self.broadcast else self.group)


def make_terms(
    *,
    subject: str,
    group: str,
    consumer: str,
    broadcast: bool,
    start: str | datetime,
    tags: Iterable[str],
    tag_mode: str,
    retries_max: int,
    retry_delay: float,
    most_once: bool,
    prefetch_messages: int,
    prefetch_bytes: int,
    unacked_max: int,
    exclusive_ms: int = 0,
    has_id: bool = True,
) -> Terms:
    """Check the arguments of `Consumer.listen` and `Consumer.pull`.

    Raises:
        InvalidName: subject or group.
        InvalidRequest: anything else.
    """
    subject = check_subject(subject)
    if broadcast and group:
        raise InvalidRequest("a broadcast's group is the consumer itself: leave out group=, or broadcast=True")
    broadcast = not group
    group = consumer if broadcast else check_name("consumer group", group)
    begin, since_ms = _start(start)
    if tag_mode not in ("any", "all"):
        raise InvalidRequest(f'tag_mode is "any" or "all", not {tag_mode!r}')
    tag_mode = plain(tag_mode)
    retries_max = check_whole("retries_max", retries_max, 0)
    prefetch_messages = check_whole("prefetch_messages", prefetch_messages, 1)
    prefetch_bytes = check_whole("prefetch_bytes", prefetch_bytes, 1)
    unacked_max = check_whole("unacked_max", unacked_max, 1)
    if exclusive_ms and broadcast:
        raise InvalidRequest("a broadcast's group has one consumer anyway: exclusive is for groups")
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
    """Return the value of an argument that says how long; raises InvalidRequest, which names it."""
    if not isinstance(seconds, int | float) or not (seconds > 0 or (is_zero_allowed and seconds == 0)):
        least = "0 or more" if is_zero_allowed else "more than 0"
        raise InvalidRequest(f"{name} is seconds, {least}, not {seconds!r}")
    return plain(seconds)


def check_whole(name: str, count: int, least: int, most: int | None = None) -> int:
    """Return the value of an argument that counts something; raises InvalidRequest, which names it."""
    is_whole = isinstance(count, int) and not isinstance(count, bool)
    if not is_whole or count < least or (most is not None and count > most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        raise InvalidRequest(f"{name} is a whole number, {bounds}, not {count!r}")
    return plain(count)


def check_concurrency(concurrency: int) -> int:
    return check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)


def check_batch(batch: int | None) -> int:
    """Return how many messages a call has at most; None: the handler takes a message and no list."""
    return 1 if batch is None else check_whole("batch", batch, 1, BATCH_MAX)


def _start(start: str | datetime) -> tuple[str, int]:
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidRequest(f"start={start} has no time zone, so it names no moment: write start.astimezone()")
        return "since", max(0, (start - _EPOCH) // timedelta(milliseconds=1))
    if start not in ("latest", "earliest"):
        raise InvalidRequest(f'start is "latest", "earliest" or a datetime with its time zone, not {start!r}')
    return plain(start), 0


def _tags(tags: Iterable[str]) -> tuple[str, ...]:
    words = list(tags)
    if isinstance(tags, str) or not all(isinstance(word, str) and word for word in words):
        raise InvalidRequest(f"tags are a list of words, none of them empty; not {tags!r}")
    if len(words) > TAGS_MAX:
        raise InvalidRequest(f"{len(words)} tags are more than {TAGS_MAX}")
    return tuple(sorted(set(map(plain, words))))
