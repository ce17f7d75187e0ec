"""Core. Dead letter: the copy of a message that a consumer group could not handle, with the reason.

The broker stores it in the log of its original, right before the original's ack with `DEAD` (`qmq.log.progress_frame`).
Producer id and batch number identify the original. The audit compares both.
"""

from __future__ import annotations

from hashlib import blake2b

from qmq.codec import Buffer, with_properties, without_body
from qmq.errors import InvalidMessage
from qmq.message import EXPIRES_AFTER, TIMES
from qmq.subjects import dead_letter_subject, parse_derived, retry_subject

REASON, SEQUENCE = "qmq_deadReason", "qmq_deadSequence"
SUBJECT, GROUP = "qmq_deadSubject", "qmq_deadGroup"
"""Properties of a dead letter in a subject chosen by an operator: the real subject, and the consumer group that gave it
up.
"""
PRUNER = "/expired"
"""Consumer of expired messages that become dead letters (`broker.subject_limits`); no name contains a slash."""
REDRIVER = "qmq.redrive"
"""Consumer group of dead-letter subjects for redriving: messages acked by it are no longer dead letters."""
FATE = TIMES, REASON, SEQUENCE, SUBJECT, GROUP
"""Properties that brokers add to dead letters. Their order decides the bytes that a fingerprint hashes."""
DIGITS_MAX = 9
"""Limit of the digits of a number in a message, because Python parses no number of thousands of digits."""
_NO_FATE = dict.fromkeys((*FATE, EXPIRES_AFTER), "")


def earlier_deliveries(times: object) -> int:
    """Return the deliveries of a message before it came to its group's mailbox, by its property `qmq_times`."""
    text = str(times)
    is_number = text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX
    return max(0, int(text) - 1) if is_number else 0


def delivered(attempts: int) -> str:
    """Return the number of deliveries as words, for the beginning of a reason."""
    return "delivered once" if attempts == 1 else f"delivered {attempts} times"


def letters_producer(subject: str, group: str) -> int:
    """Return the producer id of a group's dead letters of a subject; their batch numbers are the originals' sequences.

    The group's retry subject has another producer id than the real subject.
    """
    data = dead_letter_subject(subject, group).encode() + (b"" if parse_derived(subject) is None else b"\0mailbox")
    return int.from_bytes(blake2b(data, digest_size=8).digest()) or 1


def original_subject(owner: tuple[str, str], producer: int) -> str | None:
    """Return the subject of the original of a dead letter of (real subject, consumer group); None if no broker
    made it.
    """
    sources = owner[0], retry_subject(*owner)
    return next((source for source in sources if letters_producer(source, owner[1]) == producer), None)


def with_fate(message: Buffer, times: int, reason: str, sequence: int, owner: tuple[str, str] | None = None) -> bytes:
    """Return the dead letter of an encoded message, which may be invalid; its bytes are kept.

    Args:
        owner: real subject and consumer group, for a copy in a chosen subject.
    """
    fate = {TIMES: str(times), REASON: reason, SEQUENCE: str(sequence)}
    try:
        if owner is not None:
            fate |= {SUBJECT: owner[0], GROUP: owner[1]}
            if EXPIRES_AFTER.encode() in without_body(message):
                fate[EXPIRES_AFTER] = ""  # otherwise it would expire again before an operator sees it
        return with_properties(message, fate)
    except InvalidMessage:
        return bytes(message)


def fingerprint(message: bytes) -> bytes:
    """Return a hash, of 8 bytes, that an encoded message shares with its dead letter."""
    try:
        message = with_properties(message, _NO_FATE)
    except InvalidMessage:
        pass
    return blake2b(message, digest_size=8).digest()
