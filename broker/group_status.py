"""Core. Status of consumer groups for operators: causes that stop or slow each, its backlog, and the age of that.

Each tick looks at some of the groups in turn, so neither a tick nor a page of metrics walks through all of them. A
status is at most one round old. `CAUSES` lists all causes. A group without a backlog has only those of its own bounds.
The age of a backlog is read from the frame of its oldest message, on a thread, and only if that message changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from enum import StrEnum
from heapq import nlargest, nsmallest
from itertools import islice
from typing import NamedTuple

from qmq.broker.answers import OWED_BYTES_MAX
from qmq.broker.choice import UNACKED_MESSAGES_MAX
from qmq.broker.subscriptions import Subscription
from qmq.errors import CorruptFrame, LogError
from qmq.log import MessageLog
from qmq.log.group import Group
from qmq.replication.mastership import Mastership
from qmq.subjects import matching

log = logging.getLogger(__name__)

REQUEUED_RANGES_MAX = 250_000
"""Per group: 11 MB in memory. At 30 messages a second postponed by an hour, 108,000 ranges wait."""
LOOKED_AT_ONCE = 200
"""Groups checked in a tick, well below a millisecond: 100,000 take 50 s."""
NAMED_MAX = 1_000
"""Groups with causes that are kept for the metric, the log and Doctor."""
LOGGED_AFTER_MS = 60_000
"""A cause that is no alarm is logged after this time: most of them pass."""


class Cause(StrEnum):
    """Causes that stop or slow a consumer group; `CAUSES` defines each."""

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
    """Facts from which a group's causes follow, at one moment."""

    group: Group
    connected: Sequence[Subscription]
    is_offline: Callable[[Subscription], bool]
    may_progress: bool
    has_slave: bool
    is_slowed: bool
    is_handed_on: bool
    """No exclusive consumer may get messages: the former one may still be at work."""
    is_looking: bool
    is_ordered: bool
    new: int
    """Messages never delivered."""
    due: int
    """Requeued messages that are due; 1 stands for any number."""

    @property
    def has_backlog(self) -> bool:
        return bool(self.new or self.group.requeued.messages)

    @property
    def waiting(self) -> list[Subscription]:
        """Consumers with waiting pulls that are not switched off."""
        return [
            subscription
            for subscription in self.connected
            if subscription.waiting and not self.is_offline(subscription)
        ]


class Rule(NamedTuple):
    """Definition of a cause. `is_alarm`: an operator should look at it, and no other alarm covers it. Consumers that
    are busy or away are no alarm; a missing slave or master has its own.
    """

    holds: Callable[[Facts], bool]
    is_alarm: bool
    text: str


def _is_not_read(facts: Facts) -> bool:
    waiting = facts.waiting
    return bool(waiting) and all(
        not subscription.link.writable or subscription.link.owed_bytes >= OWED_BYTES_MAX for subscription in waiting
    )


def _has_unacked_max(facts: Facts) -> bool:
    return any(consumer.has_as_many_as(UNACKED_MESSAGES_MAX) for consumer in facts.group.consumers.values())


CAUSES: dict[Cause, Rule] = {
    Cause.MASTER: Rule(
        lambda f: f.has_backlog and not f.may_progress,
        False,
        "the master may not deliver now: it was fenced, or waits for its slave's frames",
    ),
    Cause.OFFLINE: Rule(
        lambda f: f.has_backlog and any(map(f.is_offline, f.connected)),
        True,
        "consumers are switched off; OnOffline switches them on",
    ),
    Cause.RATE: Rule(
        lambda f: f.has_backlog and f.is_slowed,
        True,
        "an operator limits its messages per second: LimitGroup --perSecond=0 ends that",
    ),
    Cause.EXCLUSIVE: Rule(
        lambda f: f.has_backlog and bool(f.connected) and f.is_handed_on,
        False,
        "the former exclusive consumer has unacked messages and is away: the next one begins when its lease ends",
    ),
    Cause.NO_CONSUMER: Rule(
        lambda f: f.has_backlog and not f.connected and not f.group.is_broadcast,
        False,
        "no consumer is connected",
    ),
    Cause.AWAY: Rule(
        lambda f: f.has_backlog and not f.connected and f.group.is_broadcast,
        False,
        "the only consumer of this broadcast is away: it is forgotten after broadcast_forget_hours",
    ),
    Cause.NO_SLAVE: Rule(
        lambda f: f.has_backlog and not f.has_slave,
        False,
        "no slave is in sync: messages on the master alone wait for one",
    ),
    Cause.UNACKED: Rule(
        _has_unacked_max,
        True,
        f"a consumer has {UNACKED_MESSAGES_MAX} unacked messages and gets more when it acks",
    ),
    Cause.POSTPONED: Rule(
        lambda f: len(f.group.requeued) >= REQUEUED_RANGES_MAX,
        True,
        f"{REQUEUED_RANGES_MAX} ranges wait for their retry; further ones wait at a delay group. Without one, or "
        "without the right redrive:, they stay with the consumers, which get no new messages when they have too many",
    ),
    Cause.NOT_READ: Rule(
        lambda f: f.has_backlog and _is_not_read(f),
        False,
        "consumers pull messages and do not read the answers",
    ),
    Cause.LATER: Rule(
        lambda f: f.has_backlog and not f.new and not f.due,
        False,
        "all waiting messages are postponed",
    ),
    Cause.PREFETCH: Rule(
        lambda f: (
            bool(f.new or f.due) and bool(f.connected) and not any(subscription.waiting for subscription in f.connected)
        ),
        False,
        "consumers have all the messages that they prefetch: their handlers are the bound",
    ),
    Cause.FILTER: Rule(
        lambda f: f.has_backlog and f.is_looking,
        False,
        "messages are read to find those whose tags and order keys fit",
    ),
    Cause.ORDER_KEY: Rule(
        lambda f: f.is_ordered and bool(f.new or f.due) and bool(f.waiting) and not f.is_looking,
        False,
        "waiting messages have order keys with an earlier unsettled message",
    ),
}


def causes(facts: Facts) -> list[Cause]:
    """Return the causes that stop or slow a group now, the most likely first."""
    return [cause for cause, rule in CAUSES.items() if rule.holds(facts)]


class Causes:
    """Check of all groups in turn. Made by `broker.delivery`; ends with the mastership.

    Args:
        facts: returns the facts of a (subject, consumer group), or None if it does not exist.
    """

    def __init__(self, facts: Callable[[tuple[str, str]], Facts | None]) -> None:
        self._facts = facts
        self._round: Iterator[tuple[str, str]] = iter(())
        self.found: dict[tuple[str, str], list[Cause]] = {}
        """Causes of up to NAMED_MAX groups, and as many more with an alarm."""
        self._to_log: dict[tuple[str, str], dict[Cause, int]] = {}
        """Causes not logged yet, by group, and when they will be (monotonic ms)."""

    def of(self, key: tuple[str, str]) -> list[Cause]:
        facts = self._facts(key)
        return causes(facts) if facts is not None else []

    def forget(self, key: tuple[str, str]) -> None:
        """Forget a group."""
        self.found.pop(key, None)
        self._to_log.pop(key, None)

    def look(self, groups: Iterable[tuple[str, str]], now_ms: int) -> list[tuple[str, str]]:
        """Check the next groups and return them. `groups` are all groups; a new round starts with them when the last
        one has ended. `now_ms` never jumps.
        """
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
        """Return the causes of a group to log now."""
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
    return 0 if CAUSES[cause].is_alarm else LOGGED_AFTER_MS


def _log(cause: Cause, keys: list[tuple[str, str]]) -> None:
    """Log one line per group for an alarm. Other causes may concern all groups at once, such as a missing slave."""
    text = CAUSES[cause].text
    if CAUSES[cause].is_alarm:
        for key in keys:
            log.warning("group is stopped cause=%s subject=%s consumer_group=%s: %s", cause, *key, text)
    else:
        first = ", ".join(f"{group} of {subject}" for subject, group in keys[:3])
        log.info("groups wait cause=%s groups=%d first=%s: %s", cause, len(keys), first, text)


READ_AT_ONCE = 50
"""Frames: a fraction of a millisecond on a thread, mostly in memory. 10,000 busy groups are covered within 20 s."""
AGES_MAX = 100
"""Groups with a shown age: those with the oldest messages."""

Key = tuple[str, str]
"""(subject, consumer group)"""


class Backlog(NamedTuple):
    """Messages that a group has not acked: `waiting` are with no consumer, `delivered` with one."""

    waiting: int
    delivered: int

    @classmethod
    def of(cls, group: Group, end: int) -> Backlog:
        """Return the backlog of a group; its subject ends at sequence `end`."""
        waiting = end - group.position + group.requeued.messages
        return cls(waiting, sum([consumer.unacked_messages for consumer in group.consumers.values()]))


class _Oldest(NamedTuple):
    """Oldest message of a group that is not acked."""

    sequence: int
    stored_ms: int


class _FirstUnacked(NamedTuple):
    """First unacked delivery of a consumer, and since when it is that."""

    pull: int
    since_ms: int


class Backlogs:
    """Backlogs of all groups. Made by `broker.delivery`; ends with the mastership.

    Args:
        always: subjects with groups that are always shown; a trailing `*` matches any ending.
    """

    def __init__(self, mastership: Mastership, always: Sequence[str]) -> None:
        self._mastership = mastership
        self._is_always = matching(always)
        self._known: dict[Key, Backlog] = {}
        """Groups with unacked or waiting messages."""
        self._oldest: dict[Key, _Oldest] = {}
        self._firsts: dict[Key, dict[str, _FirstUnacked]] = {}
        """First unacked delivery of each consumer of a group; it does not move while a handler hangs."""
        self._is_reading = False

    def look(self, keys: Iterable[Key]) -> None:
        """Update the backlogs of these groups.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        message_log = self._mastership.log
        wanted: list[tuple[Key, int, int]] = []
        for key in keys:
            group, end = message_log.state.groups.get(key), message_log.state.next_sequence.get(key[0], 0)
            first = group.first_unconsumed(end) if group is not None else None
            if group is None or first is None:
                self.forget(key)
                continue
            self._known[key] = Backlog.of(group, end)
            self._note_first(key, group)
            is_known = key in self._oldest and self._oldest[key].sequence == first
            if not is_known and not self._is_reading and len(wanted) < READ_AT_ONCE:
                if refs := message_log.frames(key[0], first, 1):
                    wanted.append((key, first, refs[0].offset))
        if wanted:
            self._read(wanted)

    def forget(self, key: Key) -> None:
        """Forget a group."""
        self._known.pop(key, None)
        self._oldest.pop(key, None)
        self._firsts.pop(key, None)

    def _note_first(self, key: Key, group: Group) -> None:
        """Note since when each consumer has its first unacked delivery. A new delivery has a new pull sequence."""
        before, now_ms = self._firsts.pop(key, {}), self._mastership.host.now_ms()
        firsts = {
            name: _FirstUnacked(member.unacked[0].pull, now_ms)
            for name, member in group.consumers.items()
            if member.unacked
        }
        for name, first in firsts.items():
            if name in before and before[name].pull == first.pull:
                firsts[name] = before[name]
        if firsts:
            self._firsts[key] = firsts

    def _read(self, wanted: Sequence[tuple[Key, int, int]]) -> None:
        message_log, self._is_reading = self._mastership.log, True

        def done(found: list[tuple[Key, _Oldest] | CorruptFrame] | LogError) -> None:
            self._is_reading = False
            for error in [found] if isinstance(found, LogError) else found:
                if isinstance(error, CorruptFrame):
                    self._mastership.found_damage(error)
                elif isinstance(error, LogError):
                    raise error
                elif error[0] in self._known:
                    self._oldest[error[0]] = error[1]

        self._mastership.host.read(lambda: [_stored(message_log, *item) for item in wanted], done)

    def copy(self) -> Backlogs:
        """Return a snapshot for another thread."""
        twin = copy(self)
        twin._known, twin._oldest, twin._firsts = dict(self._known), dict(self._oldest), dict(self._firsts)
        return twin

    def largest(self, most: int) -> dict[Key, Backlog]:
        """Return the largest backlogs, and those that are always shown."""
        found = nlargest(most, self._known.items(), key=lambda entry: sum(entry[1]))
        return dict(found) | {key: counts for key, counts in self._known.items() if self._is_always(key[0])}

    def ages_ms(self, now_ms: int) -> dict[Key, int]:
        """Return the ages of the oldest messages not acked: the highest ages, and those always shown."""
        found = nsmallest(AGES_MAX, self._oldest.items(), key=lambda item: item[1].stored_ms)
        found += [entry for entry in self._oldest.items() if self._is_always(entry[0][0])]
        return {key: max(0, now_ms - oldest.stored_ms) for key, oldest in found}

    def first_unacked_of(self, key: Key) -> int:
        """Return for how long a consumer of the group has had the same first unacked message; 0: none has one."""
        firsts, now_ms = self._firsts.get(key, {}).values(), self._mastership.host.now_ms()
        return max(0, now_ms - min((first.since_ms for first in firsts), default=now_ms))

    def first_unacked_ms(self, now_ms: int) -> dict[Key, int]:
        """Return for how long a consumer of each group has had the same first unacked message, in this mastership.
        Groups with the longest times, and those always shown.
        """
        since = {key: min(first.since_ms for first in firsts.values()) for key, firsts in self._firsts.items()}
        found = nsmallest(AGES_MAX, since.items(), key=lambda item: item[1])
        found += [entry for entry in since.items() if self._is_always(entry[0][0])]
        return {key: max(0, now_ms - since_ms) for key, since_ms in found}


def _stored(message_log: MessageLog, key: Key, sequence: int, offset: int) -> tuple[Key, _Oldest] | CorruptFrame:
    """Read when a message was stored. Blocks; may run on a thread."""
    try:
        return key, _Oldest(sequence, message_log.timestamp_at(offset))
    except CorruptFrame as problem:  # or retention deleted it meanwhile
        return problem
