"""Core. State after each kind of frame, and frames that the fold refuses."""

from __future__ import annotations

import zlib

import pytest

from qmq.errors import CorruptFrame, NewerFormat
from qmq.log import fold
from qmq.log.fold import (
    BATCHES_PER_PRODUCER,
    EpochStart,
    State,
    apply,
    decode_snapshot,
    encode_snapshot,
    is_current_snapshot,
)
from qmq.log.frame import FLAG_DEAD, FLAG_LABELLED, FLAG_ORDERED, Frame, FrameKind
from qmq.log.group import MASTERSHIP_BITS, Consumer, Group, UnackedRange
from qmq.log.progress_frame import DEFERRED, EXPIRED, NOT_BEGUN, OVERFLOWED, PASSED, Departure, encode_progress
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.subjects import dead_letter_subject
from qmq.types import Epoch
from tests.property.test_frame import frame_of
from tests.unit.log.logs import Copy

PULL, ACK, NACK, POSITION = FrameKind.PULL, FrameKind.ACK, FrameKind.NACK, FrameKind.POSITION
FIRST = (1 << 16 | 1) << MASTERSHIP_BITS
"""The first pull sequence of a copy's first epoch."""


def a_group() -> Copy:
    """Return a log of six messages, of which consumer c1 has the first four."""
    copy = Copy.begun(segment_bytes=1 << 20)
    copy.progress(POSITION, "", (0, 0, 0))
    copy.messages(*"abcdef", size=0)
    copy.progress(PULL, "c1", (FIRST, 0, 4))
    return copy


def later(copy: Copy, kind: FrameKind, consumer: str, *entries: tuple[int, int, int], timestamp_ms: int = 9) -> Frame:
    return copy.append(kind, "s", encode_progress("g", consumer, list(entries)), timestamp_ms=timestamp_ms)


def has(pull: int, first: int, count: int, attempts: int = 1, suspected: int = 0) -> UnackedRange:
    return UnackedRange(FIRST + pull, first, count, attempts, suspected)


def consumer(next_pull: int, *unacked: UnackedRange) -> Consumer:
    return Consumer(FIRST + next_pull, list(unacked), [FIRST + next_pull])


HAS_ALL = {"c1": consumer(4, has(0, 0, 4))}
LEFT = (POSITION, "c1", (Departure.VANISHED, 0, 0))
ALL_BACK = [(0, 4, 1, 0)]
LEAVES = {"floor": FIRST + 4, "consumers": {}, "left_ms": 9}
NACKED = (NACK, "c1", (FIRST, FIRST + 2, 77))
WITHOUT_2 = {"c1": consumer(4, has(2, 2, 2))}


@pytest.mark.parametrize(
    ("frames", "requeued", "changes"),
    [
        pytest.param(
            [(ACK, "c1", (FIRST + 1, FIRST + 3, 0))], [], {"c1": consumer(4, has(0, 0, 1), has(3, 3, 1))}, id="ack"
        ),
        pytest.param(
            [(ACK, "c1", (FIRST, FIRST + 1, 0), (FIRST + 3, FIRST + 4, 0))],
            [],
            {"c1": consumer(4, has(1, 1, 2))},
            id="two acks",
        ),
        pytest.param(
            [(PULL, "c1", (FIRST + 4, 4, 1))], [], {"c1": consumer(5, has(0, 0, 5)), "position": 5}, id="one more"
        ),
        pytest.param([NACKED], [(0, 2, 1, 77)], WITHOUT_2, id="nack"),
        pytest.param([(NACK, "c1", (FIRST, FIRST + 2, NOT_BEGUN))], [(0, 2, 0, 0)], WITHOUT_2, id="nack, not begun"),
        pytest.param(
            [NACKED, (PULL, "c2", (FIRST, 0, 1))],
            [(1, 1, 1, 77)],
            {**WITHOUT_2, "c2": consumer(1, has(0, 0, 1, attempts=2))},
            id="delivered again",
        ),
        pytest.param([NACKED, (PULL, "c2", (DEFERRED, 0, 1))], [(0, 1, 1, 0), (1, 1, 1, 77)], WITHOUT_2, id="deferred"),
        pytest.param([NACKED, (PULL, "c2", (EXPIRED, 0, 1))], [(1, 1, 1, 77)], WITHOUT_2, id="expired"),
        pytest.param([NACKED, (PULL, "c2", (OVERFLOWED, 1, 1))], [(0, 1, 1, 77)], WITHOUT_2, id="too many waited"),
        pytest.param([(PULL, "c2", (PASSED, 4, 1))], [], {**HAS_ALL, "position": 5}, id="passed over, new"),
        pytest.param([(PULL, "c2", (DEFERRED, 4, 2))], [(4, 2, 0, 0)], {**HAS_ALL, "position": 6}, id="deferred, new"),
        pytest.param([(PULL, "c2")], [], {**HAS_ALL, "c2": Consumer(0)}, id="a consumer joins"),
        pytest.param(
            [LEFT, (PULL, "c2")], ALL_BACK, {**LEAVES, "c2": Consumer(FIRST + 4)}, id="a consumer joins later"
        ),
        pytest.param([LEFT], ALL_BACK, LEAVES, id="vanished"),
        pytest.param(
            [(PULL, "c2"), LEFT, (POSITION, "c2", (0, 0, 0))], ALL_BACK, LEAVES, id="a consumer without messages left"
        ),
        pytest.param([(POSITION, "c1", (Departure.NONE_BEGUN, 0, 0))], [(0, 4, 0, 0)], LEAVES, id="left"),
        pytest.param(
            [(POSITION, "c1", (Departure.SUSPECTED, 0, 0), (FIRST + 1, FIRST + 2, 0))],
            [(0, 1, 0, 0, 1), (1, 1, 1, 0, 0), (2, 2, 0, 0, 1)],
            LEAVES,
            id="vanished with one begun message",
        ),
        pytest.param(
            [
                (POSITION, "c1", (Departure.SUSPECTED, 0, 0)),
                (PULL, "c2", (FIRST + 4, 0, 1)),
                (NACK, "c2", (FIRST + 4, FIRST + 5, 0)),
            ],
            [(0, 1, 1, 0, 1), (1, 3, 0, 0, 1)],
            {**LEAVES, "c2": consumer(5)},
            id="a suspicion stays",
        ),
    ],
)
def test_group_state_after_progress_frames(frames, requeued, changes):
    copy = a_group()
    group = copy.log.state.groups["s", "g"]
    fields = {"position": 4, "floor": 0, "left_ms": 5, "began": group.began}
    for kind, name, *entries in frames:
        later(copy, kind, name, *entries)
    consumers = {name: value for name, value in changes.items() if isinstance(value, Consumer)}
    fields |= {name: value for name, value in changes.items() if name not in consumers} | {"consumers": consumers}
    assert group == Group(requeued=Requeued([RequeuedRange(*row) for row in requeued]), **fields)


@pytest.mark.parametrize("consumers_left", [False, True])
def test_moved_group_uses_new_pull_sequences(consumers_left):
    copy = a_group()
    if consumers_left:
        later(copy, *LEFT)
    else:
        later(copy, PULL, "c2")
    frame = later(copy, POSITION, "", (2, 1, 0))
    moved = Group(2, FIRST + 4, is_broadcast=True, left_ms=9, began=frame.offset)
    assert copy.log.state.groups == {("s", "g"): moved}
    later(copy, POSITION, "")
    assert copy.log.state.groups == {}
    frame = later(copy, POSITION, "", (6, 0, 0))
    assert copy.log.state.groups == {("s", "g"): Group(6, left_ms=9, began=frame.offset)}


def test_state_keeps_the_latest_nack_time():
    copy = a_group()
    for at, timestamp_ms in enumerate((9, 7)):
        later(copy, NACK, "c1", (FIRST + at, FIRST + at + 1, 0), timestamp_ms=timestamp_ms)
    later(copy, ACK, "c1", (FIRST + 2, FIRST + 3, 0), timestamp_ms=11)
    assert (copy.log.state.retry_ms, copy.log.state.timestamp_ms) == (9, 11)


@pytest.mark.parametrize(
    ("kind", "group", "name", "entries"),
    [
        pytest.param(PULL, "other", "c1", [(FIRST + 4, 4, 1)], id="pull of an unknown group"),
        pytest.param(PULL, "g", "c1", [(FIRST + 3, 4, 1)], id="a used pull sequence"),
        pytest.param(ACK, "other", "c1", [(FIRST, FIRST + 1, 0)], id="ack of an unknown group"),
        pytest.param(ACK, "g", "c2", [(FIRST, FIRST + 1, 0)], id="ack of an unknown consumer"),
        pytest.param(ACK, "g", "c1", [(FIRST + 1, FIRST + 1, 0)], id="empty ack"),
        pytest.param(ACK, "g", "c1", [(FIRST + 3, FIRST + 5, 0)], id="ack beyond the delivered messages"),
        pytest.param(ACK, "g", "c1", [(FIRST, FIRST + 1, 0)], id="ack of acked messages"),
        pytest.param(NACK, "g", "c1", [(FIRST, FIRST + 1, 0)], id="nack of acked messages"),
        pytest.param(PULL, "g", "c2", [(1 << 60, 4, 1), (1 << 61, 4, 1)], id="pull of messages twice"),
        pytest.param(PULL, "g", "c2", [(PASSED, 2, 1)], id="delivered messages are passed over"),
        pytest.param(PULL, "g", "c2", [(DEFERRED, 5, 1)], id="a gap before deferred messages"),
        pytest.param(NACK, "g", "c1", [(1 << 60, (1 << 60) + 1, 0)], id="nack of undelivered messages"),
        pytest.param(POSITION, "other", "c1", [(0, 0, 0)], id="departure from an unknown group"),
        pytest.param(POSITION, "other", "", [], id="an unknown group is forgotten"),
    ],
)
def test_inconsistent_progress_is_refused(kind, group, name, entries):
    copy = a_group()
    later(copy, ACK, "c1", (FIRST, FIRST + 1, 0))
    with pytest.raises(CorruptFrame):
        copy.append(kind, "s", encode_progress(group, name, entries))


def test_pull_of_delivered_messages_is_refused():
    with pytest.raises(CorruptFrame, match="do not wait for delivery to the group: .*DELIVERED"):
        later(a_group(), PULL, "c2", (FIRST, 0, 1))


def a_frame(state: State, **fields) -> tuple[Frame, bytes]:
    """Return the next frame of a state, a batch of one message unless `fields` change it, and its body."""
    expected = {"offset": state.end, "first_sequence": state.next_sequence.get(fields.get("subject", "s"), 0)}
    plain = {"subject": "s", "epoch": Epoch(1, 1), "previous_chain": state.chain, **expected}
    raw, frame = frame_of(body=b"", **(plain | fields))
    return frame, raw[frame.body_at :]


def stored(state: State, **fields) -> Frame:
    frame, body = a_frame(state, **fields)
    apply(state, frame, body)
    return frame


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param({"offset": 8}, "the log ends at", id="at another offset"),
        pytest.param({"epoch": Epoch(1, 1)}, "after epoch", id="of an older epoch"),
        pytest.param({"first_sequence": 2}, "continues at", id="a repeated sequence"),
        pytest.param({"first_sequence": 4}, "continues at", id="after a gap"),
        pytest.param({"subject": "other", "first_sequence": 1}, "continues at", id="after a gap at the begin"),
    ],
)
def test_messages_out_of_sequence_are_refused(fields, why):
    state = State()
    stored(state)
    stored(state, epoch=Epoch(1, 2), count=2)
    with pytest.raises(CorruptFrame, match=why):
        stored(state, **({"epoch": Epoch(1, 2)} | fields))
    stored(state, epoch=Epoch(1, 2))


def test_epochs_begin_with_their_first_frame():
    state = State()
    frames = [stored(state, epoch=Epoch(1, boot), high_watermark=high) for boot, high in ((1, 0), (1, 90), (2, 80))]
    assert state.epochs == [EpochStart(Epoch(1, 1), 0, 0), EpochStart(Epoch(1, 2), frames[1].end, frames[1].chain)]
    assert (state.epoch, state.high_watermark, state.end) == (Epoch(1, 2), 90, frames[2].end)
    assert (State().epoch, State().high_watermark) == (Epoch(0, 0), 0)


def test_batches_without_producer_are_not_stored():
    state = State()
    stored(state, producer=0)
    frame = stored(state, producer=8, batch=5, count=3)
    assert state.producers == {8: {5: (1, 3, frame.end)}}
    stored(state, producer=8, batch=6)
    assert state.unsorted == set()


def test_subject_is_ordered_from_its_first_key():
    state = State()
    stored(state, count=2)
    stored(state, subject="plain", flags=FLAG_LABELLED)
    stored(state, flags=FLAG_LABELLED | FLAG_ORDERED)
    stored(state, flags=FLAG_LABELLED | FLAG_ORDERED)
    assert state.ordered == {"s": 2}


IN_ORDER = tuple(range(1, BATCHES_PER_PRODUCER + 2))
SECOND_FIRST = (2, 1, *IN_ORDER[2:])


@pytest.mark.parametrize(
    ("batches", "subject", "flags", "forgotten"),
    [
        pytest.param(IN_ORDER, "s", 0, 1, id="in order"),
        pytest.param(SECOND_FIRST, "s", 0, 1, id="the smallest number"),
        pytest.param(SECOND_FIRST, "s", FLAG_DEAD, 2, id="dead letters: the batch stored first"),
        pytest.param(
            SECOND_FIRST, dead_letter_subject("s", "g"), 0, 2, id="dead-letter subject: the batch stored first"
        ),
        pytest.param((1, *IN_ORDER[:-1], 1, IN_ORDER[-1]), "s", FLAG_DEAD, 2, id="not a batch that was stored again"),
    ],
)
def test_full_window_forgets_one_batch(batches, subject, flags, forgotten):
    state = State()
    for batch in batches:
        stored(state, producer=8, batch=batch, subject=subject, flags=flags)
    assert set(IN_ORDER) - set(state.producers[8]) == {forgotten}


def test_snapshot_keeps_unsorted_producers():
    state = State()
    for batch in (2, 1, 4, 3, *range(5, BATCHES_PER_PRODUCER + 8)):
        stored(state, producer=8, batch=batch)
        assert state.unsorted == ({8} if {1, 3} & set(state.producers[8]) else set())
        assert decode_snapshot(encode_snapshot(state)).unsorted == state.unsorted


def test_forgotten_producer_leaves_nothing(monkeypatch):
    monkeypatch.setattr(fold, "PRODUCERS_MAX", 1)
    state = State()
    for producer, batch in ((8, 2), (8, 1)):
        stored(state, producer=producer, batch=batch)
    assert (set(state.producers), state.unsorted) == ({8}, {8})
    stored(state, producer=9, batch=1)
    assert (set(state.producers), state.unsorted) == ({9}, set())


def test_damaged_or_foreign_snapshot_is_refused():
    whole = encode_snapshot(a_group().log.state)
    assert is_current_snapshot(whole)
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for version in (2, 5, 4 + 256):
        packed = version.to_bytes(4, "little") + whole[8:]
        damaged.append(zlib.crc32(packed).to_bytes(4, "little") + packed)
        assert not is_current_snapshot(damaged[-1])
    for data in damaged:
        with pytest.raises((ValueError, NewerFormat), match="snapshot"):
            decode_snapshot(data)
