"""Shell. Divergences, one function each: a change of a forged log, and the expected findings.

Each takes frames of `write_world` and returns the expected (kind, frame, sequence or None). They touch different
frames, so that any of them can be planted together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

from qmq.codec import FLAG_BODY, encode_message, label_of, with_properties
from qmq.log.delay_frames import (
    Outcome,
    decode_dispatch,
    decode_settled,
    encode_dispatch,
    encode_places,
    encode_settled,
)
from qmq.log.frame import FLAG_DEAD, FLAG_ORDERED, FrameKind
from qmq.log.progress_frame import NUMBERS_END, PASSED, Entry, decode_progress, encode_progress
from qmq.message import Message
from qmq.types import Epoch
from tests.unit.audit.forged import DEAD, PULL, A, B, C, Draft, a_message

Expected = list[tuple[str, Draft, int | None]]
Plant = Callable[[list[Draft]], Expected]

TEN_YEARS_MS = 10 * 365 * 86_400_000


def frame_of(frames: list[Draft], subject: str, sequence: int, kind: FrameKind = FrameKind.MESSAGES) -> Draft:
    return next(
        frame
        for frame in frames
        if frame.kind == kind
        and frame.subject == subject
        and 0 <= sequence - frame.first_sequence < max(frame.count, 1)
    )


def nth(frames: list[Draft], kind: FrameKind, subject: str, number: int) -> Draft:
    return [frame for frame in frames if frame.kind == kind and frame.subject == subject][number]


def change_message(frames: list[Draft], subject: str, sequence: int, message: bytes) -> Draft:
    frame = frame_of(frames, subject, sequence)
    messages = frame.messages
    messages[frame.of(sequence)] = message
    frame.messages = messages
    return frame


def in_place_of(there: Draft, frame: Draft, **fields: Any) -> Draft:
    """Return a frame like `frame`, as if written at the place of `there`."""
    return replace(
        frame,
        base=there.base,
        epoch=there.epoch,
        high_watermark=there.high_watermark,
        timestamp_ms=there.timestamp_ms,
        **fields,
    )


# Changes of one frame, for the tables below. `what`: the kind of the expected finding.


def rewritten(what: str, subject: str, sequence: int, change: Callable[[bytes], bytes]) -> Plant:
    """Return the plant that changes the bytes of one message."""

    def plant(frames: list[Draft]) -> Expected:
        frame = frame_of(frames, subject, sequence)
        changed = change(frame.messages[frame.of(sequence)])
        return [(what, change_message(frames, subject, sequence, changed), sequence)]

    return plant


def restated(what: str, subject: str, sequence: int, field: str, change: Callable[[Any], Any]) -> Plant:
    """Return the plant that changes a field of a header."""

    def plant(frames: list[Draft]) -> Expected:
        frame = frame_of(frames, subject, sequence)
        setattr(frame, field, change(getattr(frame, field)))
        return [(what, frame, sequence)]

    return plant


def relabelled(whats: tuple[str, ...], subject: str, sequence: int, label: int) -> Plant:
    """Return the plant that changes the label of one message."""

    def plant(frames: list[Draft]) -> Expected:
        frame = frame_of(frames, subject, sequence)
        labels = frame.labels
        labels[frame.of(sequence)] = label
        frame.labels = labels
        return [(what, frame, sequence) for what in whats]

    return plant


def progressed(what: str, kind: FrameKind, subject: str, number: int, change: Callable[[Entry, Draft], Entry]) -> Plant:
    """Return the plant that changes the only entry of a frame of progress, the subject's n-th of this kind."""

    def plant(frames: list[Draft]) -> Expected:
        frame = nth(frames, kind, subject, number)
        group, consumer, (entry,) = decode_progress(frame.body)
        frame.body = encode_progress(group, consumer, [change(entry, frame)])
        return [(what, frame, None)]

    return plant


def _in_ten_years(entry: Entry, frame: Draft) -> Entry:
    return entry[0], entry[1], frame.timestamp_ms + TEN_YEARS_MS


def _of_nothing(entry: Entry, frame: Draft) -> Entry:
    return entry[0] + 10**6, entry[1] + 10**6, entry[2]


def created_ahead(subject: str, sequence: int) -> Plant:
    def plant(frames: list[Draft]) -> Expected:
        created_ms = frame_of(frames, subject, sequence).timestamp_ms + TEN_YEARS_MS
        ahead = rewritten("time", subject, sequence, lambda data: data[:1] + created_ms.to_bytes(8, "big") + data[9:])
        return ahead(frames)

    return plant


def id_twice(subject: str, sequence: int, other: int) -> Plant:
    """Store one message in the place of another one."""

    def plant(frames: list[Draft]) -> Expected:
        frame = frame_of(frames, subject, other)
        copied = frame.messages[frame.of(other)]
        return [("id_twice", change_message(frames, subject, sequence, copied), sequence)]

    return plant


def batch_twice(subject: str, sequence: int) -> Plant:
    """Store a batch again, behind the last one of its subject."""

    def plant(frames: list[Draft]) -> Expected:
        *_, last = _of_subject(frames, subject)
        first = last.first_sequence + last.count
        again = in_place_of(last, frame_of(frames, subject, sequence), first_sequence=first)
        frames.insert(frames.index(last) + 1, again)
        return [("batch_twice", again, first)]

    return plant


def _of_subject(frames: list[Draft], subject: str, kind: FrameKind = FrameKind.MESSAGES) -> list[Draft]:
    return [frame for frame in frames if frame.kind == kind and frame.subject == subject]


# Wrong on both copies.


def order_unflagged(frames: list[Draft]) -> Expected:
    """Message and label are right, but brokers deliver without the requested order."""
    message = encode_message(Message(A, {"text": "y"}, id=f"{A}-174", tags=("even", "more"), order_key="k"), 1)
    frame = change_message(frames, A, 174, message)
    labels = frame.labels
    labels[frame.of(174)] = label_of(("even", "more"), "k")
    frame.labels = labels
    frame.flags &= ~FLAG_ORDERED
    return [("labels", frame, 174)]


def _deleted(id: str) -> bytes:
    return encode_message(Message("order.deleted", {"text": "x"}, id=id, tags=("odd",)), 1)


def called_dead_and_foreign(frames: list[Draft]) -> Expected:
    """Only a dead letter in a chosen subject may keep its original's subject."""
    frame = change_message(frames, B, 195, _deleted(f"{B}-195"))
    frame.flags |= FLAG_DEAD
    return [("dead_unfounded", frame, 190), ("foreign", frame, 195)]


def watermark_still(frames: list[Draft]) -> Expected:
    """It moves on in the next epoch."""
    frame = frame_of(frames, A, 300)
    for later in frames[frames.index(frame) :]:
        if later.epoch == frame.epoch:
            later.high_watermark = min(later.high_watermark, frame.high_watermark)
    return [("watermark", frame, 300)]


def hole_in_pull_sequences(frames: list[Draft]) -> Expected:
    """Acks are right about the later numbers."""
    pulls = [frame for frame in frames if frame.subject == A and frame.kind in (FrameKind.PULL, FrameKind.ACK)]
    later = pulls[pulls.index(nth(frames, FrameKind.PULL, A, 37)) :]
    for frame in later:
        moved = [
            (first + 7, second + 7 * (frame.kind == FrameKind.ACK), third)
            for first, second, third in decode_progress(frame.body).entries
        ]
        frame.body = encode_progress("g", "c", moved)
    return [("progress", later[0], None)]


def unacked_for_days(frames: list[Draft]) -> Expected:
    """The ack is gone. The consumer of B never acks anything."""
    pull, ack = nth(frames, FrameKind.PULL, A, 12), nth(frames, FrameKind.ACK, A, 12)
    for frame in frames[: frames.index(pull) + 1]:
        frame.timestamp_ms -= 2 * 86_400_000
    frames.remove(ack)
    return [("unacked", pull, 120), ("unacked", nth(frames, FrameKind.PULL, B, 0), 1)]


def position_behind_all(frames: list[Draft]) -> Expected:
    at = frames.index(frame_of(frames, A, 140))
    body = encode_progress("far", "", [(10**9, 0, 0)])
    frame = in_place_of(frames[at], nth(frames, FrameKind.POSITION, A, 0), body=body)
    frames.insert(at, frame)
    return [("position", frame, None)]


def _number_densely(frames: list[Draft], subject: str) -> None:
    """Number the deliveries of the subject's only consumer, which acks nothing, without holes."""
    number = PULL
    for frame in frames:
        if frame.kind == FrameKind.PULL and frame.subject == subject:
            group, consumer, old = decode_progress(frame.body)
            entries = []
            for first, sequence, messages in old:
                entries.append((number if first < NUMBERS_END else first, sequence, messages))
                number += messages * (first < NUMBERS_END)
            frame.body = encode_progress(group, consumer, entries)


def passed_unseen(frames: list[Draft]) -> Expected:
    """The pull delivers none of its ten messages; the consumer got such messages before and gets them again."""
    frame = nth(frames, FrameKind.PULL, B, 15)
    frame.body = encode_progress("f", "d", [(PASSED, 150, 10)])
    _number_densely(frames, B)
    return [("passed", frame, 150)]


def passed_beside_its_like(frames: list[Draft]) -> Expected:
    frame = nth(frames, FrameKind.PULL, B, 16)
    entries = [(PASSED if at % 2 == 0 or at == 3 else PULL + 5 * 16 + at // 2, 160 + at, 1) for at in range(10)]
    frame.body = encode_progress("f", "d", entries)
    _number_densely(frames, B)
    return [("passed", frame, 163)]


def no_epoch_frame(frames: list[Draft]) -> Expected:
    frame = nth(frames, FrameKind.EPOCH, "", 1)
    at = frames.index(frame)
    del frames[at]
    return [("epoch_frame", frames[at], 400)]


def gap(frames: list[Draft]) -> Expected:
    for frame in frames:
        if frame.kind == FrameKind.MESSAGES and frame.subject == B and frame.first_sequence >= 500:
            frame.first_sequence += 4
    return [("sequence", frame_of(frames, B, 504), 504)]


def other_original(frames: list[Draft]) -> Expected:
    """The message was rewritten after it became a dead letter, which is the only evidence."""
    message = with_properties(a_message(C, 4 * 20 + 1), {"text": "z" * 60})
    change_message(frames, C, 4 * 20 + 1, message)
    return [("dead_altered", frame_of(frames, DEAD, 20), 20)]


def without_an_original(frames: list[Draft]) -> Expected:
    """Its original was never stored."""
    frame = _one_letter_more(frames)
    frame.batch = 10**6
    return [("dead_unfounded", frame, frame.first_sequence)]


def of_a_message_that_was_handled(frames: list[Draft]) -> Expected:
    frame = _one_letter_more(frames)
    frame.batch = 4 * 45
    frame.messages = [with_properties(a_message(C, 4 * 45), {"qmq_times": "1"})]
    return [("dead_unfounded", frame, frame.first_sequence)]


def dead_twice(frames: list[Draft]) -> Expected:
    """Right after the first one, before the ack: the group still holds the message."""
    before = frame_of(frames, DEAD, 55)
    again = replace(before, first_sequence=56)
    frames.insert(frames.index(before) + 1, again)
    for frame in frames[frames.index(again) + 1 :]:
        frame.first_sequence += frame.subject == DEAD
    return [("dead_twice", again, 56)]


def dead_letter_less(frames: list[Draft]) -> Expected:
    """Later sequences are dense all the same."""
    gone = frame_of(frames, DEAD, 30)
    at = frames.index(gone)
    del frames[at]
    for frame in frames[at:]:
        frame.first_sequence -= frame.subject == DEAD
    return [("dead_missing", frames[at], gone.batch)]


def _one_letter_more(frames: list[Draft]) -> Draft:
    last = [frame for frame in frames if frame.subject == DEAD][-1]
    more = in_place_of(frames[-1], last, first_sequence=last.first_sequence + 1)
    frames.append(more)
    return more


def _with_longer_properties(data: bytes) -> bytes:
    """State a length of the properties that ends in the body."""
    at = data.index(b"\0\x04text") - 1
    return data[:at] + bytes([data[at] + 1]) + data[at + 1 :]


TWO_SIDED: dict[str, Plant] = {
    "a message that is no UTF-8": rewritten("undecodable", A, 33, lambda data: data[:-5] + b"\xff" + data[-4:]),
    "a message that is cut": rewritten("undecodable", A, 47, lambda data: data[:-3]),
    "a body without its flag": rewritten("undecodable", A, 34, lambda data: bytes([data[0] & ~FLAG_BODY]) + data[1:]),
    "a body that begins in the properties": rewritten("undecodable", A, 38, _with_longer_properties),
    "of another subject": rewritten(
        "foreign",
        A,
        55,
        lambda data: encode_message(Message("order.deleted", {"text": "x"}, id=f"{A}-55", tags=("odd",)), 1),
    ),
    "labels that are zero": relabelled(("labels",), B, 62, 0),
    "an order key and no flag": order_unflagged,
    "a flag and no order key": restated("labels", C, 4 * 46, "flags", lambda flags: flags | FLAG_ORDERED),
    "called a dead letter": restated("dead_unfounded", B, 180, "flags", lambda flags: flags | FLAG_DEAD),
    "called a dead letter of another subject": called_dead_and_foreign,
    "a batch twice": batch_twice(A, 70),
    "an id twice": id_twice(A, 83, 81),
    "a watermark of 2^40": restated("watermark", A, 90, "high_watermark", lambda _: 1 << 40),
    "a watermark that goes back": restated("watermark", A, 100, "high_watermark", lambda _: 800),
    "a watermark that stands still": watermark_still,
    "created in ten years": created_ahead(B, 142),
    "requeued for ten years": progressed("progress", FrameKind.NACK, C, 38, _in_ten_years),
    "a hole in pull sequences": hole_in_pull_sequences,
    "unacked for days": unacked_for_days,
    "a time in ten years": restated("time", B, 110, "timestamp_ms", lambda ms: ms + TEN_YEARS_MS),
    "a time two hours ahead": restated("time", B, 120, "timestamp_ms", lambda ms: ms + 7_200_000),
    "a time two hours back": restated("time", B, 130, "timestamp_ms", lambda ms: ms - 7_200_000),
    "a position of 10^9": position_behind_all,
    "passed though it gets such": passed_unseen,
    "passed beside its like": passed_beside_its_like,
    "an epoch nobody began": no_epoch_frame,
    "an older epoch": restated("epoch", A, 450, "epoch", lambda _: Epoch(1, 1)),
    "an ack of nothing": progressed("progress", FrameKind.ACK, A, 17, _of_nothing),
    "a gap": gap,
    "a dead letter with another content": rewritten(
        "dead_altered", DEAD, 12, lambda data: with_properties(data, {"text": "z" * 60})
    ),
    "an original rewritten after its dead letter": other_original,
    "a dead letter that counts wrong": rewritten(
        "dead_altered", DEAD, 24, lambda data: with_properties(data, {"qmq_times": "7"})
    ),
    "a dead letter without an original": without_an_original,
    "a dead letter of what was handled": of_a_message_that_was_handled,
    "a dead letter twice": dead_twice,
    "a dead letter too few": dead_letter_less,
}


# Wrong on the slave alone, with every CRC and chain right.


def other_payload(subject: str, sequence: int) -> Plant:
    return rewritten("different", subject, sequence, lambda data: with_properties(data, {"text": "z" * 60}))


def other_text_of_one_crc(frames: list[Draft]) -> Expected:
    """Among 40 bits, some combination of flips keeps the CRC-32: header and chain stay the same."""
    frame = frame_of(frames, A, 240)
    at = frame.body.index(b"x" * 40)
    due, known = crc32(frame.body), dict[int, tuple[int, int]]()
    for number in range(40):
        left, flips = crc32(_flipped(frame.body, at, 1 << number)) ^ due, 1 << number
        while left and (bit := left.bit_length()) in known:
            left, flips = left ^ known[bit][0], flips ^ known[bit][1]
        if not left:
            break
        known[left.bit_length()] = left, flips
    frame.body = _flipped(frame.body, at, flips)
    assert crc32(frame.body) == due
    return [("different", frame, 240)]


def _flipped(body: bytes, at: int, flips: int) -> bytes:
    changed = bytearray(body)
    for number in range(flips.bit_length()):
        changed[at + number] ^= flips >> number & 1
    return bytes(changed)


def batch_twice_amid(frames: list[Draft]) -> Expected:
    """All later batches of the subject have other sequences."""
    there = frame_of(frames, A, 150)
    again = in_place_of(there, frame_of(frames, A, 70), first_sequence=150)
    frames.insert(frames.index(there), again)
    for frame in frames[frames.index(there) :]:
        frame.first_sequence += again.count * (frame.kind == FrameKind.MESSAGES and frame.subject == A)
    return [("batch_twice", again, None), ("shifted", again, None)]


def batch_less(frames: list[Draft]) -> Expected:
    """Its pulls and acks are there."""
    return _less(frames, frame_of(frames, B, 150))


def pull_less(frames: list[Draft]) -> Expected:
    return _less(frames, nth(frames, FrameKind.PULL, A, 15))


def _less(frames: list[Draft], gone: Draft) -> Expected:
    """Remove a frame. The finding of the later ones is at the other copy's place of the next one."""
    at = frames.index(gone)
    del frames[at]
    return [("missing", gone, None), ("shifted", replace(frames[at]), None)]


MOVED: dict[str, Plant] = {
    "a batch twice": batch_twice_amid,
    "a batch too few": batch_less,
    "a pull too few": pull_less,
}
"""Each alone: all later frames move."""


def _position_at_the_end(*entries: tuple[int, int, int]) -> Plant:
    def plant(frames: list[Draft]) -> Expected:
        body = encode_progress("g", "", entries)
        frames.append(in_place_of(frames[-1], nth(frames, FrameKind.POSITION, A, 0), body=body))
        return [("unrecorded", frames[-1], None)]

    return plant


WITHOUT_A_COMMAND: dict[str, Plant] = {
    "a group forgotten": _position_at_the_end(),
    "a group put to its end": _position_at_the_end((200, 0, 0)),
}
"""Wrong on both copies, by the metaserver's audit trail."""


RIGHT_BUT_OTHER: dict[str, Plant] = {
    "another payload": other_payload(A, 206),
    "another text of one CRC": other_text_of_one_crc,
    # Labels end with their own CRC-32, so the body's CRC and the chain stay the same for any labels.
    "another label": relabelled(("labels", "different"), A, 214, label_of(("pay",), None)),
    "another ack": progressed("different", FrameKind.ACK, A, 22, lambda entry, _: (entry[0], entry[1] - 1, entry[2])),
    "another time": restated("different", B, 230, "timestamp_ms", lambda ms: ms + 1),
}


# Wrong on both copies of a delay group. Its message numbers are offsets, so no frame may move.


def _outcomes(frames: list[Draft]) -> dict[tuple[int, int], tuple[Draft, Outcome]]:
    """Return the outcome of each settled batch, and its frame."""
    found: dict[tuple[int, int], tuple[Draft, Outcome]] = {}
    for frame in frames:
        if frame.kind == FrameKind.SETTLED:
            for producer, batch, outcome in decode_settled(frame.body, frame.count):
                found.setdefault((producer, batch), (frame, Outcome(outcome)))
    return found


def _plan_of(frames: list[Draft], subject: str) -> tuple[Draft, Draft, list[int]]:
    """Return the first dispatch frame of a subject with a stored batch, the frame that settles it, and its messages'
    numbers. Messages of a batch that was not stored are planned again.
    """
    outcomes = _outcomes(frames)
    for plan in frames:
        if plan.kind == FrameKind.DISPATCH and plan.subject == subject:
            settled, outcome = outcomes[plan.producer, plan.batch]
            if outcome == Outcome.STORED:
                return plan, settled, [at for at, _ in decode_dispatch(plan.body, plan.count)[1]]
    raise LookupError(f"no batch of {subject} was stored")


def _erase(frame: Draft) -> None:
    """Put a frame without effect in this one's place."""
    frame.kind, frame.count, frame.producer, frame.batch = FrameKind.EPOCH, 0, 0, 0
    frame.body = b"{}".ljust(len(frame.body))


def dispatch_less(frames: list[Draft]) -> Expected:
    """Its messages came in a carry frame of one, and in a messages frame as a whole."""
    plan, settled, numbers = _plan_of(frames, "order.unpaid")
    _erase(plan)
    stored = [frame for frame in frames if frame.kind in (FrameKind.MESSAGES, FrameKind.CARRY)]
    homes = [max((frame for frame in stored if frame.at <= number), key=lambda frame: frame.at) for number in numbers]
    expected: Expected = [("unplanned", settled, None)]
    for at, (home, number) in enumerate(zip(homes, numbers)):
        sequence = home.first_sequence + at - homes.index(home) if home.kind == FrameKind.MESSAGES else number
        expected.append(("unsent", home, sequence))
    return expected


def planned_again(frames: list[Draft]) -> Expected:
    """The plan has a number of its own, unlike the removed one: both subjects share a lane, in any order."""
    plan, _, numbers = _plan_of(frames, "order.unseen")
    body = encode_dispatch("g1", encode_places([(numbers[0], plan.timestamp_ms)]))
    again = in_place_of(frames[-1], plan, body=body)
    last = max(batch for producer, batch in _outcomes(frames) if producer == plan.producer)
    again.count, again.batch = 1, last + 1
    frames.append(again)
    return [("twice", again, numbers[0])]


def refused_and_stored(frames: list[Draft]) -> Expected:
    """The refusal is a broker's answer: a batch that is given up has its outcome long after its plan."""
    plan, settled, numbers = _plan_of(frames, "order.lost")
    settled.timestamp_ms = plan.timestamp_ms
    outcomes = decode_settled(settled.body, settled.count)
    changed = [
        (*row[:2], Outcome.NOT_STORED if row[1] == plan.batch and row[0] == plan.producer else row[2])
        for row in outcomes
    ]
    settled.body = encode_settled(changed)
    return [("twice", plan, min(numbers))]


DELAYED: dict[str, Plant] = {
    "a dispatch too few": dispatch_less,
    "planned again after it was stored": planned_again,
    "recorded as not stored, and stored": refused_and_stored,
}


# Faults in the log of a broker group that lived: tests/integration/real_logs.py. Logs become no shorter, as their
# brokers stored the acknowledged point beside them.


def _earlier(frames: list[Draft], end: int, ms: int) -> None:
    """Store the first frames earlier, and create their messages earlier."""
    for frame in frames[:end]:
        frame.timestamp_ms -= ms
        if frame.kind == FrameKind.MESSAGES:
            frame.messages = [
                data[:1] + (int.from_bytes(data[1:9], "big") - ms).to_bytes(8, "big") + data[9:]
                for data in frame.messages
            ]


def lived_watermark_still(frames: list[Draft]) -> Expected:
    """The first batch was ten minutes before the others."""
    first, *others = _of_subject(frames, A)
    for frame in others:
        frame.high_watermark = first.high_watermark
    _earlier(frames, frames.index(first) + 1, 600_000)
    return [("watermark", first, 0)]


def lived_hole_in_pull_sequences(frames: list[Draft]) -> Expected:
    """The nack is right about the later numbers."""
    pull, nack = (_of_subject(frames, A, kind)[-1] for kind in (FrameKind.PULL, FrameKind.NACK))
    for frame in (pull, nack):
        group, consumer, ((first, second, third),) = decode_progress(frame.body)
        frame.body = encode_progress(group, consumer, [(first + 7, second + 7 * (frame is nack), third)])
    return [("progress", pull, None)]


def lived_unacked(frames: list[Draft]) -> Expected:
    """The consumer neither acks nor leaves. All before was two days ago."""
    pull = _of_subject(frames, "order.unpaid", FrameKind.PULL)[0]
    _erase(_of_subject(frames, "order.unpaid", FrameKind.ACK)[0])
    _erase(_of_subject(frames, "order.unpaid", FrameKind.POSITION)[-1])
    _earlier(frames, frames.index(pull) + 1, 2 * 86_400_000)
    return [("unacked", pull, 0)]


def lived_group_forgotten(frames: list[Draft]) -> Expected:
    *_, last = _of_subject(frames, "order.lost", FrameKind.POSITION)
    last.body = encode_progress("g", "", []).ljust(len(last.body), b"\0")
    return [("unrecorded", last, None)]


LIVED: dict[str, Plant] = {
    "created in ten years": created_ahead(A, 7),
    "an id twice": id_twice(A, 13, 11),
    "a batch twice": batch_twice(A, 22),
    "a watermark that goes back": restated("watermark", "order.lost", 0, "high_watermark", lambda _: 160),
    "a watermark that stands still": lived_watermark_still,
    "requeued for ten years": progressed("progress", FrameKind.NACK, A, 0, _in_ten_years),
    "a hole in pull sequences": lived_hole_in_pull_sequences,
    "an ack of nothing": progressed("progress", FrameKind.ACK, "order.unseen", 0, _of_nothing),
    "unacked for days": lived_unacked,
    "a group forgotten": lived_group_forgotten,
}
