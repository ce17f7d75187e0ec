"""Core. Unsettled messages of a consumer: pieces, acks and nacks to send, and their confirmations.

Brokers number deliveries with ascending pull sequences, with a gap at each new mastership. An ack is a list of ranges
of them: the done messages at the start of the oldest piece, every other piece once all its messages are decided, and
everything now and then. So a slow message delays only its own piece, and no range spans sequences that were not
delivered.

A message is decided once: done or nacked. Decisions without a confirmation are sent again after a reconnect; the broker
ignores those it has stored.
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
"""Ranges in one request, which a broker folds within a few hundred microseconds."""

ACKED_RANGES_MAX = 1_000
"""All acks of a mastership are one range, except for nacked messages in between."""

_DONE_RUN = re.compile(b"\1+")


class SentAck(NamedTuple):
    """Ack in flight: its ranges of pull sequences, ascending, and the parts of pieces behind them."""

    ranges: list[Range]
    parts: list[tuple[UnackedPiece, int, int]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nacked message; `due_ms` is by the consumer's clock, so a repeated nack does not delay it."""

    piece: UnackedPiece
    at: int
    due_ms: int
    verdict: Verdict
    reason: str
    message: ReceivedMessage | None = None
    """Message for a delay group, if the broker does not store the nack."""

    @property
    def pull_sequence(self) -> int:
        return self.piece.begin + self.at

    def is_later(self, now_ms: int) -> bool:
        """Return whether the broker has to store the message for some time."""
        return self.verdict == Verdict.RETRY and self.due_ms > now_ms


class SentNack(NamedTuple):
    """Nack in flight: its entries and the messages behind them."""

    entries: list[NackEntry]
    reason: str
    refusals: list[Refusal]


class Unacked:
    """Unsettled messages of one subscription at one broker group.

    Made by a session; kept over reconnects. SUBSCRIBE sends `held_end`: the broker delivers unacked messages from there
    on again, and `received` skips those that this consumer has.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[int, UnackedPiece] = OrderedDict()
        self._decided: list[UnackedPiece] = []
        """Pieces without undecided messages, which may need an ack."""
        self._refusals: dict[str, list[Refusal]] = {}
        """Nacks to send, by reason: a request has one reason."""
        self._nacks_sent: list[SentNack] = []
        self._acked: list[Range] = []
        """Newest ranges that brokers confirmed as acked, ascending."""
        self._owed_acks: list[Range] = []
        self._owed_nacks: list[Range] = []
        """Pull sequences that the broker counts as unacked and that this consumer lacks."""
        self.held_end: int = 0
        self.messages: int = 0
        """Number of delivered messages that are not settled."""

    def received(
        self, begin: int, count: int, times: int, acker: Acker, broker_group: str
    ) -> tuple[UnackedPiece, int] | None:
        """Add delivered messages `[begin, begin + count)`; return the piece and the number of skipped messages, or None
        if this consumer has all of them.
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
        """Return the next ack to send and count it as in flight, or None.

        Args:
            everything: include done messages inside pieces that are not wholly decided.
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
        """Add the done parts of a piece before position `end`; return False if the ack is full."""
        for run in [found.span() for found in _DONE_RUN.finditer(piece.states, 0, end)]:
            if len(parts) >= ENTRIES_MAX:
                return False
            piece.states[run[0] : run[1]] = bytes((SENT,)) * (run[1] - run[0])
            parts.append((piece, *run))
        return True

    def acked(self, ack: SentAck) -> None:
        """Settle the messages of a confirmed ack."""
        if self._acked and ack.ranges[0][0] >= self._acked[-1][0]:
            self._acked[-1:] = ranges.union([self._acked[-1], *ack.ranges])  # the usual case
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
        """Nack a message when it is due, unless it is decided or was released."""
        piece = refusal.piece
        if not piece.is_dropped and piece.refuse(refusal.at):
            self.queue_nack(refusal)

    def queue_nack(self, refusal: Refusal) -> None:
        """Queue a nack of a message that is marked as nacked."""
        self._refusals.setdefault(refusal.reason, []).append(refusal)

    def begun(self, taken_ends: dict[UnackedPiece, int]) -> list[tuple[UnackedPiece, int]]:
        """Return pieces and positions of messages that the application took and did not decide.

        Args:
            taken_ends: position of the first untaken message, for pieces that were not taken as a whole.
        """
        return [
            (piece, at)
            for piece in self._undecided()
            for at in piece.open_positions(taken_ends.get(piece, len(piece.states)))
        ]

    def next_nack(self, now_ms: int) -> SentNack | None:
        """Return the next nack to send and count it as in flight, or None."""
        if self._owed_nacks:
            again, self._owed_nacks = self._owed_nacks[:ENTRIES_MAX], self._owed_nacks[ENTRIES_MAX:]
            entries = [NackEntry(begin, end, 0, Verdict.RETRY) for begin, end in again]
            self._nacks_sent.append(SentNack(entries, "", []))
            return self._nacks_sent[-1]
        if not self._refusals:
            return None
        reason, waiting = next(iter(self._refusals.items()))
        is_later = waiting[0].is_later(now_ms)  # a broker may refuse these and store the others
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
        """Settle the messages of a confirmed nack."""
        self._nacks_sent.remove(nack)
        for refusal in nack.refusals:
            self._settle(refusal.piece, refusal.at, refusal.at + 1)

    def withdraw(self, nack: SentNack, refusals: list[Refusal]) -> None:
        """Remove refused nacks that a delay group gets instead."""
        gone = set(map(id, refusals))
        nack.refusals[:] = [refusal for refusal in nack.refusals if id(refusal) not in gone]
        if not nack.refusals:
            self._nacks_sent.remove(nack)

    def requeue_nack(self, nack: SentNack) -> None:
        """Queue a refused nack again."""
        self._nacks_sent.remove(nack)
        for refusal in nack.refusals:
            if refusal.piece.states[refusal.at] == NACKED:
                self._refusals.setdefault(refusal.reason, []).append(refusal)
        if not nack.refusals:
            self._owed_nacks += [(entry.begin, entry.end) for entry in nack.entries]

    # Subscription.

    def subscribed(self, acked_end: int, unacked: Iterable[Range] = ()) -> None:
        """Prepare for a new subscription: decisions without an answer are sent again, except below `acked_end`.

        Messages that the broker counts as settled, without a decision of this consumer, belong to others: its lease had
        ended.

        Args:
            unacked: ranges below `held_end` that the broker counts as unsettled. An old master may have confirmed
                decisions that its successor lacks: acks are sent again, other messages are delivered again.
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
        """Number of undecided messages."""
        return sum(piece.open for piece in self._pieces.values())

    @property
    def is_settled(self) -> bool:
        """Whether the broker has stored every decision."""
        owed = self._owed_acks or self._owed_nacks
        return not owed and all(piece.open == piece.unsettled for piece in self._pieces.values())

    def drop(self) -> None:
        """Drop all messages."""
        for piece in self._pieces.values():
            piece.is_dropped = True
        self._pieces.clear()
        self._decided.clear()
        self._refusals.clear()
        self._owed_acks = []
        self._owed_nacks = []
