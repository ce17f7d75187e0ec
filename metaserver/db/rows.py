"""Shell. Small things that reading and writing of every table needs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from sys import intern
from typing import Any, TypeVar

from qmq.metaserver.db.errors import ValueRefused

ROWS_PER_STATEMENT = 1000
"""Names in one `IN (…)`: each database takes so many arguments, and a round trip is shared by that many rows."""

T = TypeVar("T")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(values), ROWS_PER_STATEMENT):
        yield values[begin : begin + ROWS_PER_STATEMENT]


def from_json(text: str) -> Any:
    """Read JSON; raises ValueError for what is none, or holds text that is not valid Unicode: a row edited by hand may
    have half a surrogate, which nobody could write again."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_names(text: str) -> tuple[str, ...]:
    """Read a JSON array of names; raises ValueError for anything else. A name is one object, in however many arrays."""
    names = from_json(text)
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{text[:50]!r} is no JSON array of names")
    return tuple(map(intern, names))


def to_json(value: Any) -> str:
    """Write a value as JSON; raises ValueRefused for what JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueRefused(f"{type(value).__name__} cannot be written as JSON: {error}") from None
