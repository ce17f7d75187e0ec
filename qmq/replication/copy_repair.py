"""Core. Repair of a damaged copy from others of its group: the copy to use, the range to fetch, the parts to cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qmq.errors import CorruptFrame, Diverged
from qmq.log.frame import decode_frames
from qmq.log.recovery import Damage
from qmq.log.repair import repair
from qmq.message_sizes import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from qmq.replication.node import Node

log = logging.getLogger(__name__)

Extent = tuple[int, int]
"""Begin and end of a copy's log on disk."""

ATTEMPTS_EACH = 2
"""Attempts per copy. If it has no frame at the begin of the damage, the second attempt fetches frames before it."""


class Sources:
    """Choice of the copy to fetch from. Copies with the whole damaged range take turns, because one may have another
    history, or be damaged itself.
    """

    def __init__(self) -> None:
        self._damage: Damage | None = None
        self._attempts = 0

    def best(self, damage: Damage, extents: Sequence[Extent | None]) -> int | None:
        """Return the index in `extents` of the copy to fetch from now, or None. The extent of a silent copy is None.

        A range that no copy has may be given up (`CopyRepair.plan`). So without a copy that has it, all must have
        answered; then the copy with the longest log decides.
        """
        if damage != self._damage:
            self._damage = damage
            self._attempts = 0
        answered = [(at, extent) for at, extent in enumerate(extents) if extent is not None]
        whole = [at for at, (begin, end) in answered if begin <= damage.begin and damage.end <= end]
        if whole:
            self._attempts += 1
            return whole[(self._attempts - 1) // ATTEMPTS_EACH % len(whole)]
        if not answered or len(answered) < len(extents):
            return None
        return max(answered, key=lambda answer: answer[1][1])[0]


class CopyRepair:
    """Repair of one process's log. Made by its node; ends with the node."""

    def __init__(self, node: Node[Any]) -> None:
        self._node = node
        self._looks_before: Damage | None = None
        """Damage at whose begin the other copy has no frame, because that copy's frame begins earlier."""

    def plan(self, theirs_start: int, theirs_end: int) -> tuple[int, int] | None:
        """Repair the log as far as no bytes of the other copy are needed.

        Args:
            theirs_start, theirs_end: extent of the other copy's log on disk.

        Returns:
            Range of frames to fetch for `apply`, or None if no frames are needed.
        """
        damage = self._node.log.damage
        if damage is None:
            return None
        if theirs_start > damage.begin:
            self._repair_old(theirs_start)
        elif theirs_end < damage.end:
            if damage.begin < theirs_end and self._node.log.stored.may_be_acknowledged(
                damage, self._node.log.state.high_watermark
            ):
                self._node.leave_role()  # the log behind `theirs_end` must be cut
                return damage.begin, theirs_end
            self._cut_damage(f"damaged and unknown to the other copy: {damage.reason}")
        elif self._looks_before is damage:
            self._looks_before = None
            return max(damage.begin - FRAME_BYTES_MAX, theirs_start), damage.begin + 1
        else:
            return damage.begin, damage.end
        return None

    def apply(self, begin: int, data: bytes) -> None:
        """Repair the damage with the other copy's frames, the first of which is at `begin`.

        If the other copy's frames are whole but do not continue this log, the histories parted earlier. Then this log
        is cut where replay stopped, and the next handshake finds the common part.

        Raises:
            CorruptFrame, Diverged: these bytes repair nothing.
        """
        damage = self._node.log.damage
        if damage is None:
            return
        try:
            if begin != damage.begin:
                if begin > damage.begin:
                    self._looks_before = (
                        damage  # the copy may be damaged there, too, or have one frame across that place
                    )
                raise Diverged(f"the other copy has no frame at {damage.begin}")
            repair(self._node.log, data)
        except (CorruptFrame, Diverged):
            if self._node.role is not None or not _is_other_history(begin, data, damage):
                raise
            self._cut_damage("damaged, and the other copy has another history there")
            return
        if self._node.log.damage is None:
            self._node.repaired()

    def _cut_damage(self, why: str) -> None:
        """Cut the damaged end of the log, unless it may be acknowledged, because only this copy had it."""
        assert self._node.log.damage is not None
        if self._node.log.stored.may_be_acknowledged(self._node.log.damage, self._node.log.state.high_watermark):
            log.critical("damage cannot be repaired: the other copy lost that range group=%s", self._node.group)
            return
        self._node.leave_role()
        if self._node.log.is_idle:  # otherwise the next attempt cuts
            self._node.log.cut(self._node.log.damage.begin, why)
            self._node.begin_role()

    def _repair_old(self, theirs_start: int) -> None:
        """Drop the damaged segment, which the other copy lacks, if its deletion was agreed; else set it aside."""
        if self._node.role is None and self._node.log.is_idle:
            self._node.log.set_aside("damaged-and-dropped-by-the-other-copy")
            self._node.begin_role()
            return
        if self._node.role is None:
            return  # appended frames are still being written; the next attempt continues
        while (
            self._node.log.damage is not None
            and len(self._node.log.bases) > 1
            and self._node.log.bases[1] <= theirs_start
        ):
            if self._node.log.oldest_may_go:
                self._node.log.drop_oldest_segment()
            else:
                self._node.log.set_aside_oldest_segment("damaged-and-not-at-the-other-copy")
        self._node.host.pass_soon()
        if self._node.log.damage is None:
            self._node.repaired()


def _is_other_history(begin: int, data: bytes, damage: Damage) -> bool:
    """Return whether the other copy's frames, which do not continue this log, prove that the histories parted earlier.

    Raises:
        CorruptFrame: the other copy is damaged as well, so there is no proof.
    """
    frames = [frame for frame, _ in decode_frames(data, begin, None)]
    if begin < damage.begin:
        return any(frame.offset < damage.begin < frame.end for frame in frames)
    return begin == damage.begin and bool(frames) and frames[-1].end >= damage.end
