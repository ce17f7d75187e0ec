"""Core. Plain values, and names as text.

`Color.RED` of `class Color(str, Enum)` becomes "red", as on the wire: `str`, f-strings and `Path` use a subclass's own
spelling, such as 'Color.RED'. So each value of an application is made plain before it is stored or becomes part of a
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

from qmq.errors import InvalidRequest

T = TypeVar("T")

_PLAIN = frozenset({str, int, float, bool, type(None), datetime})


def plain(value: T) -> T:
    """Return a value of a subclass of str, int or float as its base class; other values unchanged."""
    if type(value) in _PLAIN:
        return value
    found: Any = value
    if isinstance(value, str):
        found = str.__str__(value)
    elif isinstance(value, int):
        found = int.__int__(value)
    elif isinstance(value, float):
        found = float.__float__(value)
    return found  # type: ignore[no-any-return]


def plain_text(noun: str, value: str, *, is_blank_allowed: bool = True) -> str:
    """Return a text as a plain str.

    Raises:
        InvalidRequest: the value is blank, or no str; a secret of pydantic, for instance, must be unwrapped first.
    """
    if not is_blank_allowed and isinstance(value, str) and not value.strip():
        raise InvalidRequest(f"{noun} is blank, {value!r}: an environment variable may be missing")
    if type(value) is str:
        return value
    if not isinstance(value, str):
        secret = ".get_secret_value()" if hasattr(value, "get_secret_value") else ""
        remedy = f"write {secret} behind it" if secret else "write str() around it if its text is meant"
        raise InvalidRequest(f"{noun} is a str, not {type(value).__name__}: {remedy}")
    return str.__str__(value)


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as text, and the number of the others: `a, b, c and 4 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")
