"""Core. CRC-32 by zlib's polynomial, of all bytes sent and stored (decision 7), and JSON objects with their own CRC.

Master, slave and readers each check every byte. Servers use zlib-ng, with the processor's own instructions. Python's
zlib, which needs no package on clients, computes the same value at a sixteenth of the speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]

T = TypeVar("T")


def encode_checked(fields: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return `fields` as a JSON object with its CRC; `indent` is for files that people read."""
    return json.dumps({"crc": _crc(fields), **fields}, indent=indent).encode()


def decode_checked(data: bytes) -> dict[str, Any]:
    """Return the fields of such an object without `crc`; raises ValueError if it is damaged, or another one."""
    stored = json.loads(data)
    if not isinstance(stored, dict) or "crc" not in stored:
        raise ValueError("no object with a CRC")
    if stored.pop("crc") != _crc(stored):
        raise ValueError("wrong CRC")
    return stored


def of_known_fields(kind: type[T], stored: Mapping[str, Any]) -> T:
    """Make a dataclass or named tuple of stored fields. Fields of later versions are left out, so that a downgrade
    can read them.

    Raises:
        TypeError: a field is missing.
    """
    names = getattr(kind, "_fields", None) or [field.name for field in fields(cast(Any, kind))]
    return kind(**{name: stored[name] for name in names if name in stored})


def _crc(fields: Mapping[str, Any]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())
