"""Core. Changes of a plan, value by value, as tools and console show them before confirmation.

A broker that is added, removed or replaced is one difference, not one for each of its ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Difference(NamedTuple):
    path: str
    """Path of field names, with dots; "value" for the whole."""
    before: Any
    after: Any
    """None if absent."""


def differences(before: Any, after: Any, path: str = "") -> list[Difference]:
    """Return the differences in the order of the old fields, then of the new ones."""
    if isinstance(before, Mapping | None) and isinstance(after, Mapping | None):
        old, new = before or {}, after or {}
        if _broker(old) == _broker(new):
            return [
                difference
                for name in dict.fromkeys([*old, *new])
                for difference in differences(old.get(name), new.get(name), f"{path}.{name}" if path else str(name))
            ]
        if (not old or _broker(old)) and (not new or _broker(new)):
            return [Difference(path, _as_text(old), _as_text(new))]
    return [] if before == after else [Difference(path or "value", before, after)]


def _broker(value: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the identity of a broker, or None if the value is none."""
    return (value["hostname"], value["servePort"]) if "hostname" in value and "servePort" in value else None


def _as_text(broker: Mapping[str, Any]) -> str | None:
    if not broker:
        return None
    more = [str(broker[name]) for name in ("role", "ip") if broker.get(name)]
    more += [f"sync {broker['syncPort']}"] if "syncPort" in broker else []
    return f"{broker['hostname']}:{broker['servePort']}" + (f" ({', '.join(more)})" if more else "")
