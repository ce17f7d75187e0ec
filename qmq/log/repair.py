"""Core. Repair of a damaged log: by another copy's frames, or by giving up the part that no copy has.

A copy is filled frame by frame, from a snapshot on. So a group with a single, damaged copy could never get a second
one, and would stay readonly. `give_up` moves to quarantine:

    if a start could replay the log    the segments up to the last damaged one: no copy can be filled from before it
    if damage stopped the replay       the damage and all bytes behind it: their meaning is unknown

`plan` does not compare copies. The caller must make sure that no other copy has more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qmq import ranges
from qmq.errors import CorruptFrame, Diverged, require
from qmq.log import quarantine
from qmq.log.disk import BLOCK_BYTES
from qmq.log.frame import decode_frames, decode_header
from qmq.log.message_log import MessageLog
from qmq.log.recovery import Damage, missing
from qmq.log.segments import NO_END, log_name, read_raw, segment_at

WHY = "given-up"
PIECE_BYTES = 4 << 20


def repair(log: MessageLog, data: bytes) -> None:
    """Replace the damaged range by the other copy's frames, from the range's first byte on.

    If the frames end within the range, the rest stays damaged: the other copy has no more frames, or another history.
    In a replayed log the epochs of the frames show where the histories part.

    Raises:
        Diverged: the frames do not join the whole parts on both sides of the damage.
        CorruptFrame: the bytes are no frames.
    """
    damage = log.damage
    require(damage is not None, "only a damaged log is repaired")
    assert damage is not None
    in_recovery = log.health.is_unreplayed
    end, chain = damage.begin, log.state.chain if in_recovery else None
    for frame, _ in decode_frames(data, damage.begin, chain):
        if in_recovery and segment_at(log.bases, frame.end - 1) != segment_at(log.bases, frame.offset):
            break  # this log's frames never cross segments, so from here on the history is another one
        if not in_recovery and frame.epoch != log.state.epoch_at(frame.offset):
            break  # another history: a later comparison of both logs cuts this one there
        end, chain = frame.end, frame.chain
        if end >= damage.end:
            break
    joins = end > damage.begin
    if joins and not in_recovery:
        assert chain is not None
        joins = _joins(log, data, damage, end, chain)
    if not joins:
        raise Diverged(f"the other copy's frames from {damage.begin} to {end} do not join this log at {damage.end}")
    if damaged := read_raw(log.disk, log.bases, damage.begin, end):
        quarantine.keep_bytes(log.disk, damage.begin, damaged, "damaged")
    at = damage.begin
    while at < end:
        base = segment_at(log.bases, at)
        later = [other for other in log.bases if other > base]
        stop = min(end, later[0]) if later else end
        piece = data[at - damage.begin : stop - damage.begin]
        if stop == end:
            piece += _rest_of_block(log, base, end, damage.end)
        _overwrite(log, base, at, piece, is_last=stop in later)
        at = stop
    if in_recovery:
        log.reload()
        return
    log.damage = Damage(end, damage.end, damage.reason) if end < damage.end else missing(log.disk, log.bases)
    if log.damage is None:
        log.damage_is_gone()


def _joins(log: MessageLog, data: bytes, damage: Damage, end: int, chain: int) -> bool:
    """Return whether frames, the last of which ends at `end`, fit between the whole parts on both sides."""
    if end < damage.end:
        return _continues_with(log, data, damage)
    is_all = damage.begin == log.start  # no frame precedes the damage, and the chain matches where the frames end
    return log.chain_is(end, chain) and (is_all or _continues_with(log, data, damage))


def _rest_of_block(log: MessageLog, base: int, begin: int, damage_end: int) -> bytes:
    """Return the present bytes from `begin` to the end of its block, because a bad block must be written whole."""
    end = min(begin + (base - begin) % BLOCK_BYTES, damage_end)
    return log.disk.read(log_name(base), begin - base, end - begin)


def _overwrite(log: MessageLog, base: int, at: int, data: bytes, *, is_last: bool) -> None:
    """Overwrite damage in the segment at `base`. `is_last`: whether the segment is closed and ends behind `data`.

    A bad block is repaired by a write of the whole block, even if the file ends within it.
    """
    if not log.disk.has(log_name(base)):
        log.disk.create(log_name(base), 0)
    end = at - base + len(data)
    padding = bytes(-end % BLOCK_BYTES if is_last else 0)
    log.disk.write(log_name(base), at - base, [data, padding])
    log.disk.sync(log_name(base))
    if padding:
        log.disk.truncate(log_name(base), end)


def _continues_with(log: MessageLog, data: bytes, damage: Damage) -> bool:
    """Return whether the first frame of `data` continues this log's history at the begin of the damage.

    If the frames before it are unreadable, too, the damage begins earlier than where the reader found it.
    """
    try:
        chain = log.stored.chain_before(damage.begin)
    except CorruptFrame as problem:
        log.damage = Damage(problem.offset, damage.end, problem.reason)
        return False
    try:
        decode_header(data, 0, damage.begin, chain)
    except CorruptFrame:
        return False
    return True


@dataclass(frozen=True, slots=True)
class GivingUp:
    """Part of the log to give up: everything from `cut` on, or, if `cut` is None, everything before `start`."""

    start: int
    cut: int | None
    problems: list[str]
    subjects: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Subject -> sequences `[begin, end)` lost with the part before `start`."""
    unconsumed: dict[tuple[str, str], int] = field(default_factory=dict)
    """(subject, consumer group) -> number of lost messages that the group has not consumed."""


def plan(log: MessageLog) -> GivingUp | None:
    """Return the next part to give up, or None if this log is whole. Reads all closed segments."""
    if log.health.is_unreplayed:
        damage = log.damage
        assert damage is not None
        return GivingUp(log.start, damage.begin, [f"no frames at [{damage.begin}, {damage.end}): {damage.reason}"])
    problems = {base: problem for base in log.bases[:-1] if (problem := _problem(log, base)) is not None}
    if not problems:
        return None
    behind = log.stored.whole_snapshot_behind(max(problems))
    start = log.end if behind is None else behind
    return GivingUp(start, None, list(problems.values()), *_lost(log, start))


def give_up(log: MessageLog, loss: GivingUp) -> None:
    """Move the part to quarantine. After a crash in between, `plan` returns the rest."""
    if loss.cut is not None:
        log.cut(loss.cut, WHY)
    elif loss.start not in log.bases:
        log.set_aside(WHY)
    while loss.start in log.bases and log.start < loss.start:
        log.set_aside_oldest_segment(WHY)
        log.flush()


def _problem(log: MessageLog, base: int) -> str | None:
    at, chain, is_whole = base, None, False
    try:
        while not is_whole:
            at, chain, is_whole = log.stored.verify(base, at, chain, PIECE_BYTES)
    except CorruptFrame as problem:
        return str(problem)
    return None


def _lost(log: MessageLog, start: int) -> tuple[dict[str, tuple[int, int]], dict[tuple[str, str], int]]:
    """Return the lost sequences by subject, as far as indexes show, and the numbers of unconsumed messages by group."""
    state, subjects = log.state, dict[str, tuple[int, int]]()
    for subject, end in sorted(state.next_sequence.items()):
        try:
            first = log.first_kept(subject, log.start)
            kept = log.first_kept(subject, start) if start in log.bases else end
        except CorruptFrame:
            continue
        if first < kept:
            subjects[subject] = first, kept
    unconsumed = {}
    for (subject, name), group in sorted(state.groups.items()):
        if subject in subjects:
            begin, end = subjects[subject]
            left = group.unconsumed(state.next_sequence[subject])
            if count := ranges.size(ranges.difference(left, [(0, begin), (end, NO_END)])):
                unconsumed[subject, name] = count
    return subjects, unconsumed
