"""Shell. Scrub: reads closed segments again in the background, to find damage while the other copy can repair it.

Each segment is read at least every `scrub_hours`, the longest unread first, with at most `scrub_bytes_per_s`. Its file
is opened by name: an open descriptor of an unlinked or exchanged file would still show the old content. Damage is
handled as any other (qmq.server.repair): a master is readonly, the bytes are fetched from the other copy, and the old
bytes are kept. Times of reads are not stored; a new process begins with the oldest segment. The newest segment, which
is still written, is not read, but its file's name is checked once a second.

The snapshot behind each segment is checked as well. A damaged one is made again from the segment and the snapshot
before it. Once the segment is deleted this is impossible, and a copy without a whole snapshot is lost at a restart.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from qmq.errors import CorruptFrame, DiskFailed
from qmq.log.fold import encode_snapshot
from qmq.replication.settings import CopySettings
from qmq.server.service import Service
from qmq.ticking import until_next_second

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
LOST_SNAPSHOT = "the snapshot of the state there is damaged, or gone"
LOOK_S = 1.0
"""Interval of the checks whether a segment is due, and of the newest file's name."""


class Scrub:
    """Scrub of one copy's log. Made by main; `run` returns when it is cancelled."""

    def __init__(self, service: Service[Any], settings: CopySettings) -> None:
        self._service = service
        self._log = service.node.log
        self.every_s = settings.scrub_hours * 3600
        self._bytes_per_s = settings.scrub_bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._verified_s: dict[int, float] = {}
        self._older = set(self._log.bases[:-1])
        """Segments written by earlier processes that this process has not read yet."""
        self._looked_s = self._began_s
        """Time of the last check of the snapshot, while there is only one segment; the start has read it."""
        self.bytes = self._lost_snapshots = self._seen = 0
        self._found_s: float | None = None
        service.scrub = self

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_newest())
            tasks.create_task(self._verify_closed())

    async def _verify_closed(self) -> None:
        while True:
            # Without a role damage is not recorded, so it would be found and logged again and again.
            rests = self._log.damage is not None or self._service.node.role is None
            base = None if rests else self._due()
            if base is None:
                self._service.guarded(self._look_at_only_snapshot)
                await self._until_next_look()
            else:
                await self._verify(base)

    async def _watch_newest(self) -> None:
        """Check the newest file's name: a restart before the segment is closed would lose its content."""
        while True:
            try:
                await asyncio.to_thread(self._log.stored.check_newest)
            except DiskFailed as error:
                self._service.fail(error)
            await self._until_next_look()

    async def _until_next_look(self) -> None:
        await asyncio.sleep(until_next_second(self._loop.time(), LOOK_S))

    @property
    def oldest_s(self) -> float:
        """Age of the oldest read of a closed segment; 0 without one."""
        self._note_segments()
        return self._loop.time() - min(self._verified_s.values(), default=self._loop.time())

    @property
    def findings(self) -> int:
        """Number of damages since the start, found by the scrub, another reader or the recovery."""
        return self._lost_snapshots + self._log.damages

    @property
    def last_finding_s(self) -> float | None:
        """Time since damage was last found, or None if this process has found none."""
        if self.findings != self._seen:
            self._seen, self._found_s = self.findings, self._loop.time()
        return None if self._found_s is None else self._loop.time() - self._found_s

    def _note_segments(self) -> None:
        """Add closed segments. Those of this process count as read when they are closed, older ones when it began."""
        closed, now_s = self._log.bases[:-1], self._loop.time()
        known = self._verified_s
        self._verified_s = {base: known.get(base, self._began_s if base in self._older else now_s) for base in closed}

    def _due(self) -> int | None:
        self._note_segments()
        base = min(
            self._verified_s,
            key=lambda base_offset: (base_offset not in self._older, self._verified_s[base_offset]),
            default=None,
        )
        if base is None or (base not in self._older and self._loop.time() - self._verified_s[base] < self.every_s):
            return None
        return base

    async def _verify(self, base: int) -> None:
        begin = at = base
        chain: int | None = None
        while base in self._log.bases[:-1]:
            try:
                begin = at
                at, chain, is_whole = await asyncio.to_thread(self._log.stored.verify, base, at, chain, PIECE_BYTES)
            except CorruptFrame as problem:
                if self._log.stored.is_damaged(problem):
                    log.error("scrub found damage offset=%d reason=%s", problem.offset, problem.reason)
                    self._service.guarded(partial(self._service.node.found_damage, problem))
                    return
                is_whole = True  # retention, a cut or a repair came in between
            except DiskFailed as error:
                self._service.fail(error)
                return
            self.bytes += at - begin
            if is_whole:
                await self._renew_snapshot(base)
                break
            await asyncio.sleep((at - begin) / self._bytes_per_s)
        self._older.discard(base)
        self._verified_s[base] = self._loop.time()

    async def _renew_snapshot(self, base: int) -> None:
        """Make the snapshot behind the whole segment at `base` again, if the snapshot is damaged."""
        try:
            found = await asyncio.to_thread(self._log.stored.state_before_lost_snapshot, base)
            if found is None or self._service.disk_free_bytes < self._service.disk_free_limit:
                return  # next time: a snapshot may be large, and a full disk would end the process
            state, end = found
            self._note_snapshot(end)
            while state.end < end:
                begin = state.end
                await asyncio.to_thread(self._log.stored.fold_on, state, end, PIECE_BYTES)
                await asyncio.sleep((state.end - begin) / self._bytes_per_s)
        except CorruptFrame:
            return  # retention, a cut or a repair came in between
        except DiskFailed as error:
            self._service.fail(error)
            return
        snapshot = await asyncio.to_thread(encode_snapshot, state)
        self._service.guarded(partial(self._log.put_snapshot, end, state.chain, snapshot))
        log.warning("snapshot made again offset=%d", end)

    def _look_at_only_snapshot(self) -> None:
        if self._loop.time() - self._looked_s >= self.every_s:
            self._looked_s = self._loop.time()
            if self._log.roll_if_no_snapshot():
                self._note_snapshot(self._log.bases[0])

    def _note_snapshot(self, offset: int) -> None:
        self._lost_snapshots += 1
        log.error("scrub found damage offset=%d reason=%s", offset, LOST_SNAPSHOT)
