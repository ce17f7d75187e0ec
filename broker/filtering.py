"""Core. Which messages a pull gets where single ones have to be chosen: by the consumer's tags, by the order keys.

For a subscription without tags, of a subject without order keys, `broker.choosing` decides on ranges alone. Here each
message is looked at, in order: first those that came back and are due, then what is new. One of these is decided:

    delivered    it matches, and no earlier message of its key is unsettled
    passed       it does not match, or is gone: over for the group
    deferred     it matches, and its key is busy: it waits with what was returned, behind the others of its key
    stopped at   the pull has enough; or bytes have to be read first, and the pull waits for them

Everything decided is written down in one pull frame. What is kept in memory (`broker.group_filter`) follows from the
fold and the labels, and is made again when it is missing: a new master reads the labels of all that a group has not
settled before it delivers anything more of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from qmq.broker.choosing import Budget, Chosen
from qmq.broker.consume import Subscription
from qmq.broker.filtered_scan import FilteredScan
from qmq.broker.group_filter import GroupFilter, sequences_unacked
from qmq.broker.labels import LabelCache, LabelsRead, read_labels_of
from qmq.broker.passes import Passes
from qmq.broker.tags import TagRule
from qmq.dead_letters import PRUNER
from qmq.errors import LogError
from qmq.log import MessageLog
from qmq.log.frame import FrameKind
from qmq.log.group import Consumer
from qmq.log.progress_frame import EXPIRED, OVERFLOWED, Entry

log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """Bytes that a group's pulls wait for; `job` may run on a thread."""

    subject: str
    group: str
    job: Callable[[], LabelsRead]


class Filtering:
    """Made by `broker.delivery`; ends with the mastership. `connected` says who has a connection now."""

    def __init__(
        self, message_log: MessageLog, connected: Callable[[], Iterable[Subscription]], passes: Passes
    ) -> None:
        self._log, self._connected, self._passes = message_log, connected, passes
        self._label_cache = LabelCache(message_log)
        self._filters: dict[tuple[str, str], GroupFilter] = {}
        self._asked: dict[tuple[str, str], TagRule | None] = {}
        """What the last consumer that subscribed asked for, per group."""
        self._rules: dict[tuple[str, str], dict[str, TagRule | None]] = {}
        """What consumers asked for when they were last delivered anything, by group, until they leave."""
        self._warned: set[tuple[str, str]] = set()
        self._readings: list[Reading] = []
        self.tired: dict[str, None] = {}
        """Subjects of which there is more to look at, in another pass."""

    def concerns(self, subscription: Subscription) -> bool:
        """Return whether single messages have to be chosen for it."""
        return subscription.rule is not None or subscription.subject in self._log.state.ordered

    def is_looking(self, subscription: Subscription) -> bool:
        """Return whether nobody knows yet if there is something for it."""
        group_filter = self._filters.get(subscription.key[:2])
        return group_filter is not None and (group_filter.is_reading or subscription.subject in self.tired)

    def joined(self, subscription: Subscription) -> None:
        """A consumer subscribed; one group whose consumers ask for different tags is most likely a mistake."""
        key = subscription.key[:2]
        before, self._asked[key] = self._asked.get(key, subscription.rule), subscription.rule
        if before == subscription.rule or key in self._warned:
            return
        if any(one.rule != subscription.rule for one in self._connected() if one.key[:2] == key):
            self._warned.add(key)
            log.warning(
                "consumers of one group ask for different tags subject=%s group=%s consumer=%s: what one of "
                "them passes over is over for all",
                *subscription.key,
            )

    def asks_for_others(self, subscription: Subscription) -> bool:
        """Return whether this consumer asks for other messages than when it was last delivered any."""
        rules = self._rules.get(subscription.key[:2])
        return rules is not None and rules.get(subscription.consumer, subscription.rule) != subscription.rule

    def delivered(self, subscription: Subscription) -> None:
        """A pull of this consumer was written down."""
        key, consumer = subscription.key[:2], subscription.consumer
        if consumer in self._log.state.groups[key].consumers:  # so that a frame will say when it leaves
            self._rules.setdefault(key, {})[consumer] = subscription.rule

    def choose(self, subscription: Subscription, now_ms: int, cut: Budget, made: Chosen) -> None:
        """Add to `made` what this subscription gets; its caller writes that down at once."""
        key = subscription.key[:2]
        group_filter = self._filters.setdefault(key, GroupFilter(*key))
        if group_filter.is_reading or group_filter.rests(now_ms):
            return
        if group_filter.is_idle(subscription.rule, self._log.end, cut.data_limit, now_ms):
            return
        group_filter.idle_at = None
        scan = FilteredScan(
            self._log,
            self._label_cache,
            group_filter,
            subscription,
            cut,
            made,
            now_ms=now_ms,
            looks=self._passes.looks_left,
        )
        try:
            scan.go()
        except BaseException:
            del self._filters[key]  # half a decision is none; what it did to the keys must not stay
            raise
        self._passes.looks_left = scan.looks
        if scan.wanted is not None:
            group_filter.is_reading = True
            self._readings.append(Reading(*key, partial(read_labels_of, self._log, *scan.wanted)))
        elif scan.looks <= 0:
            self.tired[subscription.subject] = None
        else:  # if anything was found, the log is longer once that is written down
            group_filter.idle_at = subscription.rule, self._log.end, cut.data_limit

    def changing(self, kind: FrameKind, key: tuple[str, str, str], entries: list[Entry]) -> None:
        """Progress of `key` is about to be written: take note which messages that will concern."""
        if not key[2] and not entries:  # the group is forgotten
            self._asked.pop(key[:2], None)
            self._warned.discard(key[:2])
        if kind == FrameKind.POSITION:
            if not key[2]:
                self._rules.pop(key[:2], None)
            elif key[:2] in self._rules:
                self._rules[key[:2]].pop(key[2], None)
        group_filter = self._filters.get(key[:2])
        if group_filter is None:
            return
        if not key[2] or (kind == FrameKind.POSITION and key[2] == PRUNER):
            # The group is moved, or forgotten; or gets back what was taken for its burial without regard to order keys.
            del self._filters[key[:2]]
            return
        group = self._log.state.groups[key[:2]]
        if kind == FrameKind.PULL:
            # A scan keeps its own books; what expires or overflows frees its key here.
            if entries and entries[0][0] in (EXPIRED, OVERFLOWED):
                group_filter.catch_up(group)
                group_filter.changing += [
                    (first, first + count) for _, first, count in entries if first < group.position
                ]
            return
        group_filter.catch_up(group)
        consumer = group.consumers.get(key[2], Consumer())
        ranges = [(0, consumer.next_pull)] if kind == FrameKind.POSITION else [entry[:2] for entry in entries]
        group_filter.changing += [held for begin, end in ranges for held in sequences_unacked(consumer, begin, end)]

    # Reading, and other passes.

    def take_readings(self) -> list[Reading]:
        """Take away and return what has to be read; each comes back to `was_read`."""
        readings, self._readings = self._readings, []
        return readings

    def was_read(self, reading: Reading, found: LabelsRead | LogError) -> None:
        """Take what was read; those who wait for it are to be served now."""
        group_filter = self._filters.get((reading.subject, reading.group))
        if group_filter is not None:
            group_filter.is_reading = False
            group_filter.has_failed = isinstance(found, LogError)
        if not isinstance(found, LogError):
            self._label_cache.took(found)
            if group_filter is not None and group_filter.keys is None:
                group_filter.labels_before.update(found.labels)

    @property
    def has_unwritten(self) -> bool:
        """Whether some group will be overdue."""
        return any(group_filter.will_be_overdue for group_filter in self._filters.values())

    def overdue(self, now_ms: int) -> list[str]:
        """Return the subjects of groups that passed over messages a while ago and did not write it down, or could not
        read a while ago."""
        return [group_filter.subject for group_filter in self._filters.values() if group_filter.is_overdue(now_ms)]
