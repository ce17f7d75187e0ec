"""Core. Charts of the console: rates from counters read now and then, and their lines and bars as SVG coordinates."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


WIDTH, HEIGHT = 720, 160
SPAN_MS_MIN = 30_000
HOUR_MS, HOURS, STEP = 3_600_000, 24, 20
"""A bar for each hour, so far apart."""
BAR_HEIGHT = 100


def chart_of(rates: Sequence[Rates], now_ms: int) -> dict[str, Any]:
    """The last ten minutes, or as far back as is known: of each series its name, latest value and line.

    Returns:
        `most`: the value at the upper edge, a round one; `seconds`: from edge to edge; `series`; `width`, `height`.
    """
    shown = [one for one in rates if one.at_ms > now_ms - KEPT_MS]
    span_ms = min(max(now_ms - shown[0].at_ms, SPAN_MS_MIN), KEPT_MS) if shown else KEPT_MS
    names = list(dict.fromkeys(name for one in shown for name in one.values))[: SERIES_MAX + 1]
    most = round_up(max((value for one in shown for value in one.values.values()), default=0.0))
    series = []
    for name in names:
        found = [(one.at_ms, one.values[name]) for one in shown if name in one.values]
        points = " ".join(
            f"{WIDTH - (now_ms - at_ms) * WIDTH / span_ms:.0f},{HEIGHT - value * HEIGHT / most:.1f}"
            for at_ms, value in found
        )
        latest = found[-1][1] if found[-1][0] == shown[-1].at_ms else None
        series.append({"name": name, "points": points, "now": latest})
    return {"most": most, "seconds": span_ms // 1000, "series": series, "width": WIDTH, "height": HEIGHT}


def round_up(value: float) -> int:
    """The next 1, 2 or 5 with zeros behind: an edge that people read at once."""
    if value <= 1:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return next(int(step * power) for step in (1, 2, 5, 10) if step * power >= value)


def bars_of(hours: Sequence[Mapping[str, int]], now_ms: int) -> dict[str, Any]:
    """Messages due in each hour of a day, from the hour of `now_ms` on; an hour that has none is an empty place.

    Args:
        hours: `begin`, in ms since 1970, and `messages` of hours that have some.

    Returns:
        `most`: of one hour; `bars`: of each hour that has some, `x`, `y`, `height`, `begin`, `messages`; `marks`: each
        sixth hour's `x` and `begin`.
    """
    first_ms = now_ms - now_ms % HOUR_MS
    places = [((hour["begin"] - first_ms) // HOUR_MS, hour) for hour in hours]
    shown = [(place, hour) for place, hour in places if 0 <= place < HOURS]
    most = max((hour["messages"] for _, hour in shown), default=0)
    bars = []
    for place, hour in shown:
        height = hour["messages"] * BAR_HEIGHT / most if most else 0.0
        bars.append({**hour, "x": place * STEP, "y": round(BAR_HEIGHT - height, 1), "height": round(height, 1)})
    marks = [{"x": place * STEP, "begin": first_ms + place * HOUR_MS} for place in range(0, HOURS, 6)]
    return {"most": most, "bars": bars, "marks": marks}
