"""Core. What no copy can mend any more: the damaged part of a log is given up, and the rest is whole.

A copy is filled frame by frame, from a snapshot on. So a group whose only copy is damaged would never get a second one,
and would stay readonly for ever. Given up is, into quarantine,

    if a start could replay the log     the segments up to the last damaged one: no copy can be filled from before it
    if damage kept it from being so     what stands at the damage and behind it: nobody knows what follows from it

Which copy has more is not looked at: whoever calls this knows that there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qmq import ranges
from qmq.errors import CorruptFrame
from qmq.log.message_log import MessageLog
from qmq.log.segments import NO_END

WHY = "given-up"
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class GivingUp:
    """What is to go: everything from `cut` on, if that is an offset; else everything before `start`."""

    start: int
    cut: int | None
    problems: list[str]
    subjects: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Subject -> sequences `[begin, end)` that go with what is before `start`."""
    unconsumed: dict[tuple[str, str], int] = field(default_factory=dict)
    """(subject, consumer group) -> how many of these it has not consumed."""


def plan(log: MessageLog) -> GivingUp | None:
    """Return what has to go next for this log to be whole; None: it is. Reads all closed segments."""
    if log.health.is_unreplayed:
        damage = log.damage
        assert damage is not None
        return GivingUp(log.start, damage.begin, [f"no frames at [{damage.begin}, {damage.end}): {damage.reason}"])
    problems = {base: problem for base in log.bases[:-1] if (problem := _problem(log, base)) is not None}
    if not problems:
        return None
    start = log.whole_snapshot_behind(max(problems))
    return GivingUp(start, None, list(problems.values()), *_lost(log, start))


def give_up(log: MessageLog, what: GivingUp) -> None:
    """Let it go. After a crash in between, `plan` says what is left of it."""
    if what.cut is not None:
        log.cut(what.cut, WHY)
    elif what.start not in log.bases:
        log.set_aside(WHY)
    while what.start in log.bases and log.start < what.start:
        log.set_aside_oldest_segment(WHY)
        log.flush()


def _problem(log: MessageLog, base: int) -> str | None:
    at, chain, is_whole = base, None, False
    try:
        while not is_whole:
            at, chain, is_whole = log.verify(base, at, chain, PIECE_BYTES)
    except CorruptFrame as problem:
        return str(problem)
    return None


def _lost(log: MessageLog, start: int) -> tuple[dict[str, tuple[int, int]], dict[tuple[str, str], int]]:
    """Say which sequences go, as far as indexes tell, and what of them nobody has consumed."""
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
