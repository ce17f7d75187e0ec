"""Core. From counters that were looked at now and then to messages a second; and the counters of what is looked at."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

GAP_MS_MIN = 900
"""Two looks that are nearer to each other say nothing, and two people may look at once."""
KEPT_MS = 600_000
KEPT_MAX = 121
SUBJECTS_MAX = 200
SERIES_MAX = 8
"""So many consumer groups of a subject are kept."""


class Look(NamedTuple):
    """Counters at a moment, milliseconds since 1970."""

    at_ms: int
    counts: Mapping[str, int]


class Rates(NamedTuple):
    """Messages a second, since the look before, at a moment."""

    at_ms: int
    values: Mapping[str, float]


def per_second(looks: Sequence[Look]) -> list[Rates]:
    """Rates between each two looks. A counter that went down began anew: of that step, it has none."""
    rates, before = [], looks[0] if looks else None
    for look in looks[1:]:
        assert before is not None, "there is a first one"
        gap_ms = look.at_ms - before.at_ms
        if gap_ms < GAP_MS_MIN:
            continue
        steps = {name: count - before.counts[name] for name, count in look.counts.items() if name in before.counts}
        rates.append(Rates(look.at_ms, {name: step * 1000 / gap_ms for name, step in steps.items() if step >= 0}))
        before = look
    return rates


class Looks:
    """Counters of subjects while somebody looks at them: bounded in subjects, in series, in number and in age.

    About 200 subjects of 121 looks at 9 numbers. Made by the console.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, deque[Look]] = OrderedDict()

    def note(self, subject: str, look: Look) -> list[Look]:
        """Keep a look; return all of the last ten minutes, the oldest first."""
        kept = self._kept.setdefault(subject, deque(maxlen=KEPT_MAX))
        self._kept.move_to_end(subject)
        while len(self._kept) > SUBJECTS_MAX:
            self._kept.popitem(last=False)
        while kept and kept[0].at_ms < look.at_ms - KEPT_MS:
            kept.popleft()
        if not kept or look.at_ms - kept[-1].at_ms >= GAP_MS_MIN:
            kept.append(look)
        return list(kept)
