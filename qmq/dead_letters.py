"""Core. What a dead letter is: the copy of a message that a consumer group could not handle, with what became of that.

The broker stores it in the same log as its original, right in front of the ack of that one, which says `DEAD`
(qmq.log.progress_frame). Producer id and batch number say of which message it is the copy. The audit compares.
"""

from __future__ import annotations

from hashlib import blake2b

from qmq.codec import with_properties
from qmq.errors import InvalidMessage
from qmq.message import EXPIRES_AFTER, TIMES
from qmq.subjects import dead_letter_subject, parse_derived, retry_subject

REASON, SEQUENCE = "qmq_deadReason", "qmq_deadSequence"
SUBJECT, GROUP = "qmq_deadSubject", "qmq_deadGroup"
"""Of a dead letter in a subject that an operator chose: the real subject and the consumer group that gave it up."""
PRUNER = "/expired"
"""The consumer of what expires and becomes a dead letter (broker.subject_limits); a slash is in no name."""
REDRIVER = "qmq.redrive"
"""The consumer group of dead-letter subjects that gives back: what it has acked is no dead letter any more."""
FATE = TIMES, REASON, SEQUENCE, SUBJECT, GROUP
"""Properties that a broker adds to a message that becomes a dead letter; a fingerprint has them in this order."""
_NO_FATE = dict.fromkeys((*FATE, EXPIRES_AFTER), "")


def delivered(attempts: int) -> str:
    """Say how often, as the reason of a dead letter begins."""
    return "delivered once" if attempts == 1 else f"delivered {attempts} times"


def letters_producer(subject: str, group: str) -> int:
    """Return the producer id of the dead letters that a group makes of a subject's messages; the batch number of each
    is its original's sequence. The group's retry subject has other ones than the real subject."""
    data = dead_letter_subject(subject, group).encode() + (b"" if parse_derived(subject) is None else b"\0mailbox")
    return int.from_bytes(blake2b(data, digest_size=8).digest()) or 1


def original_subject(whose: tuple[str, str], producer: int) -> str | None:
    """Return in which subject the original of a dead letter of (real subject, consumer group) lies; None if no broker
    made this message."""
    sources = whose[0], retry_subject(*whose)
    return next((one for one in sources if letters_producer(one, whose[1]) == producer), None)


def with_fate(message: bytes, times: int, reason: str, sequence: int, whose: tuple[str, str] | None = None) -> bytes:
    """Return the copy of an encoded message. Whatever these bytes are, they are kept as they came.

    Args:
        whose: real subject and consumer group, for a copy in a subject that an operator chose.
    """
    fate = {TIMES: str(times), REASON: reason, SEQUENCE: str(sequence)}
    if whose is not None:
        fate |= {SUBJECT: whose[0], GROUP: whose[1]}
        if EXPIRES_AFTER.encode() in message:
            fate[EXPIRES_AFTER] = ""  # or it would expire again before anybody has looked at it
    try:
        return with_properties(message, fate)
    except InvalidMessage:
        return message


def fingerprint(message: bytes) -> bytes:
    """Return a hash, of 8 bytes, that an encoded message shares with its dead letter."""
    try:
        message = with_properties(message, _NO_FATE)
    except InvalidMessage:
        pass
    return blake2b(message, digest_size=8).digest()
