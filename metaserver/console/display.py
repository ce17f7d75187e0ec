"""Core. Values as the console shows them: times, numbers, and charts as SVG coordinates.

Times are UTC, as in every log; templates escape all text. Charts show rates from counters read now and then.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from qmq.dead_letters import FATE
from qmq.message_view import body_facts, hex_dump, is_encrypted, visible

NOTHING = "–"
_STEPS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def utc(ms: Any) -> str:
    """Format milliseconds since 1970; 0 and None are empty."""
    if not ms:
        return NOTHING
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def duration(seconds: Any) -> str:
    """Format a duration in two units: `3 h 12 min`."""
    if seconds is None:
        return NOTHING
    left, parts = max(int(seconds), 0), []
    for size, unit in _STEPS:
        if left >= size:
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2]) or "0 s"


def number(value: Any) -> str:
    """Format a number with commas."""
    if value is None or value == "":
        return NOTHING
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def value_of(value: Any) -> str:
    """Format any JSON value on one line."""
    if value is None or value == "":
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def without_fate(properties: Mapping[str, str]) -> dict[str, str]:
    """Return a dead letter's original properties; its fate has columns of its own."""
    return {name: value for name, value in properties.items() if name not in FATE}


SHORT_CHARS = 300


def body_of(message: Mapping[str, Any], chars_max: int, dump_bytes: int) -> dict[str, Any] | None:
    """Return a body as a page shows it, or None without one.

    Returns:
        `facts`: type, size, compression; `text`: content, cut to `chars_max` characters, or a dump of its first bytes;
        `is_json`, `is_dump`: whether the page draws a tree, or columns; `is_short`: whether a list shows it open;
        `is_cut`: whether there is more; `note`: reason without content.
    """
    if not (facts := body_facts(message)):
        return None
    note, text, is_cut = message.get("bodyProblem", ""), message.get("body"), bool(message.get("bodyCut"))
    kind = message.get("contentType", "")
    if text is not None:
        is_cut = is_cut or len(text) > chars_max
        text = text[:chars_max]
    elif not note and not is_encrypted(message):
        data = b64decode(message.get("bodyBase64", ""))
        is_cut, text = is_cut or len(data) > dump_bytes, hex_dump(data[:dump_bytes])
    is_dump = "body" not in message
    is_json = not is_dump and (not kind or "json" in kind.lower())
    is_short = len(text or "") <= SHORT_CHARS
    shown = {"facts": facts, "text": text or "", "is_json": is_json, "is_dump": is_dump, "is_short": is_short}
    return shown | {"is_cut": is_cut, "note": note}


def moment_ms(text: str) -> int | None:
    """Parse a form's moment, `2026-01-31T14:05`, as UTC; None if it is no moment."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def rate(value: float) -> str:
    """Format messages per second; small numbers with one decimal."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def short(value: int) -> str:
    """Format a round number for an axis: `20 k`."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if value >= size:
            return f"{value // size} {unit}"
    return str(value)


def size(value: Any) -> str:
    """Format bytes with three figures: `5.21 GB`."""
    if value is None or value == "":
        return NOTHING
    amount = float(value)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return NOTHING


def percent(value: Any) -> str:
    """Format a share of one processor."""
    return NOTHING if value is None else f"{value:.0%}" if value >= 0.1 or not value else f"{value:.1%}"


SPARK_WIDTH, SPARK_HEIGHT, SPARK_MS = 120, 26, 1_800_000


def spark(points: Sequence[tuple[int, float]], now_ms: int) -> str:
    """Return the line of half an hour as SVG coordinates; empty with fewer than two points."""
    shown = [(at_ms, value) for at_ms, value in points if now_ms - SPARK_MS < at_ms <= now_ms]
    if len(shown) < 2:
        return ""
    most, begin_ms = max(value for _, value in shown) or 1.0, max(now_ms - SPARK_MS, shown[0][0])
    span_ms = max(shown[-1][0] - begin_ms, 1)
    return " ".join(
        f"{(at_ms - begin_ms) * SPARK_WIDTH / span_ms:.0f},{1 + (1 - value / most) * (SPARK_HEIGHT - 2):.1f}"
        for at_ms, value in shown
    )


FILTERS: dict[str, Callable[..., Any]] = {
    "size": size,
    "percent": percent,
    "rate": rate,
    "short": short,
    "utc": utc,
    "duration": duration,
    "number": number,
    "value_of": value_of,
    "without_fate": without_fate,
    "visible": visible,
}


GAP_MS_MIN = 900
"""Shortest interval between readings: shorter ones give no useful rate, and two people may look at once."""
KEPT_MS = 600_000
KEPT_MAX = 121
SUBJECTS_MAX = 200
SERIES_MAX = 8
"""Number of consumer groups kept per subject."""


class Reading(NamedTuple):
    """Counters at a moment, milliseconds since 1970."""

    at_ms: int
    counts: Mapping[str, int]


class Rates(NamedTuple):
    """Messages per second since the reading before."""

    at_ms: int
    values: Mapping[str, float]


def per_second(readings: Sequence[Reading]) -> list[Rates]:
    """Return the rates between readings. A counter that fell was reset, so that step has no rate."""
    rates, before = [], readings[0] if readings else None
    for reading in readings[1:]:
        assert before is not None, "there is a first one"
        gap_ms = reading.at_ms - before.at_ms
        if gap_ms < GAP_MS_MIN:
            continue
        steps = {name: count - before.counts[name] for name, count in reading.counts.items() if name in before.counts}
        rates.append(Rates(reading.at_ms, {name: step * 1000 / gap_ms for name, step in steps.items() if step >= 0}))
        before = reading
    return rates


class Readings:
    """Readings of subjects that are open in a console: bounded in subjects, series, number and age.

    About 200 subjects with 121 readings of 9 numbers. Made by the console.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, deque[Reading]] = OrderedDict()

    def note(self, subject: str, reading: Reading) -> list[Reading]:
        """Store a reading; return those of the last ten minutes, the oldest first."""
        kept = self._kept.setdefault(subject, deque(maxlen=KEPT_MAX))
        self._kept.move_to_end(subject)
        while len(self._kept) > SUBJECTS_MAX:
            self._kept.popitem(last=False)
        while kept and kept[0].at_ms < reading.at_ms - KEPT_MS:
            kept.popleft()
        if not kept or reading.at_ms - kept[-1].at_ms >= GAP_MS_MIN:
            kept.append(reading)
        return list(kept)


WIDTH, HEIGHT = 720, 160
SPAN_MS_MIN = 30_000
HOUR_MS, HOURS, STEP = 3_600_000, 24, 20
"""Pixels between the hourly bars."""
BAR_HEIGHT = 100


def chart_of(rates: Sequence[Rates], now_ms: int, kept_ms: int = KEPT_MS) -> dict[str, Any]:
    """Return the last ten minutes, or less if there is less: name, latest value and line of each series.

    Returns:
        `most`: value of the upper edge, a round number; `seconds`: width of the chart; `series`; `width`, `height`.
    """
    shown = [rate for rate in rates if rate.at_ms > now_ms - kept_ms]
    span_ms = min(max(now_ms - shown[0].at_ms, SPAN_MS_MIN), kept_ms) if shown else kept_ms
    names = list(dict.fromkeys(name for rate in shown for name in rate.values))[: SERIES_MAX + 1]
    most = round_up(max((value for rate in shown for value in rate.values.values()), default=0.0))
    series = []
    for name in names:
        found = [(rate.at_ms, rate.values[name]) for rate in shown if name in rate.values]
        points = " ".join(
            f"{WIDTH - (now_ms - at_ms) * WIDTH / span_ms:.0f},{HEIGHT - value * HEIGHT / most:.1f}"
            for at_ms, value in found
        )
        latest = found[-1][1] if found[-1][0] == shown[-1].at_ms else None
        series.append({"name": name, "points": points, "now": latest})
    return {"most": most, "seconds": span_ms // 1000, "series": series, "width": WIDTH, "height": HEIGHT}


def round_up(value: float) -> int:
    """Return the next 1, 2 or 5 times a power of ten, which makes a readable edge."""
    if value <= 1:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return next(int(step * power) for step in (1, 2, 5, 10) if step * power >= value)


def bars_of(hours: Sequence[Mapping[str, int]], now_ms: int) -> dict[str, Any]:
    """Return bars of messages due per hour for a day, beginning with the hour of `now_ms`.

    Args:
        hours: `begin`, in ms since 1970, and `messages` of hours that have some.

    Returns:
        `most`: highest bar; `bars`: for each hour with messages, `x`, `y`, `height`, `begin`, `messages`; `marks`: `x`
        and `begin` of every sixth hour.
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
