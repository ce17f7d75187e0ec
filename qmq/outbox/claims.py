"""Core. A claim: the batch that a row of an outbox travels in, stored in the row before the batch is sent.

    <producer id>:<number>:<term>:<broker group>        the first three hexadecimal; `claim varchar(128)`

Producer id, number and group identify the batch at the broker, which stores it once however often it is sent; they
never change. The term belongs to the leader responsible for the claim. A new leader first replaces the term with its
own; every later write of the old leader then misses the claim. A relaying producer uses a random term from RELAY_TERM
on, above all terms of leaders, and replaces terms in the same way.

Below the claims is the work that a drain gives its database, one transaction at a time. Each kind may be repeated when
its outcome is unknown: every write is conditional on the expected claim. `qmq.outbox.statements` carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qmq.client.batch import NumberedBatch
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


class Due(NamedTuple):
    """A moment by the database's clock: `plus_ms` after `clock`, which it clock with a page; None: after this write."""

    clock: object
    plus_ms: int


class Postponed(NamedTuple):
    """Rows that nobody takes now, for a reason; nobody looks at them before they are due."""

    ids: list[int]
    due: Due
    reason: str


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read rows that nobody claimed and that are old enough, the oldest first. Answer: Page."""

    after: tuple[object, int] | None
    limit: int


class Page(NamedTuple):
    """`after`: where the next page begins; None: nothing is behind this one. `clock`: the database's clock, or None."""

    rows: list[Candidate]
    after: tuple[object, int] | None
    clock: object = None


@dataclass(frozen=True, slots=True)
class ClaimRows:
    """Claim rows, each for its batch; park those that cannot be sent, postpone those that nobody takes now.

    `ordered`: claims that get all of their rows or none, and none while another drain has a claim for their group.
    `known`: claims of this drain.

    Answer: for each claim the ids that got it. Rows that others lock, or that are gone, are left out.
    """

    claims: dict[str, list[int]]
    parked: list[tuple[int, str]]
    postponed: list[Postponed]
    ordered: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()


class Released(NamedTuple):
    """A claim's rows that were certainly not stored: to be claimed anew when they are due, with so many more errors."""

    claim: str
    ids: list[int]
    due: Due
    reason: str
    failures: int


class Settled(NamedTuple):
    """A claim that came to its end: rows whose messages are stored go, others are parked, each for its reason."""

    claim: str
    stored: list[int]
    parked: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class SettleClaims:
    """Write down what became of claims. Rows whose claim is another by now are left alone. Answer: None."""

    settled: list[Settled]
    released: list[Released]


@dataclass(frozen=True, slots=True)
class ReadClaims:
    """Which claims are there, up to a bound, those after `after` in order of their texts; "": all, also one without
    text. Answer: list of Known."""

    after: str = ""


class Known(NamedTuple):
    """A claim in the database. `age_ms`: since it was first written, by the database's clock."""

    claim: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Put the claim `new` in the place of `old`. Answer: its rows, in order of ids; none: it is there no more."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Disown:
    """Park rows with a claim that none of ours wrote, up to a bound; a person decides. Answer: how many."""

    claim: str
    reason: str


Work = ReadPage | ClaimRows | SettleClaims | ReadClaims | TakeOver | Disown
