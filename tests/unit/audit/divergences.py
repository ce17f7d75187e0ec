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
from qmq.log.progress_frame import NUMBERS_END, PASSED, decode_progress, encode_progress
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


# Wrong on both copies.


def undecodable(frames: list[Draft]) -> Expected:
    whole = a_message(A, 33)
    return [("undecodable", change_message(frames, A, 33, whole[:-5] + bytes([255]) + whole[-4:]), 33)]


def torn_fields(frames: list[Draft]) -> Expected:
    return [("undecodable", change_message(frames, A, 47, a_message(A, 47)[:-3]), 47)]


def body_without_flag(frames: list[Draft]) -> Expected:
    message = bytearray(a_message(A, 34))
    message[0] &= ~FLAG_BODY
    return [("undecodable", change_message(frames, A, 34, bytes(message)), 34)]


def body_in_properties(frames: list[Draft]) -> Expected:
    """Its stated length of properties ends in its body."""
    message = bytearray(a_message(A, 38))
    message[message.index(b"\0\x04text") - 1] += 1
    return [("undecodable", change_message(frames, A, 38, bytes(message)), 38)]


def foreign(frames: list[Draft]) -> Expected:
    message = encode_message(Message("order.deleted", {"text": "x"}, id=f"{A}-55", tags=("odd",)), 1)
    return [("foreign", change_message(frames, A, 55, message), 55)]


def no_labels(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, B, 62)
    labels = frame.labels
    labels[frame.of(62)] = 0
    frame.labels = labels
    return [("labels", frame, 62)]


def order_untold(frames: list[Draft]) -> Expected:
    """Message and label are right, but brokers deliver without the requested order."""
    message = encode_message(Message(A, {"text": "y"}, id=f"{A}-174", tags=("even", "more"), order_key="k"), 1)
    frame = change_message(frames, A, 174, message)
    labels = frame.labels
    labels[frame.of(174)] = label_of(("even", "more"), "k")
    frame.labels = labels
    frame.flags &= ~FLAG_ORDERED
    return [("labels", frame, 174)]


def order_of_nothing(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, C, 4 * 46)
    frame.flags |= FLAG_ORDERED
    return [("labels", frame, 4 * 46)]


def called_dead(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, B, 180)
    frame.flags |= FLAG_DEAD
    return [("dead_unfounded", frame, 180)]


def called_dead_and_foreign(frames: list[Draft]) -> Expected:
    """Only a dead letter in a chosen subject may keep its original's subject."""
    message = encode_message(Message("order.deleted", {"text": "x"}, id=f"{B}-195", tags=("odd",)), 1)
    frame = change_message(frames, B, 195, message)
    frame.flags |= FLAG_DEAD
    return [("dead_unfounded", frame, 190), ("foreign", frame, 195)]


def batch_twice(frames: list[Draft]) -> Expected:
    again = in_place_of(frames[-1], frame_of(frames, A, 70))
    again.first_sequence = 600
    frames.append(again)
    frames.append(in_place_of(again, nth(frames, FrameKind.POSITION, A, 0), subject="behind.it"))
    return [("batch_twice", again, 600)]


def id_twice(frames: list[Draft]) -> Expected:
    message = encode_message(Message(A, {"text": "y"}, id=f"{A}-81", tags=("odd",)), 1)
    return [("id_twice", change_message(frames, A, 83, message), 83)]


def watermark_ahead(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, A, 90)
    frame.high_watermark = 1 << 40
    return [("watermark", frame, 90)]


def watermark_back(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, A, 100)
    frame.high_watermark = 800
    return [("watermark", frame, 100)]


def watermark_still(frames: list[Draft]) -> Expected:
    """It moves on in the next epoch."""
    frame = frame_of(frames, A, 300)
    for later in frames[frames.index(frame) :]:
        if later.epoch == frame.epoch:
            later.high_watermark = min(later.high_watermark, frame.high_watermark)
    return [("watermark", frame, 300)]


def created_ahead(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, B, 142)
    message = bytearray(frame.messages[2])
    message[1:9] = (frame.timestamp_ms + TEN_YEARS_MS).to_bytes(8, "big")
    return [("time", change_message(frames, B, 142, bytes(message)), 142)]


def requeued_for_years(frames: list[Draft]) -> Expected:
    frame = nth(frames, FrameKind.NACK, C, 38)
    ((begin, end, _),) = decode_progress(frame.body).entries
    frame.body = encode_progress("k", "e", [(begin, end, frame.timestamp_ms + TEN_YEARS_MS)])
    return [("progress", frame, None)]


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


def time_ahead(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, B, 110)
    frame.timestamp_ms += TEN_YEARS_MS
    return [("time", frame, 110)]


def time_apart(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, B, 120)
    frame.timestamp_ms += 7_200_000
    return [("time", frame, 120)]


def time_back(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, B, 130)
    frame.timestamp_ms -= 7_200_000
    return [("time", frame, 130)]


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


def older_epoch(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, A, 450)
    frame.epoch = Epoch(1, 1)
    return [("epoch", frame, 450)]


def ack_of_nothing(frames: list[Draft]) -> Expected:
    frame = nth(frames, FrameKind.ACK, A, 17)
    frame.body = encode_progress("g", "c", [(PULL + 10**6, PULL + 10**6 + 10, 0)])
    return [("progress", frame, None)]


def gap(frames: list[Draft]) -> Expected:
    for frame in frames:
        if frame.kind == FrameKind.MESSAGES and frame.subject == B and frame.first_sequence >= 500:
            frame.first_sequence += 4
    return [("sequence", frame_of(frames, B, 504), 504)]


def other_dead_letter(frames: list[Draft]) -> Expected:
    message = with_properties(frame_of(frames, DEAD, 12).messages[0], {"text": "z" * 60})
    return [("dead_altered", change_message(frames, DEAD, 12, message), 12)]


def other_original(frames: list[Draft]) -> Expected:
    """The message was rewritten after it became a dead letter, which is the only evidence."""
    message = with_properties(a_message(C, 4 * 20 + 1), {"text": "z" * 60})
    change_message(frames, C, 4 * 20 + 1, message)
    return [("dead_altered", frame_of(frames, DEAD, 20), 20)]


def other_times(frames: list[Draft]) -> Expected:
    message = with_properties(frame_of(frames, DEAD, 24).messages[0], {"qmq_times": "7"})
    return [("dead_altered", change_message(frames, DEAD, 24, message), 24)]


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


TWO_SIDED: dict[str, Plant] = {
    "a message that is no UTF-8": undecodable,
    "a message that is cut": torn_fields,
    "a body without its flag": body_without_flag,
    "a body that begins in the properties": body_in_properties,
    "of another subject": foreign,
    "labels that are zero": no_labels,
    "an order key and no flag": order_untold,
    "a flag and no order key": order_of_nothing,
    "called a dead letter": called_dead,
    "called a dead letter of another subject": called_dead_and_foreign,
    "a batch twice": batch_twice,
    "an id twice": id_twice,
    "a watermark of 2^40": watermark_ahead,
    "a watermark that goes back": watermark_back,
    "a watermark that stands still": watermark_still,
    "created in ten years": created_ahead,
    "requeued for ten years": requeued_for_years,
    "a hole in pull sequences": hole_in_pull_sequences,
    "unacked for days": unacked_for_days,
    "a time in ten years": time_ahead,
    "a time two hours ahead": time_apart,
    "a time two hours back": time_back,
    "a position of 10^9": position_behind_all,
    "passed though it gets such": passed_unseen,
    "passed beside its like": passed_beside_its_like,
    "an epoch nobody began": no_epoch_frame,
    "an older epoch": older_epoch,
    "an ack of nothing": ack_of_nothing,
    "a gap": gap,
    "a dead letter with another content": other_dead_letter,
    "an original rewritten after its dead letter": other_original,
    "a dead letter that counts wrong": other_times,
    "a dead letter without an original": without_an_original,
    "a dead letter of what was handled": of_a_message_that_was_handled,
    "a dead letter twice": dead_twice,
    "a dead letter too few": dead_letter_less,
}


# Wrong on the slave alone, with every CRC and chain right.


def other_payload(subject: str, sequence: int) -> Plant:
    def plant(frames: list[Draft]) -> Expected:
        message = with_properties(a_message(subject, sequence), {"text": "z" * 60})
        return [("different", change_message(frames, subject, sequence, message), sequence)]

    return plant


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


def other_label(frames: list[Draft]) -> Expected:
    """Labels end with their own CRC-32, so the body's CRC and the chain stay the same for any labels."""
    frame = frame_of(frames, A, 214)
    labels = frame.labels
    labels[frame.of(214)] = label_of(("pay",), None)
    frame.labels = labels
    return [("labels", frame, 214), ("different", frame, 214)]


def other_ack(frames: list[Draft]) -> Expected:
    frame = nth(frames, FrameKind.ACK, A, 22)
    frame.body = encode_progress("g", "c", [(PULL + 220, PULL + 229, 0)])
    return [("different", frame, None)]


def other_time(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, B, 230)
    frame.timestamp_ms += 1
    return [("different", frame, 230)]


def one_frame_more(frames: list[Draft]) -> Expected:
    """All later frames move on."""
    at = frames.index(frame_of(frames, A, 480))
    body = encode_progress("more", "", [(0, 0, 0)])
    frame = in_place_of(frames[at], nth(frames, FrameKind.POSITION, A, 0), body=body)
    frames.insert(at, frame)
    return [("extra", frame, None), ("shifted", frames[at + 1], None)]


def one_frame_less(frames: list[Draft]) -> Expected:
    frame = nth(frames, FrameKind.ACK, A, 57)
    at = frames.index(frame)
    del frames[at]
    return [("missing", frame, None), ("shifted", frames[at], None)]


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
    "another label": other_label,
    "another ack": other_ack,
    "another time": other_time,
}


# Wrong on both copies of a delay group, whose message numbers are offsets: no frame may move.


def _plan_of(frames: list[Draft], subject: str) -> tuple[Draft, Draft, list[int]]:
    """Return the first dispatch frame of a subject, the frame that settles it, and its messages' numbers."""
    plan = nth(frames, FrameKind.DISPATCH, subject, 0)
    settled = next(
        frame
        for frame in frames
        if frame.kind == FrameKind.SETTLED
        and (plan.producer, plan.batch) in [row[:2] for row in decode_settled(frame.body, frame.count)]
    )
    return plan, settled, [at for at, _ in decode_dispatch(plan.body, plan.count)[1]]


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
    plan, _, numbers = _plan_of(frames, "order.unseen")
    body = encode_dispatch("g1", encode_places([(numbers[0], plan.timestamp_ms)]))
    again = in_place_of(frames[-1], plan, body=body)
    again.count, again.batch = 1, plan.batch + 1
    frames.append(again)
    return [("twice", again, numbers[0])]


def refused_and_stored(frames: list[Draft]) -> Expected:
    plan, settled, numbers = _plan_of(frames, "order.lost")
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


def _of_subject(frames: list[Draft], subject: str, kind: FrameKind = FrameKind.MESSAGES) -> list[Draft]:
    return [frame for frame in frames if frame.kind == kind and frame.subject == subject]


def _earlier(frames: list[Draft], end: int, ms: int) -> None:
    """Store the first frames earlier, and create their messages earlier."""
    for frame in frames[:end]:
        frame.timestamp_ms -= ms
        if frame.kind == FrameKind.MESSAGES:
            frame.messages = [
                data[:1] + (int.from_bytes(data[1:9], "big") - ms).to_bytes(8, "big") + data[9:]
                for data in frame.messages
            ]


def lived_created_ahead(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, A, 7)
    messages = frame.messages
    messages[2] = messages[2][:1] + (frame.timestamp_ms + TEN_YEARS_MS).to_bytes(8, "big") + messages[2][9:]
    frame.messages = messages
    return [("time", frame, 7)]


def lived_id_twice(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, A, 13)
    messages = frame.messages
    messages[3] = messages[1]
    frame.messages = messages
    return [("id_twice", frame, 13)]


def lived_batch_twice(frames: list[Draft]) -> Expected:
    *_, last = _of_subject(frames, A)
    again = in_place_of(last, frame_of(frames, A, 22), first_sequence=last.first_sequence + last.count)
    frames.insert(frames.index(last) + 1, again)
    return [("batch_twice", again, again.first_sequence)]


def lived_watermark_back(frames: list[Draft]) -> Expected:
    frame = frame_of(frames, "order.lost", 0)
    frame.high_watermark = 160
    return [("watermark", frame, 0)]


def lived_watermark_still(frames: list[Draft]) -> Expected:
    """The first batch was ten minutes before the others."""
    first, *others = _of_subject(frames, A)
    for frame in others:
        frame.high_watermark = first.high_watermark
    _earlier(frames, frames.index(first) + 1, 600_000)
    return [("watermark", first, 0)]


def lived_requeued_for_years(frames: list[Draft]) -> Expected:
    frame = _of_subject(frames, A, FrameKind.NACK)[0]
    group, consumer, ((begin, end, _),) = decode_progress(frame.body)
    frame.body = encode_progress(group, consumer, [(begin, end, frame.timestamp_ms + TEN_YEARS_MS)])
    return [("progress", frame, None)]


def lived_hole_in_pull_sequences(frames: list[Draft]) -> Expected:
    """The nack is right about the later numbers."""
    pull, nack = (_of_subject(frames, A, kind)[-1] for kind in (FrameKind.PULL, FrameKind.NACK))
    for frame in (pull, nack):
        group, consumer, ((first, second, third),) = decode_progress(frame.body)
        frame.body = encode_progress(group, consumer, [(first + 7, second + 7 * (frame is nack), third)])
    return [("progress", pull, None)]


def lived_ack_of_nothing(frames: list[Draft]) -> Expected:
    frame = _of_subject(frames, "order.unseen", FrameKind.ACK)[0]
    group, consumer, ((begin, end, state),) = decode_progress(frame.body)
    frame.body = encode_progress(group, consumer, [(begin + 10**6, end + 10**6, state)])
    return [("progress", frame, None)]


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
    "created in ten years": lived_created_ahead,
    "an id twice": lived_id_twice,
    "a batch twice": lived_batch_twice,
    "a watermark that goes back": lived_watermark_back,
    "a watermark that stands still": lived_watermark_still,
    "requeued for ten years": lived_requeued_for_years,
    "a hole in pull sequences": lived_hole_in_pull_sequences,
    "an ack of nothing": lived_ack_of_nothing,
    "unacked for days": lived_unacked,
    "a group forgotten": lived_group_forgotten,
}
