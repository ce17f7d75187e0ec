"""Core. Frames on their way from the disk to answers: each is read once for all who want it at about the same time.

A listener asks for a quarter of a large batch at a time, in several pulls at once; and groups that read the same
backlog are often close together. Without this, each of those pulls reads the whole frame and checks its CRC again:
that was a third of what a listener's messages cost the master.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qmq.codec import Buffer
from qmq.errors import LogError
from qmq.log import MessageLog
from qmq.log.frame import Frame
from qmq.log.index import FrameRef
from qmq.replication.ports import Host

KEPT_BYTES = 16 << 20
"""Frames that were read last and stay in memory; within a mastership a log only grows, so they stay right."""

Found = list[tuple[Frame, Buffer]]


class _Wanted:
    """Frames that one answer waits for."""

    __slots__ = ("found", "_missing", "_done")

    def __init__(self, missing: int, done: Callable[[Found | LogError], None]) -> None:
        self.found: Found = []
        self._missing, self._done = missing, done

    def take(self, frame: Frame, body: Buffer) -> None:
        self.found.append((frame, body))
        if len(self.found) == self._missing:
            self._done(self.found)

    def fail(self, error: LogError) -> None:
        if self._missing:
            self._missing = 0
            self._done(error)


class Bodies:
    """Made by the delivery; ends with the mastership."""

    def __init__(self, log: MessageLog, host: Host) -> None:
        self._log, self._host = log, host
        self._waiting: dict[int, list[_Wanted]] = {}
        """By offset: who waits for a frame that is being read."""
        self._kept: dict[int, tuple[Frame, Buffer]] = {}
        """By offset, the one used longest ago first."""
        self._kept_bytes = 0

    def at_hand(self, offset: int) -> tuple[Frame, Buffer] | None:
        """Return the messages frame at `offset` and its body, if it is in memory."""
        if (found := self._kept.pop(offset, None)) is not None:
            self._kept[offset] = found
            return found
        return self._log.tail_body(offset)

    def read(self, refs: list[FrameRef], done: Callable[[Found | LogError], None]) -> None:
        """Read frames that were not at hand: these are surely on disk, what the tail has may not be written yet.

        `done` is called once, with all of them in any order, or with the error that reading one of them met.
        """
        wanted = _Wanted(len(refs), done)
        new = [ref for ref in refs if ref.offset not in self._waiting]
        for ref in refs:
            self._waiting.setdefault(ref.offset, []).append(wanted)
        if new:
            self._host.read(partial(self._log.read_bodies, new), partial(self._were_read, new))

    def _were_read(self, refs: list[FrameRef], found: Found | LogError) -> None:
        waiting = [self._waiting.pop(ref.offset) for ref in refs]
        if isinstance(found, LogError):
            for wanted in dict.fromkeys(one for several in waiting for one in several):
                wanted.fail(found)
            return
        for (frame, body), several in zip(found, waiting, strict=True):
            self._keep(frame, body)
            for wanted in several:
                wanted.take(frame, body)

    def _keep(self, frame: Frame, body: Buffer) -> None:
        kept = self._kept
        kept[frame.offset] = frame, body
        self._kept_bytes += len(body)
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(kept.pop(next(iter(kept)))[1])
