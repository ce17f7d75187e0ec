"""Core. A claim: what a row of an outbox says about the batch it travels in, written down before the batch is sent.

    <producer id>:<number>:<term>:<broker group>        the first three hexadecimal; `claim varchar(128)`

Producer id, number and group name the batch at the broker, which stores it once however often it is sent; they never
change. The term is that of the leader who looks after it: a new leader puts its own in its place before it does
anything else, and every later write of the old one looks for a claim that is not there any more. A producer that
relays has a random term from RELAY_TERM on, where no leader's comes: it, too, puts its own in the place of another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qmq.client.batch_life import NumberedBatch
from qmq.codec import batch_encoder, encode_labels, join_batch, label_of_message
from qmq.crc import crc32
from qmq.errors import CallError, InvalidName
from qmq.log.frame import label_flags
from qmq.outbox.row import decode_row
from qmq.subjects import check_subject, is_derived_name

PRODUCER_BITS = 52
"""A claim has 128 characters, a group's name up to 100: 13 hexadecimal digits are left for the producer."""
RELAY_TERM_BITS = 27
"""Seven hexadecimal digits are left for the term, with five for the number."""
RELAY_TERM = 1 << RELAY_TERM_BITS
CREATED_AT, CREATED_BYTES = 1, 8
"""Where an encoded message has its moment of creation (qmq.codec)."""


class ClaimName(NamedTuple):
    """What a claim's text says."""

    producer: int
    number: int
    term: int
    group: str

    def __str__(self) -> str:
        return f"{self.producer:x}:{self.number:x}:{self.term:x}:{self.group}"

    def of_term(self, term: int) -> ClaimName:
        return self._replace(term=term)

    @classmethod
    def parse(cls, text: str) -> ClaimName:
        """Read what `str` wrote; raises ValueError."""
        producer, number, term, group = text.split(":", 3)
        name = cls(int(producer, 16), int(number, 16), int(term, 16), group)
        if str(name) != text or not all(0 <= part < 1 << 64 for part in name[:3]):
            raise ValueError(f"{text!r} is no claim of ours")
        return name


def is_relay(term: int) -> bool:
    """Whether it is the term of a producer, not of a watchdog's leader."""
    return term >= RELAY_TERM


class Candidate(NamedTuple):
    """A row that was decoded: an encoded message, or the `problem` for which nobody can send it."""

    id: int
    errors: int
    subject: str = ""
    data: bytes = b""
    label: int = 0
    problem: str = ""

    @property
    def is_ordered(self) -> bool:
        return self.label >> 32 != 0

    @property
    def bytes(self) -> int:
        """What it takes of a batch, with its end offset and its label."""
        return len(self.data) + 16


def candidate_of(id: int, content: str | None, errors: int, now_ms: int) -> Candidate:
    """Decode a row and encode its message.

    Args:
        now_ms: moment of encoding; of creation as well, if the row does not have it.
    """
    try:
        message = decode_row(content)
        subject = check_subject(message.subject)
        if is_derived_name(subject):  # a token needs a right of its own for it, and a row shows none
            raise InvalidName(f"subject {subject!r} is of what a consumer group did not get done: Redrive sends there")
        data = batch_encoder(subject, now_ms)(message)
        label = label_of_message(message)
        if created_ms := message.created_ms:
            created = created_ms.to_bytes(CREATED_BYTES, "big", signed=True)
            data = data[:CREATED_AT] + created + data[CREATED_AT + CREATED_BYTES :]
    except CallError as error:
        return Candidate(id, errors, problem=str(error) or type(error).__name__)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # whatever a row holds, it stops no other
        return Candidate(id, errors, problem=f"nobody can read it: {type(error).__name__}: {error}")
    return Candidate(id, errors, subject, data, label)


def batch_of(name: ClaimName, rows: Sequence[Candidate]) -> NumberedBatch:
    """Build the request of a claim; its rows are of one subject, in ascending order of their ids."""
    body = join_batch([row.data for row in rows])
    flags = 0
    if any(row.label for row in rows):
        labels = [row.label for row in rows]
        body, flags = body + encode_labels(labels), label_flags(labels)
    return NumberedBatch(name.producer, name.number, rows[0].subject, len(rows), crc32(body), flags, [body])
