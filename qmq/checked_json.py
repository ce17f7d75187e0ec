"""Core. JSON that says whether it is whole: one object, with the CRC-32 of the rest, as sorted JSON, in `crc`.

What is small and stands beside a log is kept so: identity, acknowledged points, list of segments, the audit's ledger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qmq.crc import crc32


def encode_checked(fields: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return the object; `indent` is for files that people read."""
    return json.dumps({"crc": _crc(fields), **fields}, indent=indent).encode()


def decode_checked(data: bytes) -> dict[str, Any]:
    """Return the fields without `crc`; raises ValueError if this is no such object, or a damaged one."""
    fields = json.loads(data)
    if not isinstance(fields, dict) or "crc" not in fields:
        raise ValueError("no object with a CRC")
    if fields.pop("crc") != _crc(fields):
        raise ValueError("wrong CRC")
    return fields


def _crc(fields: Mapping[str, Any]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())
