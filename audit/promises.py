"""Core. Judges of the producers' journal: an acknowledged message that a copy lacks, or has with another content.

fact of key       payload
COUNTS            {whole, broken: number of journal lines with a message, and without}
UNREAD            reason why a journal file or a copy was not read
BLOCK:SUBJECT     of piece LINES: [Line] of BLOCK_MESSAGES sequences of a subject; of other pieces: [Stored] of them
"""

from __future__ import annotations

import json
import pickle
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from qmq.audit.facts import ALL
from qmq.audit.findings import BOTH, FINDING, FINDINGS_MAX, MORE, UNREAD, FindingKind, Row, finding_row
from qmq.audit.messages import CONTENT_BYTES
from qmq.audit.plan import Fact, Judged

BLOCK_MESSAGES = 1 << 18
"""Sequences per judge: their lines take 70 MB of memory at most."""
LINES = -1
"""Stands for the piece in facts with journal lines, so that they are sorted before the messages."""
COUNTS = "lines"
LISTED_MAX = 20 * FINDINGS_MAX
TEXTS = {
    FindingKind.LOST: "acknowledged, and not in this copy",
    FindingKind.ALTERED: "acknowledged, and stored with another content",
}


def block_key(subject: str, sequence: int) -> str:
    return f"{sequence // BLOCK_MESSAGES}:{subject}"


Line = tuple[int, str, str | None]
"""Sequence, id, and hash of the content or None, of a journal line's message. A plain tuple is pickled faster."""


class Stored(NamedTuple):
    """Messages of consecutive sequences; of each, its id, or None, and CONTENT_BYTES of `contents`."""

    first: int
    ids: list[str | None]
    contents: bytes

    def by_block(self, subject: str) -> Iterator[tuple[str, Stored]]:
        """Yield the messages of each block: a frame may reach over the end of one."""
        at = 0
        while at < len(self.ids):
            first = self.first + at
            behind = at + BLOCK_MESSAGES - first % BLOCK_MESSAGES
            contents = self.contents[CONTENT_BYTES * at : CONTENT_BYTES * behind]
            yield block_key(subject, first), Stored(first, self.ids[at:behind], contents)
            at = behind


@dataclass(frozen=True, slots=True)
class Due:
    """Messages that the copies must have.

    `firsts`: first sequence by copy and subject; `are_all`: all messages of other subjects are due. The logs are read
    from `begin` on. `run`: the earlier run that compared the messages before.
    """

    firsts: Mapping[str, Mapping[str, int]]
    are_all: bool
    begin: int = 0
    run: str = ""

    def first_of(self, copy: str, subject: str) -> int | None:
        """Return the first due sequence of a subject on a copy, or None if none is due."""
        return self.firsts[copy].get(subject, 0 if self.are_all else None)


class Promise(NamedTuple):
    """Rule of a broker group: which copies must have an acknowledged message."""

    copies: tuple[str, ...]
    due: Due
    ends: Mapping[str, Mapping[str, int]]
    min_copies: int

    def lost_on(self, subject: str, sequence: int, lacking: Sequence[str]) -> list[str]:
        """Return the copies of `lacking` that lost a message: without those that ended before it when they were frozen,
        if enough others have it.
        """
        has_enough = len(self.copies) - len(lacking) >= self.min_copies
        return [name for name in lacking if not has_enough or sequence < self.ends[name].get(subject, 0)]


class _Block:
    """Lines of a block of one subject's sequences, and which copies have their messages."""

    def __init__(self, promise: Promise, subject: str) -> None:
        self._promise = promise
        self._subject = subject
        self._lines: list[Line] = []
        self._sequences: list[int] = []
        self._met: dict[str, dict[int, str]] = {name: {} for name in promise.copies}
        """Copy -> number of the line -> hash of the stored content."""

    def take_lines(self, lines: Iterable[Line]) -> None:
        self._lines += lines

    def take_messages(self, copy: str, messages: Iterable[Stored]) -> None:
        """Match messages with the lines, all of which were taken before."""
        if not self._sequences:
            self._lines.sort(key=itemgetter(0))
            self._sequences = [line[0] for line in self._lines]
        names = self._promise.copies if copy == ALL else (copy,)
        for first, ids, contents in messages:
            number = bisect_left(self._sequences, first)
            while number < len(self._lines) and (at := self._sequences[number] - first) < len(ids):
                if self._lines[number][1] == ids[at]:
                    content = contents[CONTENT_BYTES * at : CONTENT_BYTES * (at + 1)].hex()
                    for name in names:
                        self._met[name][number] = content
                number += 1

    def judged(self) -> Iterator[tuple[str, Row]]:
        """Yield the findings, and the number of lines that are due on no copy."""
        promise, older = self._promise, 0
        firsts = [(name, promise.due.first_of(name, self._subject), self._met[name]) for name in promise.copies]
        for number, (sequence, id, hashed) in enumerate(self._lines):
            due = [(name, met.get(number)) for name, first, met in firsts if first is not None and sequence >= first]
            older += not due
            lost = [name for name, content in due if content is None]
            altered = [name for name, content in due if content is not None and hashed not in (None, content)]
            if lost or altered:
                lost = promise.lost_on(self._subject, sequence, lost)
                yield from self._findings(FindingKind.LOST, lost, sequence, id)
                yield from self._findings(FindingKind.ALTERED, altered, sequence, id)
        yield COUNTS, {"older": older}

    def _findings(self, what: FindingKind, copies: Sequence[str], sequence: int, id: str) -> Iterator[tuple[str, Row]]:
        about = {"subject": self._subject, "sequence": sequence, "id": id, "text": TEXTS[what]}
        for name in (BOTH,) if len(copies) == len(self._promise.copies) else copies:
            yield FINDING, finding_row(what, copy=name, **about)


def judge_blocks(promise: Promise, facts: Iterable[Fact]) -> Iterator[list[Judged]]:
    """Judge blocks; list findings up to a limit, and count the others."""
    listed, more = Counter[str](), Counter[str]()
    for key, group in groupby(facts, itemgetter(1)):
        if key == UNREAD:
            yield [_row(UNREAD, {"text": pickle.loads(fact[4])}) for fact in group]
        elif key == COUNTS:
            yield [_row(COUNTS, pickle.loads(fact[4])) for fact in group]
        else:
            block = _Block(promise, key.partition(":")[2])
            for _, _, piece, copy, payload in group:
                if piece == LINES:
                    block.take_lines(pickle.loads(payload))
                else:
                    block.take_messages(copy, pickle.loads(payload))
            rows = []
            for kind, row in block.judged():
                if kind == FINDING:
                    listed[row["what"]] += 1
                    if listed[row["what"]] > LISTED_MAX:
                        more[row["what"]] += 1
                        continue
                rows.append(_row(kind, row))
            yield rows
    yield [_row(MORE, more)]


def _row(kind: str, row: Mapping[str, Any]) -> Judged:
    return 0, ALL, kind, json.dumps(row), True
