"""Core. From which of several copies a damaged one is repaired."""

from __future__ import annotations

from collections.abc import Sequence

from qmq.log.recovery import Damage

Extent = tuple[int, int]
"""Begin and end of the log that a copy has on its disk."""

ATTEMPTS_EACH = 2
"""For one copy: if it has no frame where the damage begins, the next attempt looks before (`Node.plan_repair`)."""


class Sources:
    """Asked at each attempt to mend. Copies that have all of the damaged range take turns: the frames of one may not
    join, because its history is another one, or it is damaged itself."""

    def __init__(self) -> None:
        self._damage: Damage | None = None
        self._attempts = 0

    def best(self, damage: Damage, extents: Sequence[Extent | None]) -> int | None:
        """Return which copy to ask now, by its place in `extents`; None of a copy: it does not answer.

        What no copy has may be given up (`Node.plan_repair`): without one that has it, all have to answer first; then
        the one with the longest log says what becomes of the range.
        """
        if damage != self._damage:
            self._damage, self._attempts = damage, 0
        answered = [(at, extent) for at, extent in enumerate(extents) if extent is not None]
        whole = [at for at, (begin, end) in answered if begin <= damage.begin and damage.end <= end]
        if whole:
            self._attempts += 1
            return whole[(self._attempts - 1) // ATTEMPTS_EACH % len(whole)]
        if not answered or len(answered) < len(extents):
            return None
        return max(answered, key=lambda one: one[1][1])[0]
