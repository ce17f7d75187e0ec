"""Core. Consumption equals plain sets: each message is new, delivered to one consumer, requeued or done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.log.fold import (
    BATCHES_PER_PRODUCER,
    PRODUCERS_MAX,
    State,
    StoredBatch,
    apply,
    decode_snapshot,
    encode_snapshot,
)
from qmq.log.frame import FrameKind, decode_frames
from qmq.log.group import LIFE, Consumer, MessageEvent, MessageState
from qmq.log.group import Group as GroupProgress
from qmq.log.progress_frame import DEFERRED, EXPIRED, PASSED
from qmq.types import Epoch
from tests.support.effort import examples
from tests.unit.log.logs import Copy, a_frame, fold_of

CONSUMERS = ("c1", "c2", "c3")


class Plain:
    """A simple model of one group: sets of sequences, and a dictionary of pull sequences per consumer."""

    def __init__(self) -> None:
        self.new: set[int] = set()
        self.returned: set[int] = set()
        self.acked: set[int] = set()
        self.held: dict[str, dict[int, int]] = defaultdict(dict)
        self.given: set[tuple[str, int]] = set()
        self.times: dict[int, int] = defaultdict(int)
        self.stored = 0
        self.states: dict[int, MessageState] = defaultdict(lambda: LIFE.initial)

    def move(self, event: MessageEvent, sequences: Iterable[int]) -> None:
        """Move each message to its next state; fail on a transition that the table lacks."""
        for sequence in sequences:
            self.states[sequence] = LIFE.after(self.states[sequence], event)

    def check(self, state: State) -> None:
        group = state.groups["s", "g"]
        returned = [(first + i, times) for first, count, times, *_ in group.requeued for i in range(count)]
        assert {s for s, _ in returned} == self.returned
        assert [s for s, _ in returned] == sorted(self.returned), "in order, each once"
        assert all(times == self.times[s] for s, times in returned)
        assert set(range(group.position, self.stored)) == self.new
        for name in CONSUMERS:
            known = group.consumers.get(name, Consumer())
            held = {p + i: s + i for p, s, count, *_ in known.unacked for i in range(count)}
            assert held == self.held[name]
            assert all(t == self.times[s + i] for _, s, count, t, _ in known.unacked for i in range(count))
            assert known.acked_end == min(held, default=known.next_pull)
            assert known.unacked_messages == len(held)
        assert [group.state_of(s) for s in range(self.stored)] == [self.states[s] for s in range(self.stored)]
        left = {s for begin, end in group.unconsumed(self.stored) for s in range(begin, end)}
        assert left == set(range(self.stored)) - self.acked
        assert group.first_unconsumed(self.stored) == min(left, default=None)
        parts = [self.new, self.returned, self.acked, *(set(held.values()) for held in self.held.values())]
        assert sum(map(len, parts)) == self.stored == len(set().union(*parts)), "each message is in one place"


def ranges(group: GroupProgress, plain: Plain) -> list[tuple[int, int]]:
    """Return the sequences `[begin, end)` that the group can deliver."""
    found = [(entry[0], entry[0] + entry[1]) for entry in group.requeued]
    return found + ([(group.position, plain.stored)] if group.position < plain.stored else [])


def step(copy: Copy, plain: Plain, rng: Random) -> None:
    state, name = copy.log.state, rng.choice(CONSUMERS)
    group, held = state.groups["s", "g"], plain.held[name]
    match rng.choice(["produce", "pull", "pull", "ack", "nack", "pass", "leave", "mastership"]):
        case "produce":
            count = rng.randint(1, 4)
            copy.messages(*[f"m{plain.stored + i}" for i in range(count)], size=0)
            plain.new |= set(range(plain.stored, plain.stored + count))
            plain.stored += count
        case "pull" if plain.new or plain.returned:
            entries, pull = [], state.next_pull(group, name)
            pool = sorted(plain.returned) if plain.returned and rng.random() < 0.7 else sorted(plain.new)
            skipped = rng.randrange(2) if pool and pool[0] in plain.returned else 0  # new messages come in order
            wanted = pool[skipped:][: rng.randint(1, 5)]
            for begin, end in ranges(group, plain):
                run = [s for s in wanted if begin <= s < end]
                if run:
                    entries.append((pull, run[0], len(run)))
                    plain.move(MessageEvent.DELIVER, run)
                    for i, sequence in enumerate(run):
                        assert (name, pull + i) not in plain.given, "a pull sequence is used once (W2, W13)"
                        plain.given.add((name, pull + i))
                        held[pull + i] = sequence
                        plain.times[sequence] += 1
                        plain.new.discard(sequence)
                        plain.returned.discard(sequence)
                    pull += len(run)
            if entries:
                copy.progress(FrameKind.PULL, name, *entries)
        case "ack" if held:
            first, last = sorted(rng.choices(sorted(held), k=2))
            done = [pull for pull in held if first <= pull <= last]
            copy.progress(FrameKind.ACK, name, (first, last + 1, 0))
            plain.move(MessageEvent.ACK, (held[pull] for pull in done))
            plain.acked |= {held.pop(pull) for pull in done}
        case "nack" if held:
            first, last = sorted(rng.choices(sorted(held), k=2))
            copy.progress(FrameKind.NACK, name, (first, last + 1, rng.randrange(3)))
            plain.move(MessageEvent.NACK, (sequence for pull, sequence in held.items() if first <= pull <= last))
            plain.returned |= {held.pop(pull) for pull in list(held) if first <= pull <= last}
        case "pass" if found := ranges(group, plain):
            begin, end = rng.choice(found)
            begin = rng.randrange(begin, end) if begin < group.position else begin
            run = range(begin, rng.randint(begin + 1, end))
            number = rng.choice([PASSED, DEFERRED, EXPIRED])
            copy.progress(FrameKind.PULL, name, (number, begin, len(run)))
            plain.move(MessageEvent.DEFER if number == DEFERRED else MessageEvent.PASS_OVER, run)
            plain.new.difference_update(run)
            plain.returned.difference_update(run)
            (plain.returned if number == DEFERRED else plain.acked).update(run)
        case "leave" if name in group.consumers:
            has_begun = rng.randrange(2)
            copy.progress(FrameKind.POSITION, name, (has_begun, 0, 0))
            for sequence in held.values():
                plain.times[sequence] -= has_begun
            plain.move(MessageEvent.LEAVE, held.values())
            plain.returned |= set(held.values())
            held.clear()
        case "mastership":
            copy.begin_epoch(Epoch(1, copy.epoch.boot + 1))


@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(120))
def test_consumption_equals_a_model_of_sets(seed):
    rng, copy, plain = Random(seed), Copy.begun(segment_bytes=1 << 20), Plain()
    copy.progress(FrameKind.POSITION, "", (0, 0, 0))
    positions, acked = 0, 0
    for _ in range(60):
        step(copy, plain, rng)
        plain.check(copy.log.state)
        position = copy.log.state.groups["s", "g"].position
        assert position >= positions and len(plain.acked) >= acked, "progress never goes back (I8)"
        positions, acked = position, len(plain.acked)
    copy.flush()
    assert fold_of(copy.whole()) == copy.log.state
    assert decode_snapshot(encode_snapshot(copy.log.state)) == copy.log.state


@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(40))
def test_snapshot_and_later_frames_give_the_state(seed):
    copy, rng = Copy.begun(segment_bytes=1 << 20), Random(seed)
    ends = [a_frame(copy, rng).end for _ in range(40)]
    copy.flush()
    data, end = copy.whole(), rng.choice(ends)
    snapshot = decode_snapshot(encode_snapshot(fold_of(data[:end])))
    assert fold_of(data[end:], snapshot) == copy.log.state
    assert encode_snapshot(snapshot) == encode_snapshot(copy.log.state), "and the same bytes"


def test_window_of_a_producer_is_exact():
    """P2: 64 batches per producer, in any order, and 4,096 producers, the least recent forgotten first."""
    rng = Random(1)
    state, copy = State(), Copy.begun(segment_bytes=1 << 24)
    model: dict[int, StoredBatch] = {}
    newest = 0
    for _ in range(1_000):
        batch = max(1, newest + rng.randint(-70, 6))
        assert copy.log.state.repeated(7, batch) == model.get(batch)
        forgotten = batch not in model and batch + BATCHES_PER_PRODUCER <= max(model, default=-1000)
        assert copy.log.state.is_forgotten(7, batch) == forgotten
        if batch in model or forgotten:
            continue
        frame = copy.messages("m", size=0, producer=7, batch=batch)
        model[batch] = StoredBatch(frame.first_sequence, 1, frame.end)
        newest = max(newest, batch)
        model = {b: model[b] for b in sorted(model)[-BATCHES_PER_PRODUCER:]}
    copy.flush()
    for frame, body in decode_frames(copy.whole(), 0, 0):
        apply(state, frame, body)
    assert state.producers[7] == model


def test_least_recent_producers_are_forgotten_first():
    copy = Copy.begun(segment_bytes=1 << 24)
    for producer in range(1, PRODUCERS_MAX + 1):
        copy.messages("m", size=0, producer=producer, batch=1)
    copy.messages("m", size=0, producer=1, batch=2)
    for producer in range(PRODUCERS_MAX + 1, PRODUCERS_MAX + 11):
        copy.messages("m", size=0, producer=producer, batch=1)
    producers = copy.log.state.producers
    assert len(producers) == PRODUCERS_MAX
    assert [p for p in range(1, 14) if p in producers] == [1, 12, 13]
    again = decode_snapshot(encode_snapshot(copy.log.state))
    assert list(again.producers) == list(producers), "in the same order, or two copies would forget different ones"
