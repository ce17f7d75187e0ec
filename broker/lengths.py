"""Core. How many bytes of a limited subject wait for each of its consumer groups.

No number of the fold says that. It is counted by the consume log: each frame once when it is there, once when the group
has gone past it, and never more of them in a tick than cost a few milliseconds. So after a start, or after a group was
moved, the count begins at the group's position and grows until it has met the subject's end: it is too low meanwhile,
and never too high.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq.log import MessageLog
from qmq.log.group import Group
from qmq.log.index import FrameRef

FRAMES_PER_TICK = 4_000
"""About 10 ms, of which there are ten in a second; so of limited subjects, 20,000 batches a second are kept up with."""
FRAMES_AT_ONCE = 2_000

Key = tuple[str, str]


@dataclass(slots=True)
class _Counted:
    """Whole frames with the sequences [begin, end), and their bytes."""

    begin: int
    end: int
    bytes: int = 0


class Lengths:
    """Made by `broker.pruning`; ends with the mastership."""

    def __init__(self, log: MessageLog) -> None:
        self._log = log
        self._counted: dict[Key, _Counted] = {}
        self._left = FRAMES_PER_TICK

    def new_tick(self) -> None:
        self._left = FRAMES_PER_TICK

    def forget(self, key: Key) -> None:
        self._counted.pop(key, None)

    def waiting(self, key: Key, group: Group) -> int:
        """Return how many bytes wait for a group: what it was not delivered, and what is requeued, at the size of the
        messages around the first of that.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        subject, log = key[0], self._log
        end = log.state.next_sequence.get(subject, 0)
        new = self._new(key, group.position, end) if group.position < end else 0
        first = group.requeued.first
        refs = log.frames(subject, first, 1) if first is not None else []
        return new + sum(_part(ref, group.requeued.messages) for ref in refs)

    def _new(self, key: Key, position: int, end: int) -> int:
        refs = self._log.frames(key[0], position, 1)
        if not refs:
            return 0
        first, counted = refs[0], self._counted.get(key)
        if counted is None or not counted.begin <= first.begin <= counted.end:
            counted = self._counted[key] = _Counted(first.begin, first.begin)
        if not self._leave(key[0], counted, first.begin):
            return 0
        while counted.end < end and self._left > 0:
            refs = self._take(key[0], counted.end)
            counted.bytes += sum(ref.length for ref in refs)
            counted.end = refs[-1].end
        return counted.bytes - _part(first, max(position - first.begin, 0))

    def _leave(self, subject: str, counted: _Counted, begin: int) -> bool:
        """Count what lies before `begin` no more; return whether that is done."""
        while counted.begin < begin and self._left > 0:
            refs = self._take(subject, counted.begin)
            if refs[0].begin != counted.begin:  # retention took some that were counted
                counted.begin, counted.end, counted.bytes = begin, begin, 0
                return True
            gone = [ref for ref in refs if ref.begin < begin]
            counted.bytes -= sum(ref.length for ref in gone)
            counted.begin = gone[-1].end
        return counted.begin == begin

    def _take(self, subject: str, sequence: int) -> list[FrameRef]:
        refs = self._log.frames(subject, sequence, min(FRAMES_AT_ONCE, self._left))
        self._left -= len(refs)
        return refs


def _part(ref: FrameRef, messages: int) -> int:
    return ref.length * messages // (ref.end - ref.begin)
