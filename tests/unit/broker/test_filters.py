"""Core. Filters of all groups: rules, readings, and resets."""

from __future__ import annotations

from array import array
from functools import partial
from types import SimpleNamespace

import pytest

from qmq.broker import filtered_scan, serving
from qmq.broker.filtered_scan import Filters, Reading
from qmq.broker.group_filter import FAILED_MS, Keys
from qmq.broker.labels import LabelCache, LabelsRead, TagRule
from qmq.broker.serving import ServiceQueue
from qmq.broker.subscriptions import Subscription
from qmq.dead_letters import PRUNER
from qmq.errors import CorruptFrame
from qmq.log.frame import FrameKind
from qmq.log.group import Consumer as LogConsumer
from qmq.log.group import Group as LogGroup
from qmq.log.group import UnackedRange
from qmq.log.index import FrameRef
from qmq.log.progress_frame import EXPIRED, OVERFLOWED, PASSED
from tests.unit.broker.selecting import Consumer, Sent
from tests.unit.broker.test_filtered_pulls import CANCEL, PAY, A, more, stored
from tests.unit.broker.world import FakeLink, Group

KEY = ("s", "g")
LABELS = array("Q", [1, 2])


def a_filtering(connected: list[Subscription] | None = None, group: LogGroup | None = None) -> Filters:
    state = SimpleNamespace(groups={KEY: group} if group is not None else {}, ordered={})
    log = SimpleNamespace(state=state, tail_body=lambda offset: None, end=0)
    return Filters(log, lambda: connected or [], ServiceQueue())


def subscription(consumer: str, *tags: str, group: str = "g") -> Subscription:
    return Subscription(0, FakeLink(consumer), "s", group, consumer, 0, rule=TagRule.of(tags, is_all=False))


# Rules.


def warnings_of(caplog, filtering: Filters, connected: list[Subscription], new: Subscription) -> int:
    """Subscribe; return the number of warnings."""
    caplog.clear()
    connected.append(new)
    filtering.joined(new)
    return len(caplog.records)


def test_different_tags_are_warned_once_per_group(caplog):
    connected: list[Subscription] = [subscription("c0", "pay")]
    filtering = a_filtering(connected)
    filtering.joined(connected[0])
    joins = partial(warnings_of, caplog, filtering, connected)
    assert joins(subscription("c1", "cancel", group="other")) == 0, "of another group"
    assert joins(subscription("c2", "pay")) == 0
    assert joins(subscription("c3", "cancel")) == 1
    filtering.changing(FrameKind.POSITION, (*KEY, "c3"), [])
    filtering.changing(FrameKind.POSITION, (*KEY, ""), [(0, 0, 0)])
    assert joins(subscription("c4", "pay")) == joins(subscription("c4", "cancel")) == 0
    filtering.changing(FrameKind.POSITION, (*KEY, ""), [])
    assert joins(subscription("c5", "cancel")) == 0, "nobody asked for anything in the group that begins"
    assert joins(subscription("c6", "pay")) == 1


def test_changed_tags_of_a_group_are_not_warned(caplog):
    connected: list[Subscription] = []
    filtering = a_filtering(connected)
    connected.append(subscription("c1", "pay"))
    filtering.joined(connected[0])
    connected.clear()
    connected.append(subscription("c1", "cancel"))
    filtering.joined(connected[0])
    assert not caplog.records


def test_consumer_rules_are_kept_until_departure():
    first, second = subscription("c1", "pay"), subscription("c2", "pay")
    filtering = a_filtering(group=LogGroup(0, consumers={"c1": LogConsumer(), "c2": LogConsumer()}))

    def others() -> list[bool]:
        return [filtering.asks_for_others(subscription(name, "cancel")) for name in ("c1", "c2")]

    for known in (first, second, subscription("never delivered anything", "pay")):
        assert not filtering.asks_for_others(known)
        filtering.delivered(known)
    assert others() == [True, True] and not filtering.asks_for_others(first)
    assert not filtering.asks_for_others(subscription("never delivered anything", "cancel"))
    filtering.changing(FrameKind.ACK, (*KEY, "c1"), [(0, 1, 0)])
    assert others() == [True, True]
    filtering.changing(FrameKind.POSITION, (*KEY, "c1"), [])
    assert others() == [False, True]
    filtering.changing(FrameKind.POSITION, (*KEY, ""), [(0, 0, 0)])
    assert others() == [False, False]
    filtering.changing(FrameKind.POSITION, (*KEY, "c1"), [])
    assert others() == [False, False], "nothing is known of the group"


# Changes.


def with_filter(group: LogGroup) -> Filters:
    """Filter of the group with known keys."""
    filtering = a_filtering(group=group)
    filtering._filters[KEY] = filtered = filtered_scan.GroupFilter(*KEY)
    filtered.keys = Keys()
    return filtering


HELD = LogGroup(20, consumers={"c1": LogConsumer(8, [UnackedRange(2, 10, 3, 1), UnackedRange(6, 15, 2, 1)])})


@pytest.mark.parametrize(
    ("kind", "entries", "expected"),
    [
        (FrameKind.ACK, [(3, 5, 0), (7, 8, 0)], [(11, 13), (16, 17)]),
        (FrameKind.NACK, [(2, 3, 9_000)], [(10, 11)]),
        (FrameKind.POSITION, [(1, 0, 0)], [(10, 13), (15, 17)]),
        (FrameKind.PULL, [(8, 20, 1), (PASSED, 21, 4)], []),
        (FrameKind.PULL, [(EXPIRED, 3, 2), (EXPIRED, 20, 5)], [(3, 5)]),
        (FrameKind.PULL, [(OVERFLOWED, 19, 1)], [(19, 20)]),
        (FrameKind.PULL, [], []),
    ],
    ids=["acked", "nacked", "left", "delivered", "expired", "overflowed", "nothing"],
)
def test_written_progress_is_noted(kind, entries, expected):
    filtering = with_filter(HELD)
    filtering.changing(kind, (*KEY, "c1"), entries)
    assert filtering._filters[KEY].changing == expected
    filtering.changing(kind, ("s", "other", "c1"), entries)
    assert list(filtering._filters) == [KEY]


@pytest.mark.parametrize("consumer", [PRUNER, "c1"])
def test_return_from_the_pruner_drops_the_filter(consumer):
    """Messages from the pruner may share an order key, or have a key that another message holds."""
    filtering = with_filter(LogGroup(20, consumers={consumer: HELD.consumers["c1"]}))
    for kind, entry in ((FrameKind.PULL, (8, 20, 1)), (FrameKind.ACK, (2, 3, 0)), (FrameKind.NACK, (3, 4, 0))):
        filtering.changing(kind, (*KEY, consumer), [entry])
        assert KEY in filtering._filters
    filtering.changing(FrameKind.POSITION, (*KEY, consumer), [(1, 0, 0)])
    assert (KEY in filtering._filters) == (consumer != PRUNER)


def test_consumer_without_messages_changes_nothing():
    filtering = with_filter(HELD)
    filtering.changing(FrameKind.POSITION, (*KEY, "c9"), [(1, 0, 0)])
    assert filtering._filters[KEY].changing == []


@pytest.mark.parametrize("entries", [[], [(0, 0, 0)]], ids=["forgotten", "moved"])
def test_move_drops_the_filter(entries):
    filtering = with_filter(HELD)
    filtering.changing(FrameKind.POSITION, (*KEY, ""), entries)
    assert not filtering._filters


# Readings.


@pytest.mark.parametrize("knows_keys", [False, True])
def test_labels_for_keys_are_kept_until_restored(knows_keys):
    filtering = with_filter(HELD)
    filtered, reading = filtering._filters[KEY], Reading(*KEY, lambda: None)
    filtered.keys = Keys() if knows_keys else None
    filtered.is_reading = True
    filtering.was_read(reading, LabelsRead(None, {88: LABELS}, {}))
    assert not filtered.is_reading and not filtered.has_failed and not filtering.has_unwritten
    assert filtered.labels_before == ({} if knows_keys else {88: LABELS})
    assert filtering._label_cache.labels(FrameRef(0, 2, 88, 9)) == LABELS
    filtered.is_reading = True
    filtering.was_read(reading, CorruptFrame(88, "test"))
    filtering._filters["s", "another"] = filtered_scan.GroupFilter("s", "another")
    assert not filtered.is_reading and filtered.has_failed and filtering.has_unwritten
    assert filtered.rests(1_000)
    assert [filtering.overdue(1_000 + FAILED_MS + ms) for ms in (-1, 0)] == [[], ["s"]]


def test_reading_for_a_moved_group_serves_others():
    filtering = a_filtering()
    filtering.was_read(Reading(*KEY, lambda: None), LabelsRead(None, {88: LABELS}, {}))
    filtering.was_read(Reading(*KEY, lambda: None), CorruptFrame(88, "test"))
    assert filtering._label_cache.labels(FrameRef(0, 2, 88, 9)) == LABELS


def test_failed_scan_changes_no_keys():
    """The scan's changes to the keys must not stay, or the keys would never be free."""
    group = stored(Sent(key="k0"))
    for number in range(1, 6):
        more(group, Sent(key=f"k{number}"), first=number)
    consumer, frames, asked = Consumer(group, "c1"), group.a.log.frames, []

    def fails_later(*args):
        asked.append(args)
        if len(asked) > 1:
            raise CorruptFrame(0, "test")
        return frames(*args)

    group.a.log.frames = fails_later
    consumer.ask()
    assert len(asked) == 2 and not group.a.master._delivery.serving.filters._filters
    group.a.log.frames = frames
    assert consumer.sequences() == [0, 1, 2, 3, 4, 5]


# Scan budgets.


def test_groups_share_the_scan_budget(monkeypatch):
    monkeypatch.setattr(serving, "LOOKS_PER_PASS", 10)
    group = Group.made().start()
    consumers = [Consumer(group, "c", group=name, tags=["cancel"]) for name in ("g1", "g2", "g3")]
    waiting = [consumer.ask(timeout_ms=60_000) for consumer in consumers]
    group.settle()
    looked, run_pass, candidates = [], group.a.master._delivery.serving.run_pass, TagRule.candidates
    group.a.master._delivery.serving.run_pass = lambda: looked.append(0) or run_pass()

    def noted(self, labels, begin, end):
        looked[-1] += end - begin
        return candidates(self, labels, begin, end)

    monkeypatch.setattr(TagRule, "candidates", noted)
    looked.append(0)
    for at in range(3):
        more(group, *[PAY] * 10, first=10 * at)
    more(group, CANCEL, first=30)
    assert [
        found.sequence for consumer, pull in zip(consumers, waiting, strict=True) for found in consumer.got(pull)
    ] == [
        30,
        30,
        30,
    ]
    assert max(looked) == 10


def test_nothing_is_scanned_twice_without_a_change(monkeypatch):
    scans, scan = [], filtered_scan.FilteredScan
    monkeypatch.setattr(
        filtered_scan, "FilteredScan", lambda *args, **terms: scans.append(args) or scan(*args, **terms)
    )
    group = stored(A, A, A)
    first, others = Consumer(group, "c1"), [Consumer(group, f"d{number}") for number in range(5)]
    assert first.sequences() == [0]
    for consumer in others:
        consumer.waits()
    before = len(scans)
    for consumer in others:
        consumer.waits()
    assert len(scans) == before
    first.ack()
    assert [got.sequence for got in others[0].got(2)] == [1]


def test_reading_after_an_empty_scan_is_used():
    group = Group.made(tail_bytes=0).start()
    more(group, PAY, first=0)
    more(group, PAY, first=1)
    consumer = Consumer(group, "c1", tags=["pay"])
    while len(consumer.held) < 2:
        assert consumer.sequences()
    consumer.nack(0, delay_ms=5_000)
    waiting = consumer.waits()
    group.wait(1_000, times=3)
    group.a.master._delivery.serving.filters._label_cache = LabelCache(group.a.log)
    group.wait(1_000, times=3)
    assert [(got.sequence, got.times) for got in consumer.got(waiting)] == [(0, 2)]
