"""Core. What stops or slows a consumer group, by name: in `Lag`, in Doctor, in a metric, and once in the log.

One table has all causes. A group has those whose condition holds; without a backlog it has none but its own bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from qmq.broker.choosing import UNACKED_MESSAGES_MAX
from qmq.broker.consume import Subscription
from qmq.broker.passes import OWED_BYTES_MAX
from qmq.log.group import Group

log = logging.getLogger(__name__)

REQUEUED_RANGES_MAX = 250_000
"""Per group: 11 MB in memory. 30 messages a second that ask for "again in an hour" are 108,000."""
LOOKED_AT_ONCE = 200
"""Groups in one tick, well below a millisecond: 100,000 are looked at every 50 s."""
NAMED_MAX = 1_000
"""Groups whose causes are kept for the metric, the log and Doctor."""
LASTS_MS = 60_000
"""A cause that is no alarm is logged when it has lasted for so long: most of them come and go."""


class Cause(StrEnum):
    """What stops or slows a consumer group; `CAUSES` says when."""

    MASTER = "master"
    OFFLINE = "offline"
    RATE = "rate"
    EXCLUSIVE = "exclusive"
    NO_CONSUMER = "no_consumer"
    AWAY = "away"
    NO_SLAVE = "no_slave"
    UNACKED = "unacked"
    POSTPONED = "postponed"
    NOT_READ = "not_read"
    LATER = "later"
    PREFETCH = "prefetch"
    FILTER = "filter"
    ORDER_KEY = "order_key"


class Facts(NamedTuple):
    """What the causes of a group follow from, at one moment.

    new, due: messages that were never delivered; requeued ones that may come again now, 0 or 1.
    """

    group: Group
    connected: Sequence[Subscription]
    is_offline: Callable[[Subscription], bool]
    may_progress: bool
    has_slave: bool
    is_slowed: bool
    is_handed_on: bool
    """No consumer has its turn: the one before may still be at work."""
    is_looking: bool
    is_ordered: bool
    new: int
    due: int

    @property
    def has_backlog(self) -> bool:
        return bool(self.new or self.group.requeued.messages)

    @property
    def waiting(self) -> list[Subscription]:
        """Consumers that ask for messages and may get some."""
        return [one for one in self.connected if one.waiting and not self.is_offline(one)]


class Rule(NamedTuple):
    """`is_alarm`: somebody should look at it, and nothing else says it. Consumers that wait for their own handlers, or
    are away, are no alarm; a slave or master that is missing is another one."""

    holds: Callable[[Facts], bool]
    is_alarm: bool
    text: str


def _is_not_read(facts: Facts) -> bool:
    waiting = facts.waiting
    return bool(waiting) and all(not one.link.writable or one.link.owed_bytes >= OWED_BYTES_MAX for one in waiting)


def _has_as_many_as_it_may(facts: Facts) -> bool:
    return any(one.has_as_many_as(UNACKED_MESSAGES_MAX) for one in facts.group.consumers.values())


CAUSES: dict[Cause, Rule] = {
    Cause.MASTER: Rule(
        lambda f: f.has_backlog and not f.may_progress,
        False,
        "the master may not deliver now: it was fenced, or waits for what its slave has",
    ),
    Cause.OFFLINE: Rule(
        lambda f: f.has_backlog and any(map(f.is_offline, f.connected)),
        True,
        "consumers are switched off; OnOffline switches them on",
    ),
    Cause.RATE: Rule(
        lambda f: f.has_backlog and f.is_slowed,
        True,
        "an operator limits how many messages a second it gets: LimitGroup --perSecond=0 ends that",
    ),
    Cause.EXCLUSIVE: Rule(
        lambda f: f.has_backlog and bool(f.connected) and f.is_handed_on,
        False,
        "the exclusive consumer before has un-acked messages and is away: the next one begins when its lease ends",
    ),
    Cause.NO_CONSUMER: Rule(
        lambda f: f.has_backlog and not f.connected and not f.group.is_broadcast,
        False,
        "no consumer is connected",
    ),
    Cause.AWAY: Rule(
        lambda f: f.has_backlog and not f.connected and f.group.is_broadcast,
        False,
        "the one consumer of this broadcast is away: it is forgotten after broadcast_forget_hours",
    ),
    Cause.NO_SLAVE: Rule(
        lambda f: f.has_backlog and not f.has_slave,
        False,
        "no slave is in sync: what only the master has waits for it",
    ),
    Cause.UNACKED: Rule(
        _has_as_many_as_it_may,
        True,
        f"a consumer has {UNACKED_MESSAGES_MAX} un-acked messages and gets more when it acks",
    ),
    Cause.POSTPONED: Rule(
        lambda f: len(f.group.requeued) >= REQUEUED_RANGES_MAX,
        True,
        f"{REQUEUED_RANGES_MAX} ranges wait for their time; what is more waits at a delay group, or with "
        "its consumers: without a delay group, or the right redrive:, they get nothing new when they have too many",
    ),
    Cause.NOT_READ: Rule(
        lambda f: f.has_backlog and _is_not_read(f),
        False,
        "consumers ask for messages and do not read the answers",
    ),
    Cause.LATER: Rule(
        lambda f: f.has_backlog and not f.new and not f.due,
        False,
        "what waits asked to come again later",
    ),
    Cause.PREFETCH: Rule(
        lambda f: bool(f.new or f.due) and bool(f.connected) and not any(one.waiting for one in f.connected),
        False,
        "consumers have as many messages as they ask for ahead: their handlers are the bound",
    ),
    Cause.FILTER: Rule(
        lambda f: f.has_backlog and f.is_looking,
        False,
        "messages are read to find those whose tags and order keys fit",
    ),
    Cause.ORDER_KEY: Rule(
        lambda f: f.is_ordered and bool(f.new or f.due) and bool(f.waiting) and not f.is_looking,
        False,
        "what waits has order keys of which an earlier message is not settled",
    ),
}


def causes(facts: Facts) -> list[Cause]:
    """Name what stops or slows a group now, the most likely first."""
    return [cause for cause, rule in CAUSES.items() if rule.holds(facts)]


class Causes:
    """Looks at all groups in turn. Made by `broker.delivery`; ends with the mastership.

    Args:
        facts: of a (subject, consumer group), None if there is none any more.
    """

    def __init__(self, facts: Callable[[tuple[str, str]], Facts | None]) -> None:
        self._facts = facts
        self._round: Iterator[tuple[str, str]] = iter(())
        self.found: dict[tuple[str, str], list[Cause]] = {}
        """Of up to NAMED_MAX groups, and as many more that have an alarm."""
        self._to_log: dict[tuple[str, str], dict[Cause, int]] = {}
        """Of these groups, causes that are not logged yet, and when they will be (monotonic ms)."""

    def of(self, key: tuple[str, str]) -> list[Cause]:
        facts = self._facts(key)
        return causes(facts) if facts is not None else []

    def forget(self, key: tuple[str, str]) -> None:
        """A group is gone."""
        self.found.pop(key, None)
        self._to_log.pop(key, None)

    def look(self, groups: Iterable[tuple[str, str]], now_ms: int) -> list[tuple[str, str]]:
        """Look at the next ones, and return which; `groups` are all of them, of which a round is made when the last one
        has ended. `now_ms` never jumps."""
        keys = list(islice(self._round, LOOKED_AT_ONCE))
        if not keys:
            self._round = iter(list(groups))
            keys = list(islice(self._round, LOOKED_AT_ONCE))
        lasting: dict[Cause, list[tuple[str, str]]] = {}
        for key in keys:
            for cause in self._look(key, now_ms):
                lasting.setdefault(cause, []).append(key)
        for cause, waiting in lasting.items():
            _log(cause, waiting)
        return keys

    def _look(self, key: tuple[str, str], now_ms: int) -> list[Cause]:
        """Return what is to be logged of a group now."""
        found, known, to_log = self.of(key), self.found.pop(key, []), self._to_log.pop(key, {})
        has_alarm = any(CAUSES[cause].is_alarm for cause in found)
        if not found or len(self.found) >= (2 if has_alarm else 1) * NAMED_MAX:
            return []
        self.found[key] = found
        to_log = {cause: at_ms for cause, at_ms in to_log.items() if cause in found}
        to_log |= {cause: now_ms + _logged_after_ms(cause) for cause in found if cause not in known}
        now = [cause for cause, at_ms in to_log.items() if at_ms <= now_ms]
        if len(to_log) > len(now):
            self._to_log[key] = {cause: at_ms for cause, at_ms in to_log.items() if at_ms > now_ms}
        return now


def _logged_after_ms(cause: Cause) -> int:
    return 0 if CAUSES[cause].is_alarm else LASTS_MS


def _log(cause: Cause, keys: list[tuple[str, str]]) -> None:
    """An alarm is a line for each group. The rest may be true of all of them at once, as a slave that is missing."""
    text = CAUSES[cause].text
    if CAUSES[cause].is_alarm:
        for key in keys:
            log.warning("group is stopped cause=%s subject=%s consumer_group=%s: %s", cause, *key, text)
    else:
        first = ", ".join(f"{group} of {subject}" for subject, group in keys[:3])
        log.info("groups wait cause=%s groups=%d first=%s: %s", cause, len(keys), first, text)
