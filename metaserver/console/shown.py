"""Core. Formats of values on the console's pages. Times are UTC, as in every log; templates escape all text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from qmq.dead_letters import FATE

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


FILTERS = {
    "rate": rate,
    "short": short,
    "utc": utc,
    "duration": duration,
    "number": number,
    "value_of": value_of,
    "without_fate": without_fate,
}
