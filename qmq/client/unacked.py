"""Core. What was delivered to a consumer and is not settled, and what its broker is sent about it next.

A broker numbers what it hands to a consumer with ascending pull sequences; they may jump (a new mastership begins
after a gap), so nothing is counted from them. Acks are ranges of them: of the oldest piece that is not wholly decided,
what is done at its beginning; of every other piece, once each of its messages is decided, what is done in it; and now
and then everything. So a slow message holds back its own piece, for a moment, and no other, and a range never spans
what was not delivered.

A message is decided once: done, or nacked. What the broker has not confirmed when a connection is lost is sent again
at the next one; it takes what it has settled already as settled.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from qmq import ranges
from qmq.client.received import NACKED, OPEN, SENT, Acker, ReceivedMessage, UnackedPiece
from qmq.ranges import Range
from qmq.remoting.commands import NackEntry, Verdict

ENTRIES_MAX = 1_000
"""Ranges in one request: what a broker folds within a few hundred microseconds."""

ACKED_RANGES_MAX = 1_000
"""Of a mastership all acks are one range, but for what was nacked in between."""

_DONE_RUN = re.compile(b"\1+")


class SentAck(NamedTuple):
    """An ack on its way: the ranges of pull sequences to send, ascending, and the parts of pieces that they are."""

    ranges: list[Range]
    parts: list[tuple[UnackedPiece, int, int]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A nacked message; `due_ms` on the consumer's own clock, so that what is sent again late comes no later."""

    piece: UnackedPiece
    at: int
    due_ms: int
    verdict: Verdict
    reason: str
    message: ReceivedMessage | None = None
    """What a delay group would get, if the broker does not keep it."""

    @property
    def pull_sequence(self) -> int:
        return self.piece.begin + self.at

    def is_later(self, now_ms: int) -> bool:
        """Whether it asks a broker to keep the message for a while."""
        return self.verdict == Verdict.RETRY and self.due_ms > now_ms


class SentNack(NamedTuple):
    """A nack on its way: what to send, and what it is about."""

    entries: list[NackEntry]
    reason: str
    refusals: list[Refusal]


class Unacked:
    """What one consumer has of one broker group and has not settled, for one subscription.

    Made by a session; lives through reconnects. `held_end` is what SUBSCRIBE tells a broker: it delivers again all
    un-acked messages from there on, and `received` ignores what is there already.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[int, UnackedPiece] = OrderedDict()
        self._decided: list[UnackedPiece] = []
        """Pieces without an open message, of which acks may have to be sent."""
        self._refusals: dict[str, list[Refusal]] = {}
        """Nacks to be sent, by their reason: a request has one."""
        self._nacks_sent: list[SentNack] = []
        self._acked: list[Range] = []
        """What brokers have confirmed as acked, as ranges, ascending; the newest ones."""
        self._owed_acks: list[Range] = []
        self._owed_nacks: list[Range] = []
        """Pull sequences that a broker takes for un-acked and that are not here any more."""
        self.held_end = 0
        self.messages = 0
        """Messages that were delivered and are not settled, as far as we know."""

    def received(
        self, begin: int, count: int, times: int, acker: Acker, broker_group: str
    ) -> tuple[UnackedPiece, int] | None:
        """Add `[begin, begin + count)`; return the piece and how many of its first messages are there already.

        None: all of them are.
        """
        skipped = max(0, min(self.held_end - begin, count))
        if skipped == count:
            return None
        piece = UnackedPiece(begin + skipped, count - skipped, times, acker, broker_group, self._decided)
        self._pieces[piece.begin] = piece
        self.held_end = piece.end
        self.messages += count - skipped
        return piece, skipped

    # Acks.

    def next_ack(self, *, everything: bool = False) -> SentAck | None:
        """Return what to ack now and count it as sent; None if there is nothing.

        Args:
            everything: also what is done somewhere within pieces that are not wholly decided.
        """
        if self._owed_acks:
            again, self._owed_acks = self._owed_acks[:ENTRIES_MAX], self._owed_acks[ENTRIES_MAX:]
            return SentAck(again, [])
        parts: list[tuple[UnackedPiece, int, int]] = []
        while self._decided and len(parts) < ENTRIES_MAX:
            piece = self._decided.pop()
            if not self._take_done(piece, len(piece.states), parts):
                self._decided.append(piece)
        for piece in self._undecided():
            if not everything:
                self._take_done(piece, piece.states.find(OPEN), parts)
                break
            if piece.open < len(piece.states) and not self._take_done(piece, len(piece.states), parts):
                break
        done = ranges.union([(piece.begin + begin, piece.begin + end) for piece, begin, end in parts])
        return SentAck(done, parts) if parts else None

    def _undecided(self) -> Iterator[UnackedPiece]:
        return (piece for piece in self._pieces.values() if piece.open)

    @staticmethod
    def _take_done(piece: UnackedPiece, end: int, parts: list[tuple[UnackedPiece, int, int]]) -> bool:
        """Add what is done of a piece before position `end`; returns False if not all of it fits."""
        for run in [found.span() for found in _DONE_RUN.finditer(piece.states, 0, end)]:
            if len(parts) >= ENTRIES_MAX:
                return False
            piece.states[run[0] : run[1]] = bytes((SENT,)) * (run[1] - run[0])
            parts.append((piece, *run))
        return True

    def acked(self, ack: SentAck) -> None:
        """The broker keeps this ack."""
        if self._acked and ack.ranges[0][0] >= self._acked[-1][0]:
            self._acked[-1:] = ranges.union([self._acked[-1], *ack.ranges])  # nearly always
        else:
            self._acked = ranges.union([*self._acked, *ack.ranges])
        del self._acked[:-ACKED_RANGES_MAX]
        for piece, begin, end in ack.parts:
            self._settle(piece, begin, end)

    def _settle(self, piece: UnackedPiece, begin: int, end: int) -> None:
        before = piece.unsettled
        piece.settle(begin, end)
        self.messages -= before - piece.unsettled
        if not piece.unsettled:
            self._pieces.pop(piece.begin, None)

    # Nacks.

    def nack(self, refusal: Refusal) -> None:
        """Send this one once it is due; nothing happens if the message was decided before, or is not here."""
        piece = refusal.piece
        if not piece.is_dropped and piece.refuse(refusal.at):
            self.tell(refusal)

    def tell(self, refusal: Refusal) -> None:
        """Send this one, which counts as nacked already, when it is its turn."""
        self._refusals.setdefault(refusal.reason, []).append(refusal)

    def begun(self, taken_ends: dict[UnackedPiece, int]) -> list[tuple[UnackedPiece, int]]:
        """Return what the application was given and did not decide, as pieces and positions.

        Args:
            taken_ends: of pieces that were not taken as a whole, the position of the first message that was not.
        """
        return [
            (piece, at)
            for piece in self._undecided()
            for at in piece.open_positions(taken_ends.get(piece, len(piece.states)))
        ]

    def next_nack(self, now_ms: int) -> SentNack | None:
        """Return what to nack now and count it as sent; None if there is nothing."""
        if self._owed_nacks:
            again, self._owed_nacks = self._owed_nacks[:ENTRIES_MAX], self._owed_nacks[ENTRIES_MAX:]
            entries = [NackEntry(begin, end, 0, Verdict.RETRY) for begin, end in again]
            self._nacks_sent.append(SentNack(entries, "", []))
            return self._nacks_sent[-1]
        if not self._refusals:
            return None
        reason, waiting = next(iter(self._refusals.items()))
        is_later = waiting[0].is_later(now_ms)  # a broker may take the others and not these
        alike = [refusal for refusal in waiting if refusal.is_later(now_ms) is is_later]
        refusals, left = alike[:ENTRIES_MAX], alike[ENTRIES_MAX:]
        left[:0] = [refusal for refusal in waiting if refusal.is_later(now_ms) is not is_later]
        del self._refusals[reason]
        if left:
            self._refusals[reason] = left
        refusals.sort(key=lambda refusal: refusal.pull_sequence)
        entries = []
        for refusal in refusals:
            begin = refusal.pull_sequence
            entry = NackEntry(begin, begin + 1, max(0, refusal.due_ms - now_ms), refusal.verdict)
            if entries and entries[-1].end == begin and entries[-1][2:] == entry[2:]:
                entries[-1] = entries[-1]._replace(end=entry.end)
            else:
                entries.append(entry)
        self._nacks_sent.append(SentNack(entries, reason, refusals))
        return self._nacks_sent[-1]

    def nacked(self, nack: SentNack) -> None:
        """The broker keeps this nack."""
        self._nacks_sent.remove(nack)
        for refusal in nack.refusals:
            self._settle(refusal.piece, refusal.at, refusal.at + 1)

    def withdraw(self, nack: SentNack, refusals: list[Refusal]) -> None:
        """Somebody else was asked to keep these, which a broker did not take."""
        gone = set(map(id, refusals))
        nack.refusals[:] = [refusal for refusal in nack.refusals if id(refusal) not in gone]
        if not nack.refusals:
            self._nacks_sent.remove(nack)

    def put_off(self, nack: SentNack) -> None:
        """The broker cannot do this now: send it again in its turn."""
        self._nacks_sent.remove(nack)
        for refusal in nack.refusals:
            if refusal.piece.states[refusal.at] == NACKED:
                self._refusals.setdefault(refusal.reason, []).append(refusal)
        if not nack.refusals:
            self._owed_nacks += [(entry.begin, entry.end) for entry in nack.entries]

    # The whole.

    def subscribed(self, acked_end: int, unacked: Iterable[Range] = ()) -> None:
        """A new subscription begins: what has no answer is sent again, but for what is below the broker's `acked_end`.

        What the broker counts as settled beyond our own decisions is not ours any more (our lease had ended).

        Args:
            unacked: what the broker counts as not settled below `held_end`. A master that was alone may have confirmed
                decisions that its successor never heard of: acks are said again; other messages shall come again.
        """
        for piece in list(self._pieces.values()):
            if piece.begin < acked_end:
                self._settle(piece, 0, min(piece.end, acked_end) - piece.begin)
            piece.states = piece.states.replace(b"\2", b"\1")
        self._decided[:] = [piece for piece in self._pieces.values() if not piece.open]
        sent, self._nacks_sent = self._nacks_sent, []
        waiting = [refusal for refusals in self._refusals.values() for refusal in refusals]
        self._refusals = {}
        for refusal in [*(refusal for nack in sent for refusal in nack.refusals), *waiting]:
            if refusal.piece.states[refusal.at] == NACKED:
                self._refusals.setdefault(refusal.reason, []).append(refusal)
        self.held_end = max(self.held_end, acked_end)
        known = [run for piece in self._pieces.values() for run in piece.unsettled_ranges()]
        lost = ranges.difference(unacked, known)
        self._owed_nacks = ranges.difference(lost, self._acked)
        self._owed_acks = ranges.difference(lost, self._owed_nacks)

    @property
    def open(self) -> int:
        """How many messages are not decided."""
        return sum(piece.open for piece in self._pieces.values())

    @property
    def is_settled(self) -> bool:
        """Whether the broker keeps every decision."""
        owed = self._owed_acks or self._owed_nacks
        return not owed and all(piece.open == piece.unsettled for piece in self._pieces.values())

    def drop(self) -> None:
        """Hold nothing any more."""
        for piece in self._pieces.values():
            piece.is_dropped = True
        self._pieces.clear()
        self._decided.clear()
        self._refusals.clear()
        self._owed_acks = []
        self._owed_nacks = []
