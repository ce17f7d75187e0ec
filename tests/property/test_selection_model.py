"""Core. Filtered pulls equal a search of the whole list: tags, order keys, retries, swaps."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.broker import filtered_scan, labels, serving
from qmq.broker.group_filter import GroupFilter, Keys, _Making
from qmq.broker.labels import TagRule
from qmq.codec import tag_bits
from qmq.errors import CorruptFrame
from tests.support.effort import examples
from tests.unit.broker.selecting import Consumer, Sent, produce
from tests.unit.broker.world import Client, Group

TAGS = ("pay", "cancel", "refund")
KEYS = (None, None, "k1", "k2", "k3")
NAMES = ("c1", "c2", "c3")


def twin_of(tag: str) -> str:
    """Return another tag with the same bit, which the label cannot distinguish."""
    return next(f"{tag}{n}" for n in range(10_000) if tag_bits([f"{tag}{n}"]) == tag_bits([tag]))


TWIN = twin_of("pay")


class Plain:
    """Model of one group: each message is settled, delivered, or waits until it is due."""

    def __init__(self, tags: tuple[str, ...], is_all: bool) -> None:
        self.tags = set(tags)
        self.is_all = is_all
        self.messages: list[Sent] = []
        self.settled: set[int] = set()
        self.holders: dict[int, str] = {}
        self.due: dict[int, int] = {}
        self.times: dict[int, int] = {}

    def matches(self, message: Sent) -> bool:
        if not self.tags:
            return True
        return self.tags <= set(message.tags) if self.is_all else bool(self.tags & set(message.tags))

    def next(self, most: int, now_ms: int) -> list[int]:
        """Return the result of a pull: the first messages that match, are due, and are the first of their keys."""
        busy: set[str] = set()
        found: list[int] = []
        for sequence, message in enumerate(self.messages):
            if sequence in self.settled or not self.matches(message):
                continue
            is_free = message.key is None or message.key not in busy
            if message.key is not None:
                busy.add(message.key)
            if is_free and sequence not in self.holders and self.due.get(sequence, 0) <= now_ms and len(found) < most:
                found.append(sequence)
        return found

    def given(self, name: str, sequences: list[int]) -> None:
        for sequence in sequences:
            self.holders[sequence] = name
            self.times[sequence] = self.times.get(sequence, 0) + 1

    def returned(self, sequence: int, due_ms: int) -> None:
        del self.holders[sequence]
        self.due[sequence] = due_ms


class World:
    def __init__(self, rng: Random, *, is_roomy: bool) -> None:
        self.rng = rng
        tail_bytes = rng.choice([0, 1 << 20])
        self.must_be_whole = is_roomy and tail_bytes > 0
        self.group = Group.made(tail_bytes=tail_bytes, segment_bytes=rng.choice([2048, 1 << 16])).start()
        self.producer = Client(self.group.a, "producer")
        self.term = 1
        tags = rng.choice([(), ("pay",), ("pay", "cancel")])
        self.plain = Plain(tags, is_all=rng.random() < 0.5)
        terms = {"tags": tags, "tag_mode": "all" if self.plain.is_all else "any"}
        self.consumers = {name: Consumer(self.group, name, **terms) for name in NAMES}
        self.is_ordered = rng.random() < 0.8

    @property
    def now_ms(self) -> int:
        return self.group.a.host.now_ms()

    def step(self) -> None:
        rng, plain = self.rng, self.plain
        name = rng.choice(NAMES)
        consumer = self.consumers[name]
        held = sorted(consumer.held.values())
        some = rng.sample(held, rng.randint(1, len(held))) if held else []
        match rng.choice(
            ["produce"] * 4 + ["pull"] * 6 + ["ack"] * 5 + ["nack", "wait", "leave", "return", "expire", "swap"]
        ):
            case "produce":
                self.produce()
            case "pull":
                self.pull(name, rng.choice([1, 2, 5, 1_000]))
            case "ack" if some:
                consumer.ack(*some)
                plain.settled |= set(some)
                for sequence in some:
                    del plain.holders[sequence]
            case "nack" if some:
                delay_ms = rng.choice([0, 0, 5_000])
                due_ms = self.now_ms + delay_ms if delay_ms else 0
                consumer.nack(*some, delay_ms=delay_ms)
                for sequence in some:
                    plain.returned(sequence, due_ms)
            case "wait":
                self.wait(4_000)
            case "leave":
                consumer.leave()
                for sequence in held:
                    plain.returned(sequence, 0)
                    plain.times[sequence] -= 1  # it reported that it had not begun them
                consumer.join()
            case "return":
                consumer.client.lost()
                consumer.join()
            case "expire":
                consumer.client.lost()
                for _ in range(8):  # its lease ends
                    self.wait(4_000)
                for sequence in held:
                    plain.returned(sequence, 0)
                consumer.held.clear()
                self.pull(rng.choice([other for other in NAMES if other != name]), 1_000)
                consumer.join()
            case "swap":
                self.swap()

    def produce(self) -> None:
        rng, first = self.rng, len(self.plain.messages)
        is_keyed = self.is_ordered and rng.random() < 0.8
        some = [
            Sent(
                tuple(rng.sample((*TAGS, TWIN), rng.choice([0, 0, 1, 2, 3]))),
                rng.choice(KEYS) if is_keyed else None,
            )
            for _ in range(rng.randint(1, 6))
        ]
        self.plain.messages += some
        produce(self.producer, some, first=first, labelled=is_keyed or rng.random() < 0.6)
        self.group.settle()

    def pull(self, name: str, most: int) -> int:
        expected = self.plain.next(most, self.now_ms)
        found = self.consumers[name].pull(most)
        sequences = [got.sequence for got in found]
        if self.must_be_whole:  # a frame is cut only for a pull that would get less than half of its request
            assert sequences == expected or sequences == expected[: len(sequences)] and 2 * len(sequences) >= most
        else:  # messages that must be read first may come with the next pull
            assert sequences == expected[: len(sequences)] and bool(sequences) == bool(expected)
        self.plain.given(name, sequences)
        assert [got.times for got in found] == [self.plain.times[sequence] for sequence in sequences]
        return len(found)

    def wait(self, ms: int) -> None:
        for consumer in self.consumers.values():
            consumer.client.send(205, b"")
        self.group.a.wait(ms)
        self.group.settle()

    def swap(self) -> None:
        self.term += 1
        self.group.b.host.clock_ms = self.group.a.host.clock_ms
        self.group.swap(self.term)
        self.producer = Client(self.group.a, "producer")
        for consumer in self.consumers.values():
            consumer.join()

    def drain(self) -> None:
        """Without further faults, settle all selected messages, in the order of their keys."""
        rounds = 0
        while self.plain.holders or self.plain.due.keys() - self.plain.settled or self.plain.next(1, 1 << 62):
            rounds += 1
            assert rounds < 300, "no message waits for ever"
            self.wait(5_000)
            for name, consumer in self.consumers.items():
                self.pull(name, 1_000)
                if held := list(consumer.held.values()):
                    consumer.ack()
                    self.plain.settled |= set(held)
                    for sequence in held:
                        del self.plain.holders[sequence]
        progress = self.group.a.log.state.groups["s", "g"]
        assert not progress.requeued and not any(consumer.unacked for consumer in progress.consumers.values())


NARROW = [
    (serving, "LOOKS_PER_PASS", 3),
    (filtered_scan, "LOOKS_AT_ONCE", 2),
    (filtered_scan, "READ_FRAMES", 2),
    (filtered_scan, "PASSED_MESSAGES", 4),
    (labels, "LABEL_BYTES_MAX", 500),
    (labels, "BODY_BYTES_MAX", 500),
    (labels, "READ_BYTES_MAX", 300),
]
"""Each turn visits a few messages, and each read returns a few."""


@pytest.mark.parametrize("bounds", [(), NARROW], ids=["roomy", "narrow"])
@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(40), deadline=None)
def test_pulls_equal_a_search_of_the_history(bounds, seed):
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in bounds:
            patch.setattr(module, name, value)
        world = run(seed, is_roomy=not bounds)
    assert world.group.a.log.chain == world.group.b.log.chain


def run(seed: int, *, is_roomy: bool = True) -> World:
    world = World(Random(seed), is_roomy=is_roomy)
    for _ in range(60):
        world.step()
    world.drain()
    return world


def forget_to_rebuild(self):
    self._group_filter.keys = Keys()
    for waiting in self._group.requeued:
        self._group_filter.note(waiting.first, waiting.end, waiting.due_ms)


@pytest.mark.parametrize(
    "owner, name, bug",
    [
        pytest.param(Keys, "is_busy", lambda self, key: False, id="a key is never busy"),
        pytest.param(Keys, "settled", lambda self, sequence: None, id="a key stays busy for ever"),
        pytest.param(_Making, "make", forget_to_rebuild, id="a new master does not read the labels"),
        pytest.param(GroupFilter, "catch_up", lambda self, group: None, id="requeued messages are forgotten"),
        pytest.param(TagRule, "matches", lambda self, message: True, id="a label's bit counts as a tag"),
    ],
)
def test_planted_bug_is_found(monkeypatch, owner, name, bug):
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, CorruptFrame)):
        for seed in range(40):
            run(seed)
