"""Core. Recovery: replay of the files that a crash left, which separates a torn tail from damage.

Replay starts at the newest whole snapshot. At bytes that are no frame it searches for a frame behind them:

- neither a frame nor a segment follows: a torn tail, written but never fsynced. It is cut, after a copy went to
  quarantine.
- a frame follows, or a segment, even an empty one: its file was made after the one before was fsynced up to its end.
  This is damage. Nothing is cut. The owner fetches the range from the other copy, or learns that none of it was ever
  acknowledged, and does not act as master before.

A listed file that is gone, or one of an older segment that is too short, is damage as well.

Recovering twice gives the same as recovering once.

The health of a copy is a table of states. `MessageLog.damage` holds the unreadable range, in DAMAGED and UNREPLAYED
only. The other copy's frames repair it. The RECOVERED events and REPLAY_STOPPED are results of reading the copy back:
at a start, after a cut, a seed or a repair.

Keeps I14.
"""

from __future__ import annotations

import contextlib
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from qmq.errors import CorruptFrame, NewerFormat
from qmq.log import manifest, quarantine, segments
from qmq.log.disk import Disk
from qmq.log.fold import State, apply, decode_snapshot, encode_snapshot
from qmq.log.frame import FrameKind, decode_frames, decode_header
from qmq.log.index import SegmentIndex
from qmq.log.manifest import expected_bases
from qmq.log.segments import (
    CHUNK_BYTES,
    NO_END,
    frame_behind,
    index_name,
    log_name,
    read_chunk,
    read_raw,
    snapshot_name,
)
from qmq.states import Machine, TransitionTable


class LogHealth(Enum):
    WHOLE = auto()
    TAIL_CUT = auto()  # acknowledged frames may be missing at the end: a master must match its slave first
    DAMAGED = auto()  # a range below the end cannot be read: a master is readonly
    UNREPLAYED = auto()  # the frames behind the damage are not replayed: no role until it is repaired


class HealthEvent(Enum):
    RECOVERED_WHOLE = auto()
    RECOVERED_SHORT = auto()
    RECOVERED_DAMAGED = auto()
    REPLAY_STOPPED = auto()
    FOUND_DAMAGE = auto()  # a reader met bytes that are no frame
    REPAIRED = auto()  # or the segment with the damage was dropped
    REPAIRED_SHORT = auto()  # repaired, and the tail is still cut
    MATCHED = auto()  # this copy has all frames of the other one


_S, _E = LogHealth, HealthEvent

_READ_BACK: dict[object, LogHealth] = {
    _E.RECOVERED_WHOLE: _S.WHOLE,
    _E.RECOVERED_SHORT: _S.TAIL_CUT,
    _E.RECOVERED_DAMAGED: _S.DAMAGED,
    _E.REPLAY_STOPPED: _S.UNREPLAYED,
}
"""Events that every state has."""

HEALTH = TransitionTable(
    LogHealth.WHOLE,
    {
        (_S.WHOLE, _E.FOUND_DAMAGE): _S.DAMAGED,
        (_S.TAIL_CUT, _E.MATCHED): _S.WHOLE,
        (_S.TAIL_CUT, _E.FOUND_DAMAGE): _S.DAMAGED,
        (_S.DAMAGED, _E.REPAIRED): _S.WHOLE,
        (_S.DAMAGED, _E.REPAIRED_SHORT): _S.TAIL_CUT,
        (_S.DAMAGED, _E.FOUND_DAMAGE): _S.DAMAGED,
        (_S.UNREPLAYED, _E.REPAIRED): _S.WHOLE,
        (_S.UNREPLAYED, _E.REPAIRED_SHORT): _S.TAIL_CUT,
        (_S.UNREPLAYED, _E.FOUND_DAMAGE): _S.UNREPLAYED,
    }
    | {(state, event): after for state in LogHealth for event, after in _READ_BACK.items()},
)


class LogLife(Machine[LogHealth]):
    """Health of one copy. Made by its `MessageLog`, which enters its states."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(HEALTH)

    @property
    def is_unreplayed(self) -> bool:
        """Whether damage keeps this copy from being replayed to its end."""
        return self.state is LogHealth.UNREPLAYED

    def is_of(self, damage: object) -> bool:
        """Return whether the state fits `damage`. For the simulators."""
        return (damage is None) == (self.state in (LogHealth.WHOLE, LogHealth.TAIL_CUT))


class Damage(NamedTuple):
    """Bytes `[begin, end)` that are no frames although a frame or a segment follows at `end`."""

    begin: int
    end: int
    reason: str


class Recovered(NamedTuple):
    state: State
    bases: list[int]
    newest: SegmentIndex
    damage: Damage | None
    torn_bytes: int


def recover(disk: Disk) -> Recovered:
    """Read the log back; afterwards everything before `state.end` is durable.

    A log whose oldest segment lacks its snapshot and does not begin at offset 0 has an unknown beginning. It is set
    aside whole, and this copy must be seeded. If the newest segment's file is gone, the tail counts as cut.
    """
    bases, leftover = expected_bases(disk)
    begin = _newest_snapshot(disk, bases)
    if begin is None:
        set_aside(disk, bases[0], bases[-1], "no-beginning")
        return recover(disk)  # an empty state
    state, first = begin
    index, damage, torn = SegmentIndex(0), None, 0
    for position in range(first, len(bases)):
        base = bases[position]
        if state.end != base:
            damage = Damage(state.end, base, "the segment before ends too early")
            break
        if position > first:  # new copies are seeded from it once the earlier segments are gone
            disk.put(snapshot_name(base), encode_snapshot(state))
        index, is_last = SegmentIndex(base), base == bases[-1]
        if is_last and not disk.has(log_name(base)):
            disk.put(segments.TAIL_CUT, b"the newest segment's file is gone")
            disk.create(log_name(base), 0)
        problem = _replay(disk, base, state, index)
        if not is_last and state.end == bases[position + 1]:  # zeros may follow
            disk.put(index_name(base), index.encode(state.end))
        elif problem is not None:
            following = frame_behind(disk, bases, state.end)
            if following is not None or not is_last:
                damage = Damage(state.end, following or bases[position + 1], problem.reason)
            else:
                torn = _cut_torn_tail(disk, base, state.end)
            break
    if bases and damage is None:
        _sync_all(disk, bases)
        damage = missing(disk, bases)
    if bases and bases != manifest.read_manifest(disk):
        manifest.write_manifest(disk, bases)
    _clear_away(disk, leftover, [*leftover, *bases], state.kept.start)
    return Recovered(state, bases, index, damage, torn)


def _sync_all(disk: Disk, bases: list[int]) -> None:
    """Make the replayed frames durable. Those of closed segments are, unless a repair ended between its write and its
    fsync.
    """
    for base in bases:
        if disk.has(log_name(base)):
            disk.sync(log_name(base))


def set_aside(disk: Disk, begin: int, end: int, why: str) -> None:
    """Move the whole copy to quarantine. The new copy counts as incomplete until it has matched another one."""
    disk.put(segments.TAIL_CUT, why.encode())
    names = [f"{segments.FOLDER}/{name}" for name in disk.names(segments.FOLDER)]
    names.sort(key=lambda name: name != manifest.NAME)  # the manifest first: a crash in between leaves no damage
    quarantine.keep_files(disk, [name for name in names if name != segments.TAIL_CUT], begin, end, why)


def _clear_away(disk: Disk, leftover: list[int], all_bases: list[int], kept_from: int) -> None:
    """Finish an interrupted deletion of segments. Those without an agreed deletion go to quarantine."""
    for base, following in pairwise(sorted(all_bases)):
        if base not in leftover:
            continue
        names = [name for name in (index_name(base), snapshot_name(base), log_name(base)) if disk.has(name)]
        if following > kept_from:
            quarantine.keep_files(disk, names, base, following, "not-listed")
            continue
        for name in names:
            disk.remove(name)


def _newest_snapshot(disk: Disk, bases: list[int]) -> tuple[State, int] | None:
    """Return the state to start from and the index of its segment; None if no snapshot is whole.

    Raises:
        NewerFormat: all snapshots are of a newer version.
    """
    newer: NewerFormat | None = None
    for position, base in reversed(list(enumerate(bases))):
        try:
            state = decode_snapshot(disk.read(snapshot_name(base), 0, disk.size(snapshot_name(base))))
        except (ValueError, KeyError):
            continue
        except NewerFormat as error:
            newer = error
            continue
        if state.end == base:
            return state, position
    if not bases or not bases[0]:
        return State(), 0
    if newer is not None:
        raise newer
    return None


def missing(disk: Disk, bases: list[int]) -> Damage | None:
    """Return the first range before the newest segment whose file is gone or too short; replay begins behind it."""
    for base, following in pairwise(bases):
        if base + disk.size(log_name(base)) < following:
            begin = base
            with contextlib.suppress(CorruptFrame):
                while begin < following:
                    begin = read_chunk(disk, bases, begin, following).end
            return Damage(begin, following, "its file is gone, or ends too early")
    return None


def _replay(disk: Disk, base: int, state: State, index: SegmentIndex) -> CorruptFrame | None:
    """Fold the segment's frames into `state`; return the error that stopped it before the file's end, or None.

    Raises:
        NewerFormat: a newer version wrote a frame.
    """
    size = disk.used(log_name(base))
    want = CHUNK_BYTES
    while state.end - base < size:
        begin = state.end
        data = disk.read(log_name(base), begin - base, min(want, size - (begin - base)))
        want = CHUNK_BYTES
        try:
            for frame, body in decode_frames(data, begin, state.chain):
                apply(state, frame, body)
                if frame.kind == FrameKind.MESSAGES:
                    index.add(frame)
        except NewerFormat:
            raise  # neither a torn tail nor damage
        except CorruptFrame as problem:
            if state.end > begin:
                continue  # the chunk ended within a frame, or the next read begins at the bad one
            missing = _frame_bytes(data, begin)
            if missing <= len(data) or missing > size - (begin - base):
                return problem
            want = missing
        except ValueError as problem:
            return CorruptFrame(state.end, str(problem))
    return None


def _frame_bytes(data: bytes, offset: int) -> int:
    """Return the frame length in the header at the start of `data`; 0 if there is none."""
    try:
        frame = decode_header(data, 0, offset, None)
    except CorruptFrame:
        return 0
    return frame.end - offset


def _cut_torn_tail(disk: Disk, base: int, end: int) -> int:
    """Remove the bytes behind `end` in the newest segment; return their number, without zeros at the end."""
    torn = read_raw(disk, [base], end, NO_END).rstrip(b"\0")
    if torn:
        disk.put(segments.TAIL_CUT, b"torn tail")
        quarantine.keep_bytes(disk, end, torn, "torn tail")
        disk.truncate(log_name(base), end - base)
    return len(torn)
