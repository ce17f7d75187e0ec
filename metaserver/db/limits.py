"""Shell. What a column can hold, checked before SQL: the three databases would each do something else with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import BigInteger, Integer, String, Table, Text

from qmq.metaserver.db.errors import ValueRefused


def checked(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` if each fits its column of `table`.

    Raises:
        ValueRefused: names the column. PostgreSQL takes no NUL, MariaDB compares without spaces at the end, SQLite
            has no limits at all.
    """
    for column, value in values.items():
        kind = table.c[column].type
        where = f"{table.name}.{column}"
        if isinstance(kind, String):
            _check_text(where, value, None if isinstance(kind, Text) else kind.length)
        elif isinstance(kind, Integer):
            _check_number(where, value, 63 if isinstance(kind, BigInteger) else 31)
    return dict(values)


def _check_text(where: str, value: Any, chars_max: int | None) -> None:
    if not isinstance(value, str):
        raise ValueRefused(f"{where}: {value!r} is no text")
    if chars_max is not None and len(value) > chars_max:
        raise ValueRefused(f"{where}: {value[:20]!r}… has {len(value)} characters, {chars_max} fit")
    if "\x00" in value:
        raise ValueRefused(f"{where}: {value[:20]!r} contains the character NUL")
    if chars_max is not None and value.endswith(" "):
        raise ValueRefused(f"{where}: {value[:20]!r} ends with a space")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueRefused(f"{where}: {value[:20]!r} is not valid Unicode")


def _check_number(where: str, value: Any, bits: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << bits) <= value < 1 << bits:
        raise ValueRefused(f"{where}: {value!r} is no integer of {bits + 1} bits")
