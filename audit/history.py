"""Shell. Verified part of a log, from the ledger of earlier runs: is it still there, and which part is read again.

A frame's chain depends on every byte before it. So one frame that both copies still have, with its verified chain,
proves that nothing before it was exchanged or removed. Decay since then is found by reading a part of the old bytes in
each run.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from qmq.audit.copies import Description, open_copy
from qmq.audit.findings import BOTH, MASTER, UNVERIFIED, FindingKind
from qmq.audit.frame_order import AHEAD_MS_MAX
from qmq.audit.results import GroupAnswer, Result, digests_of, kept_from
from qmq.audit.walk import HEADER_BYTES_MAX
from qmq.errors import CorruptFrame
from qmq.ledger import FINDINGS, NOT_READ, PROVEN, Entry, Known, Piece, pieces_due
from qmq.log.frame import Frame, decode_header

SHARE = 7
"""Each run reads one part in SHARE of the verified bytes again."""
CONSERVED_KEPT = 200
"""Equations of consumer groups in a line of the ledger."""
FINDINGS_KEPT = 100
"""Findings in a line of the ledger."""

CHAINS = "c"
"""Prefix of digests that combine the chains of all frames. Digests of earlier versions lack it and are ignored."""

Digests = Mapping[int, tuple[int, int]]
"""Begin of a piece -> (its bytes, its digest)."""


class Broken(NamedTuple):
    """The log is not the verified one."""

    what: FindingKind
    copies: tuple[str, ...]
    offset: int
    text: str


@dataclass(slots=True)
class History:
    """Ledger of one broker group before the read. Made by `find_verified`.

    Everything from `begin` on is read; before it, the pieces `again`.
    """

    known: Known
    begin: int
    again: list[Piece] = field(default_factory=list)
    broken: Broken | None = None
    start: int = 0
    """Present start of both logs. A piece that retention has entered counts as another piece."""
    before: Frame | None = None
    """Last verified frame, if everything after it is read."""

    @property
    def anchor(self) -> Entry | None:
        return None if self.broken else self.known.anchor

    def cuts(self) -> list[int]:
        """Return the borders of all pieces read before, ascending."""
        return sorted({at for piece, _ in self.known.pieces.values() for at in (piece.begin, piece.end)})

    def exchanged(self, digests: Digests) -> list[Piece]:
        """Return the pieces that changed since an earlier run read them, or that were due and not read now."""
        again = set(self.again)
        found = []
        for piece in sorted(again | {piece for piece, _ in self.known.pieces.values() if piece.begin >= self.start}):
            now = _now(piece, digests)
            if (now is None and piece in again) or (
                piece.digest.startswith(CHAINS) and now is not None and now != piece
            ):
                found.append(piece)
        return found

    def read_again(self, digests: Digests) -> list[Piece]:
        """Return the pieces read again, with their present digests."""
        return [_now(piece, digests) or piece for piece in self.again]


def _now(piece: Piece, digests: Digests) -> Piece | None:
    """Return the piece as read in this run, or None if it was not read."""
    parts = [part for begin, part in digests.items() if piece.begin <= begin < piece.end]
    digest = 0
    for _, part_digest in parts:
        digest ^= part_digest
    if not parts:
        return None
    return piece._replace(bytes=sum(size for size, _ in parts), digest=f"{CHAINS}{digest:016x}")


def find_verified(
    known: Known, places: Mapping[str, dict[str, str]], logs: Mapping[str, Description], *, share: int = SHARE
) -> History:
    """Find the point up to which both copies are verified; raise CannotRead."""
    start = max(log.start for log in logs.values())
    anchor = known.anchor
    if anchor is None:
        return History(known, start, start=start)
    if all(log.end < anchor.verified for log in logs.values()):
        ends = " and ".join(str(logs[name].end) for name in logs)
        text = f"the logs end at {ends}; {_run(anchor)} verified them up to {anchor.verified}"
        end = min(log.end for log in logs.values())
        return History(known, start, start=start, broken=Broken(FindingKind.REWOUND, (BOTH,), end, text))
    found = {
        name: _frame_at(places[name], anchor.frame)
        for name, log in logs.items()
        if log.start <= anchor.frame and log.end >= anchor.verified
    }
    whole = {name: frame for name, frame in found.items() if frame is not None}
    last = anchor.verified, anchor.chain
    if wrong := [name for name, frame in whole.items() if (frame.end, f"{frame.chain:016x}") != last]:
        text = f"the frame at {anchor.frame} is not the one that {_run(anchor)} verified"
        of = (BOTH,) if len(wrong) == len(logs) else tuple(wrong)
        return History(known, start, start=start, broken=Broken(FindingKind.REWRITTEN, of, anchor.frame, text))
    is_damaged = len(whole) < len(found)  # a full read reports the damage
    if is_damaged or not known.since <= start <= anchor.frame:
        return History(known, start, start=start)
    before = next(iter(whole.values()), None)
    return History(known, anchor.verified, pieces_due(known, start, share), start=start, before=before)


def _run(entry: Entry) -> str:
    """Return a run's name with its places, as a ledger may come from another installation."""
    places = f" of {' and '.join(entry.places.values())}" if entry.places else ""
    return f"the run of {entry.run}{places}"


def _frame_at(place: dict[str, str], offset: int) -> Frame | None:
    """Return the header of the frame at `offset`, or None if there is none; raise CannotRead."""
    with closing(open_copy(place)) as copy:
        try:
            return decode_header(copy.window(offset, HEADER_BYTES_MAX), 0, offset, None)
        except (CorruptFrame, OSError):
            return None


def run_name(at_ms: int) -> str:
    """Return a time as the name of a run."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def runner_name() -> str:
    """Return user and host of this run."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "?"
    return f"{user}@{socket.gethostname()}"


VERDICTS = {0: PROVEN, 1: FINDINGS, 2: NOT_READ}


def verified(answer: GroupAnswer, result: Result, history: History, piece_bytes: int) -> Entry | None:
    """Return the verified point for the next run, or None to keep the earlier one.

    None if one copy alone is wrong, if the log has changed since an earlier run, or if a copy does not reach that
    point.
    """
    anchor, until = history.anchor, result.whole_until()
    if any(row["copy"] != BOTH or row["what"] in UNVERIFIED for row in result.findings):
        return None
    if sum(result.found.values()) > len(result.findings):
        return None  # unlisted findings may concern one copy alone
    if any(begin in answer.differing and end <= until for begin, end in result.pieces(piece_bytes)):
        return None  # each copy may have its own damage there
    again = [piece for piece in history.read_again(digests_of(answer, result)) if piece.end <= until]
    if until < result.begin:
        return Entry("", 0, result.group, "", start=result.start, begin=result.begin, pieces=again)
    ends = dict(anchor.ends) if anchor is not None and anchor.verified == result.begin else {}
    for subject, end in answer.ends(due=True).items():
        ends[subject] = max(end, ends.get(subject, 0))
    read = digests_of(answer, result)
    pieces = [
        Piece(begin, end, read[begin][0], f"{CHAINS}{read[begin][1]:016x}")
        for begin, end in result.pieces(piece_bytes)
        if begin in read and result.begin <= begin and end <= until
    ]
    kept = kept_from(answer, result)
    rows = [copies[MASTER] for at, copies in answer.pieces.items() if result.begin <= at < until]
    last = next((row for row in rows if row.get("end") == until), None)
    if last is not None:
        chain, frame = f"{last['chain']:016x}", last["size"]
    elif anchor is not None and anchor.verified == until:
        chain, frame = anchor.chain, anchor.frame
    else:
        return None
    return Entry(
        "",
        0,
        result.group,
        "",
        start=result.start,
        begin=result.begin,
        verified=until,
        kept=None if kept is None else max(kept, result.oldest()),
        chain=chain,
        frame=frame,
        ends=ends,
        pieces=sorted([*again, *pieces]),
    )


def ledger_entry(result: Result, entry: Entry | None) -> Entry:
    """Return the line of this run for the ledger."""
    at_ms = result.until_ms - AHEAD_MS_MAX
    kept = [{name: value for name, value in row.items() if value is not None} for row in result.findings]
    entry = entry or Entry("", 0, result.group, "", start=result.start, begin=result.begin)
    return replace(
        entry,
        run=run_name(at_ms),
        at_ms=at_ms,
        verdict=VERDICTS[result.status],
        why=result.unreadable or "",
        found=dict(result.found),
        findings=kept[:FINDINGS_KEPT],
        places=result.places,
        by=runner_name(),
        unverified=result.unverified,
        read={name: read["bytes"] for name, read in result.read.items()},
        conserved=result.conserved[:CONSERVED_KEPT],
        delayed=result.delayed[:CONSERVED_KEPT],
        journal=result.journal,
    )
