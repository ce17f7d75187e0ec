"""Core. Claim: the name of the batch in which a row of an outbox is sent, stored in the row before the send.

    <producer id>:<number>:<term>:<broker group>        the first three hexadecimal; `claim varchar(128)`

Producer id, number and group identify the batch at the broker, which stores it once however often it is sent; they
never change. The term belongs to the leader responsible for the claim. A new leader first replaces the term with its
own; every later write of the old leader then misses the claim. A relaying producer uses a random term from RELAY_TERM
on, above all terms of leaders, and replaces terms in the same way.

Below the claims is the work of a drain in its database, one transaction at a time. Each kind may be repeated when its
outcome is unknown, because every write is conditional on the expected claim. `qmq.outbox.statements` carries it out.
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
"""Size of a producer id. A claim has 128 characters and a group's name up to 100, which leaves 13 hex digits."""
RELAY_TERM_BITS = 27
"""Size of a relay's random term. Seven hexadecimal digits are left for the term, with five for the number."""
RELAY_TERM = 1 << RELAY_TERM_BITS
CREATED_AT, CREATED_BYTES = 1, 8
"""Place of the creation time in an encoded message (`qmq.codec`)."""


class ClaimName(NamedTuple):
    """Parsed claim."""

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
        """Parse the text of a claim; raise ValueError."""
        producer, number, term, group = text.split(":", 3)
        name = cls(int(producer, 16), int(number, 16), int(term, 16), group)
        if str(name) != text or not all(0 <= part < 1 << 64 for part in name[:3]):
            raise ValueError(f"{text!r} is not a claim")
        return name


def is_relay(term: int) -> bool:
    """Return whether a term is of a relaying producer, not of a watchdog."""
    return term >= RELAY_TERM


class Candidate(NamedTuple):
    """Decoded row: its encoded message, or the `problem` that prevents sending it."""

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
        """Size in a batch, with end offset and label."""
        return len(self.data) + 16


def candidate_of(id: int, content: str | None, errors: int, now_ms: int) -> Candidate:
    """Decode a row and encode its message.

    Args:
        now_ms: time of encoding; also of creation, if the row has none.
    """
    try:
        message = decode_row(content)
        subject = check_subject(message.subject)
        if is_derived_name(subject):  # tokens need a special right for such a subject, and rows have no token
            raise InvalidName(
                f"subject {subject!r} holds the retries or dead letters of a consumer group; only Redrive sends there"
            )
        data = batch_encoder(subject, now_ms)(message)
        label = label_of_message(message)
        if created_ms := message.created_ms:
            created = created_ms.to_bytes(CREATED_BYTES, "big", signed=True)
            data = data[:CREATED_AT] + created + data[CREATED_AT + CREATED_BYTES :]
    except CallError as error:
        return Candidate(id, errors, problem=str(error) or type(error).__name__)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # no content of a row may stop other rows
        return Candidate(id, errors, problem=f"it cannot be read: {type(error).__name__}: {error}")
    return Candidate(id, errors, subject, data, label)


def batch_of(name: ClaimName, rows: Sequence[Candidate]) -> NumberedBatch:
    """Build the batch of a claim; its rows have one subject and ascending ids."""
    body = join_batch([row.data for row in rows])
    flags = 0
    if any(row.label for row in rows):
        labels = [row.label for row in rows]
        body, flags = body + encode_labels(labels), label_flags(labels)
    return NumberedBatch(name.producer, name.number, rows[0].subject, len(rows), crc32(body), flags, [body])


class Due(NamedTuple):
    """Time by the database's clock: `plus_ms` after the `clock` of a page, or after this write if that is None."""

    clock: object
    plus_ms: int


class Postponed(NamedTuple):
    """Rows that no group accepts now, with the reason. They are not read again before they are due."""

    ids: list[int]
    due: Due
    reason: str


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read unclaimed rows that are old enough, oldest first. Answer: Page."""

    after: tuple[object, int] | None
    limit: int


class Page(NamedTuple):
    """Page of rows. `after`: beginning of the next page, or None after the last one. `clock`: the database's clock, or
    None.
    """

    rows: list[Candidate]
    after: tuple[object, int] | None
    clock: object = None


@dataclass(frozen=True, slots=True)
class ClaimRows:
    """Claim rows for their batches; park invalid ones, postpone those that no group accepts now.

    `ordered`: claims that get all of their rows or none, and none while another drain has a claim for their group.
    `known`: claims of this drain.

    Answer: ids by claim, without rows that are locked or gone.
    """

    claims: dict[str, list[int]]
    parked: list[tuple[int, str]]
    postponed: list[Postponed]
    ordered: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()


class Released(NamedTuple):
    """Rows of a claim that were certainly not stored. They are claimed again when due, with `failures` more errors."""

    claim: str
    ids: list[int]
    due: Due
    reason: str
    failures: int


class Settled(NamedTuple):
    """Finished claim: stored rows are deleted, the others parked with their reasons."""

    claim: str
    stored: list[int]
    parked: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class SettleClaims:
    """Store the outcomes of claims. Rows with another claim by now stay unchanged. Answer: None."""

    settled: list[Settled]
    released: list[Released]


@dataclass(frozen=True, slots=True)
class ReadClaims:
    """Read a bounded number of claims, after `after` in text order; "" reads from the beginning, the empty claim
    included. Answer: list of Known.
    """

    after: str = ""


class Known(NamedTuple):
    """Claim in the database. `age_ms`: time since it was first written, by the database's clock."""

    claim: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class AdoptClaims:
    """Replace the claim `old` by `new`. Answer: its rows by id; none if the claim is gone."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Disown:
    """Park rows with a foreign claim, up to a bound, for an operator's decision. Answer: their number."""

    claim: str
    reason: str


Work = ReadPage | ClaimRows | SettleClaims | ReadClaims | AdoptClaims | Disown
