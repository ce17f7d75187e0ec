"""Core. What is due of one subject and not planned yet, in the order in which it goes: its pending queue.

To which broker group an order key belongs is found out once for each message, and again when the groups that share the
subject's keys are others. So to look through a long queue for what can go now costs little, however often it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from qmq.delayserver.messages import Records
from qmq.delayserver.schedule.record import join, order_of

KEY_SHIFT = 32
"""A label's upper half is the hash of its order key, 0 without one (qmq.codec)."""
PIECE_MAX = 5000
"""Messages of one piece: what is looked through for what can go next."""
GONE_LEAST = 1000
"""Fewer messages are not worth looking for them."""
FREE = -1
"""In place of the home of a message without order key: any group takes it."""

Home = Callable[[int], str | None]
"""Label of a message with an order key -> the broker group that it goes to."""
Homes = npt.NDArray[np.int16]
"""Where each message belongs: a position in `PendingQueue.homes`, or FREE."""
Fits = npt.NDArray[np.bool_]


def keys_of(records: Records) -> npt.NDArray[np.uint64]:
    """Return the order key of each message, 0 without one."""
    keys: npt.NDArray[np.uint64] = records["label"] >> np.uint64(KEY_SHIFT)
    return keys


class Piece:
    """Messages that came due together, the earliest first."""

    __slots__ = ("records", "homes")

    def __init__(self, records: Records, homes: Homes) -> None:
        self.records, self.homes = records, homes

    def keep(self, fits: Fits) -> Piece:
        return Piece(self.records[fits], self.homes[fits])

    def followed_by(self, other: Piece) -> Piece:
        return Piece(join([self.records, other.records]), np.concatenate((self.homes, other.homes)))


class PendingQueue:
    """Made by Dispatching when something of the subject is due first; ends with it."""

    __slots__ = (
        "subject",
        "pieces",
        "count",
        "homes",
        "failures",
        "rests_until_ms",
        "looks_ms",
        "avoided",
        "complained",
        "_sharers",
        "_gone",
    )

    def __init__(self, subject: str) -> None:
        self.subject = subject
        """What it is called; records name it by a number."""
        self.pieces: deque[Piece] = deque()
        self.count = 0
        self.homes: list[str | None] = []
        """The groups that messages of this queue belong to."""
        self.failures = self.rests_until_ms = 0
        """Failures one after the other, and until when nothing is tried because of the last one."""
        self.looks_ms = 0
        """When it looks next for a group that takes some of it."""
        self.avoided: dict[str, int] = {}
        """Group -> until when nothing new goes there: a batch to it was given up, and may be stored there."""
        self.complained = False
        self._sharers: Sequence[str] = ()
        self._gone = set[int]()
        """Numbers of messages that are not to be sent any more: left out when they are taken."""

    @property
    def waiting(self) -> int:
        """Messages that wait here and are not gone."""
        return max(0, self.count - len(self._gone))

    @property
    def oldest_ms(self) -> int:
        """When the first of them was due; there is one."""
        return int(self.pieces[0].records["due"][0])

    def put(self, records: Records, sharers: Sequence[str], home: Home) -> None:
        """Put messages into the queue; `sharers` are the groups among which `home` chooses."""
        self.know(sharers, home)
        at = len(self.pieces)
        while at and self.pieces[at - 1].records["due"][0] > records["due"][0]:
            at -= 1  # these were not stored: what has their order keys stays behind them
        homes, is_last = self._homes_of(records, home), at == len(self.pieces)
        for begin in range(0, len(records), PIECE_MAX):
            end = begin + PIECE_MAX
            self.pieces.insert(at + begin // PIECE_MAX, Piece(records[begin:end], homes[begin:end]))
        self.count += len(records)
        if is_last:
            self._join_small()

    def _join_small(self) -> None:
        """What comes one by one makes few pieces: one of a single message takes ten times its 50 bytes."""
        pieces = self.pieces
        while len(pieces) > 1 and len(pieces[-2].records) <= 2 * len(pieces[-1].records):
            if len(pieces[-2].records) + len(pieces[-1].records) > PIECE_MAX:
                return
            last = pieces.pop()
            pieces[-1] = pieces[-1].followed_by(last)

    def know(self, sharers: Sequence[str], home: Home) -> None:
        """Find out anew what belongs where, if other groups share the order keys than before."""
        if sharers == self._sharers:
            return
        self._sharers, self.homes = sharers, []
        for piece in self.pieces:
            piece.homes = self._homes_of(piece.records, home)

    def _homes_of(self, records: Records, home: Home) -> Homes:
        keys = keys_of(records)
        if not keys.any():
            return np.full(len(records), FREE, np.int16)
        distinct, places = np.unique(keys, return_inverse=True)
        found = [self._position(home(key << KEY_SHIFT)) if key else FREE for key in distinct.tolist()]
        return np.array(found, np.int16)[places]

    def _position(self, name: str | None) -> int:
        if name not in self.homes:
            self.homes.append(name)
        return self.homes.index(name)

    def take(self, at: int, places: npt.NDArray[np.intp]) -> Records:
        """Take these messages, which ascend, out of the piece `at`."""
        piece = self.pieces[at]
        if places[-1] == len(places) - 1:
            chosen = piece.records[: len(places)]
            rest = Piece(piece.records[len(places) :], piece.homes[len(places) :])
        else:
            fits = np.zeros(len(piece.records), np.bool_)
            fits[places] = True
            chosen, rest = piece.records[fits], piece.keep(~fits)
        if len(rest.records):
            self.pieces[at] = rest
        else:
            del self.pieces[at]
        self.count -= len(chosen)
        if self._gone:
            chosen = self._without_gone(chosen)
        return chosen

    def _without_gone(self, chosen: Records) -> Records:
        fits = np.array([number not in self._gone for number in chosen["number"].tolist()], np.bool_)
        if not self.count:
            self._gone.clear()
        elif not fits.all():
            self._gone.difference_update(chosen["number"].tolist())
        return chosen if fits.all() else chosen[fits]

    def place(self, at: int) -> tuple[int, int]:
        """Return due time and number of about the message with `at` others before it; there are more than that."""
        for piece in self.pieces:
            if at < len(piece.records):
                one = piece.records[order_of(piece.records["due"], piece.records["number"])[at]]
                return int(one["due"]), int(one["number"])
            at -= len(piece.records)
        raise IndexError(at)

    def give_up(self, which: Callable[[Records], Fits]) -> int:
        """Take messages out; return how many of them were not gone."""
        if self._gone:
            self._drop_gone()
        before = self.count
        self._keep(lambda records: ~which(records))
        return before - self.count

    def remove(self, numbers: npt.NDArray[np.uint64]) -> None:
        """Leave these out from now on: they were cancelled, or written again elsewhere.

        They are not looked for: that would take as long as the queue is. When so many are gone that the queue would
        mostly be them, it is looked through once for all of them.
        """
        self._gone.update(numbers.tolist())
        if 2 * len(self._gone) > max(self.count, GONE_LEAST):
            self._drop_gone()

    def _drop_gone(self) -> None:
        gone = np.array(sorted(self._gone), np.uint64)
        self._keep(lambda records: ~np.isin(records["number"], gone))
        self._gone.clear()

    def _keep(self, which: Callable[[Records], Fits]) -> None:
        kept = (piece.keep(which(piece.records)) for piece in self.pieces)
        self.pieces = deque(piece for piece in kept if len(piece.records))
        self.count = sum(len(piece.records) for piece in self.pieces)
