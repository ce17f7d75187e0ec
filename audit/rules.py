"""Core. Rules between the pieces of a log: judges that take the facts of the pieces in order.

One judge stands for all copies while their facts are equal. From the first difference on, each copy has its own
(`JudgePerCopy`).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt

from qmq.audit.conservation import STATES
from qmq.audit.consumption import ANY, CONSERVED, ConsumptionJudge
from qmq.audit.facts import ALL, PieceFacts, SubjectFacts
from qmq.audit.findings import (
    ACCOUNT,
    EPOCHS,
    FINDING,
    HOUR,
    KEPT,
    MORE,
    MOVED,
    PIECE,
    SUBJECT,
    FindingKind,
    Judge,
    JudgeRow,
    Row,
    finding,
)
from qmq.audit.frame_order import NO_FRAME, PieceBorders
from qmq.audit.messages import STORED
from qmq.log.frame import Frame

TWICE_MAX = 20_000
"""Listed duplicates: more than other findings, as the ids of a duplicate batch are later left out."""


class JudgePerCopy:
    """One judge of all copies until they differ, then one of each. One per broker group and key."""

    def __init__(self, names: Collection[str], make: Callable[[], Judge]) -> None:
        self._names = names
        self._judges = {ALL: make()}

    def take(self, copy: str, piece: int, facts: Any) -> Iterator[tuple[str, JudgeRow]]:
        if copy != ALL and ALL in self._judges:
            shared = self._judges.pop(ALL)
            self._judges = {name: deepcopy(shared) for name in self._names}
        for name, judge in self._judges.items():
            if copy in (ALL, name):
                for row in judge.take(piece, facts):
                    yield name, row

    def finish(self) -> Iterator[tuple[str, JudgeRow]]:
        for name, judge in self._judges.items():
            for row in judge.finish():
                yield name, row


class PassOn:
    """Judge that returns rows of the readers unchanged."""

    def take(self, piece: int, row: JudgeRow) -> Iterator[JudgeRow]:
        yield row

    def finish(self) -> Iterable[JudgeRow]:
        return ()


class LogJudge:
    """Judge of the whole log: problems met by readers, borders of pieces, epochs, retention.

    Args:
        until_ms, begins, before: of `PieceBorders`.
        begin: an earlier run judged the bytes before.
        kept: first offset kept at `begin`, if known.
    """

    def __init__(
        self,
        until_ms: int,
        begins: Collection[int],
        begin: int,
        *,
        before: Frame | None = None,
        kept: int | None = None,
    ) -> None:
        self._borders = PieceBorders(until_ms, begins, before)
        self._begin = begin
        self._problems: dict[tuple[str, int, int | None], Row] = {}
        self._more: Counter[str] = Counter()
        self._epochs: dict[str, int] = {}
        self._kept = kept

    def take(self, piece: int, facts: PieceFacts) -> Iterator[JudgeRow]:
        read = {name: getattr(facts, name) for name in ("frames", "messages", "apart")}
        last = {name: facts.piece[name] for name in ("end", "chain", "size")} if facts.piece else {}
        if facts.piece is not None:
            last["time_ms"] = facts.piece["frame_order"].time_ms
        yield JudgeRow(PIECE, {"begin": piece, "bytes": facts.size, "digest": f"{facts.digest:016x}"} | read | last)
        for problem in facts.problems:
            self._problem(problem | {"sequence": problem["first"]})
        self._more.update(facts.more)
        self._borders.enter(piece)
        if facts.piece is not None:
            for found in self._borders.judge(facts.piece):
                self._problem(found._asdict() | {"text": found.reason})
        for term, boot, offset in facts.epochs:
            self._epochs.setdefault(f"{term}.{boot}", offset)
        if piece >= self._begin:
            yield from self._retention(facts.retention)

    def _problem(self, row: Row) -> None:
        """Record a problem. Damage across the border of two pieces is seen from both; join it up to the next frame."""
        key = (row["what"], row["offset"], row["sequence"])
        known = self._problems.get(key)
        if known is None:
            if len(self._problems) >= TWICE_MAX:
                self._more[row["what"]] += 1
                return
            self._problems[key] = {name: row[name] for name in ("offset", "end", "subject", "sequence", "id", "text")}
            if row.get("lacks") is not None:
                self._problems[key]["gap"] = [row["lacks"], row["sequence"]]
            return
        known["end"] = max(known["end"], row["end"])
        for name in ("subject", "id"):
            known[name] = row[name] if known[name] is None else known[name]
        if known["text"] == NO_FRAME:
            known["text"] = row["text"]

    def _retention(self, frames: Iterable[tuple[int, int, int]]) -> Iterator[JudgeRow]:
        for offset, end, first in frames:
            before = self._kept or 0
            if first < before or first > offset:
                text = f"frames are kept from {first} on, and were from {before} on before it"
                yield finding(FindingKind.RETENTION, text, offset=offset, end=end)
            self._kept = max(before, first)

    def finish(self) -> Iterator[JudgeRow]:
        for (what, _, _), row in self._problems.items():
            yield finding(FindingKind(what), row.pop("text"), **row)
        if self._more:
            yield JudgeRow(MORE, dict(self._more))
        yield JudgeRow(EPOCHS, self._epochs)
        if self._kept is not None:
            yield JudgeRow(KEPT, {"from": self._kept})


class SubjectJudge:
    """Judge of the sequences and the progress of one subject.

    Args:
        begin: offset where reading began; at 0, nothing earlier can explain a gap.
        known: verified end of the subject at `begin`.
        watermark: high watermark; frames above it were acknowledged to no client.
    """

    def __init__(self, subject: str, begin: int, known: int | None, watermark: int) -> None:
        self._subject = subject
        self._watermark = watermark
        self._judge = ConsumptionJudge(subject, begin)
        self._due = 0 if known is None and begin == 0 else known
        self._known_until = 0
        self._row: Row = {"subject": subject, "first": None, "due_end": 0, "end": 0}
        self._hours: dict[int, list[int]] = {}

    def take(self, piece: int, subject_facts: SubjectFacts) -> Iterator[JudgeRow]:
        facts, hours = subject_facts
        for hour, (messages, size, first) in hours.items():
            total = self._hours.setdefault(hour, [0, 0])
            total[0] += messages
            total[1] += size
            self._judge.hour(hour, first)
        for fact in facts:
            if fact["kind"] == "run":
                yield from self._run(fact)
                self._row["end"] = max(self._row["end"], fact["last"])
                if piece < self._watermark:
                    self._row["due_end"] = max(self._row["due_end"], fact["last"])
            for row in self._judge.judge(fact):
                yield self._judge_row(row, fact["offset"])

    def _judge_row(self, row: Row, seen: int | None) -> JudgeRow:
        if row["what"] == CONSERVED:
            return JudgeRow(CONSERVED, {"subject": self._subject, "equation": row["text"]})
        if row["what"] == MOVED:
            return JudgeRow(MOVED, row)
        fields = {name: row[name] for name in ("offset", "end", "subject", "sequence", "id")}
        fields |= {name: row[name] for name in ("about", "since") if row.get(name) is not None}
        return finding(FindingKind(row["what"]), row["text"], seen=seen, **fields)

    def _run(self, run: Row) -> Iterator[JudgeRow]:
        """Check a run against the one before. Runs have no gaps inside; within a piece the reader compared them."""
        first, due = run["first"], self._due
        if not run["judged"] and due is not None and first != due:
            why = "gap: messages are missing" if first > due else "repeated or reordered"
            fields = {"offset": run["offset"], "end": run["end"], "subject": self._subject, "sequence": first}
            found = finding(FindingKind.SEQUENCE, f"sequence {first} where {due} is due ({why})", **fields)
            gap = {"due": self._known_until, "gap": [due, first]} if first > due else {}
            yield JudgeRow(FINDING, found.row | gap)
        self._due = run["last"]
        self._known_until = run["end"]
        first = min(first, self._row["first"]) if self._row["first"] is not None else first
        self._row["first"] = first

    def finish(self) -> Iterator[JudgeRow]:
        accounts: dict[str, Row] = {}
        for row in self._judge.finish():
            yield self._judge_row(row, ANY)
            if row["what"] == CONSERVED:
                _add(accounts, self._subject, json.loads(row["text"]))
        for account in accounts.values():
            yield JudgeRow(ACCOUNT, account)
        yield JudgeRow(SUBJECT, self._row)
        for hour, (messages, size) in self._hours.items():
            yield JudgeRow(HOUR, {"subject": self._subject, "hour": hour, "messages": messages, "bytes": size})


def _add(accounts: dict[str, Row], subject: str, hour: Row) -> None:
    about = {"subject": subject, "consumer_group": hour["group"], "nacked": hour["nacked"]}
    account = accounts.setdefault(hour["group"], about | dict.fromkeys(("stored", *STATES), 0))
    for name in ("stored", *STATES):
        account[name] += hour[name]


class DuplicateJudge:
    """Judge of batches and message ids stored twice under one producer, in one bucket of hashes.

    Takes `{what: (hashes, offsets of frames, places in them)}`. The finding is about the last one of each. Its
    `sequence` is the message's index in its frame, until `audit.inspection` reads the sequence.
    """

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[npt.NDArray[Any]]] = defaultdict(list)

    def __deepcopy__(self, _: object) -> DuplicateJudge:
        other = DuplicateJudge()
        other._parts.update({what: [*parts] for what, parts in self._parts.items()})  # arrays never change
        return other

    def take(self, piece: int, facts: Mapping[str, bytes]) -> Iterator[JudgeRow]:
        for what, data in facts.items():
            self._parts[what].append(np.frombuffer(data, PLACED))
        yield from ()

    def finish(self) -> Iterator[JudgeRow]:
        for what in (FindingKind.BATCH_TWICE, FindingKind.ID_TWICE):
            if not (parts := self._parts.pop(what, None)):
                continue
            stored = np.concatenate(parts)
            keys = np.sort(stored["key"])
            twice = np.unique(keys[1:][keys[1:] == keys[:-1]])
            if not len(twice):
                continue
            again = stored[np.isin(stored["key"], twice)]
            again = again[np.lexsort((again["place"], again["offset"], again["key"]))]
            begins = np.flatnonzero(np.diff(again["key"], prepend=again["key"][0] - 1))
            ends = np.append(begins[1:], len(again))
            for first, end in list(zip(begins.tolist(), ends.tolist()))[:TWICE_MAX]:
                last = again[end - 1]
                text = f"stored {end - first} times by one producer, first at offset {again[first]['offset']}"
                yield finding(what, text, offset=int(last["offset"]), sequence=int(last["place"]))
            if len(begins) > TWICE_MAX:
                yield JudgeRow(MORE, {what.value: len(begins) - TWICE_MAX})


PLACED = np.dtype([("key", "<i8"), ("offset", "<i8"), ("place", "<u4")])
"""A batch or id that may be stored only once: hash of its name, offset of its frame, index in the frame."""


def spread_stored(facts: PieceFacts, buckets: int) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield (bucket, batches and ids) of a piece, for `DuplicateJudge`."""
    batches = [(offset, np.frombuffer(data, STORED)) for offset, data, _ in facts.stored]
    ids = [(offset, np.frombuffer(data, STORED)) for offset, _, data in facts.stored]
    for what, windows in ((FindingKind.BATCH_TWICE, batches), (FindingKind.ID_TWICE, ids)):
        placed = np.zeros(sum(len(part) for _, part in windows), PLACED)
        begin = 0
        for offset, part in windows:
            into = placed[begin : begin + len(part)]
            into["key"], into["offset"], into["place"] = part["key"], part["frame"] + np.int64(offset), part["place"]
            begin += len(part)
        bucket = (placed["key"] >> 7) % buckets
        for number in np.unique(bucket).tolist():
            yield number, {what.value: placed[bucket == number].tobytes()}
