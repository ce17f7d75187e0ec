"""Core. From which of several copies a damaged one is repaired."""

from __future__ import annotations

from collections.abc import Sequence

from qmq.log.recovery import Damage

Extent = tuple[int, int]
"""Begin and end of the log that a copy has on its disk."""


def best_source(damage: Damage, extents: Sequence[Extent | None]) -> int | None:
    """Return which copy to ask, by its place in `extents`; None of a copy: it does not answer.

    One that has all of the damaged range. What no copy has may be given up (`Node.mend`), so without such a one all
    have to answer first; then the one with the longest log says what becomes of the range.
    """
    for at, extent in enumerate(extents):
        if extent is not None and extent[0] <= damage.begin and damage.end <= extent[1]:
            return at
    answered = [(extent[1], at) for at, extent in enumerate(extents) if extent is not None]
    return max(answered)[1] if answered and len(answered) == len(extents) else None
