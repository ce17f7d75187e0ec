"""Core. How a message reads: as JSON for scripts, as a line for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qmq.message import ORDER_KEY
from qmq.tools.table import printable, utc


def message_json(
    *,
    id: str,
    broker_group: str,
    sequence: int,
    properties: Mapping[str, Any],
    tags: Any,
    created_ms: int,
    **more: Any,
) -> dict[str, Any]:
    """One message as `--json` prints it, and as Produce reads it back; what is empty is left out of `more`."""
    rest = dict(properties)
    order_key = more.pop("order_key", None) or rest.pop(ORDER_KEY, None)
    shown = {"id": id, "brokerGroup": broker_group, "sequence": sequence, "created": created_ms, "tags": sorted(tags)}
    shown |= {name: value for name, value in more.items() if value not in (None, "")}
    return shown | ({"orderKey": order_key} if order_key else {}) | {"properties": rest}


def line_of(message: Mapping[str, Any], form: str) -> str:
    """One message as text of one line."""
    if form == "json":
        return to_json(message)
    if form == "properties":
        return to_json(message["properties"])
    when = utc(message.get("stored") or message["created"])
    place = f"{message['brokerGroup']}/{message['sequence']}"
    tags = f"  [{','.join(message['tags'])}]" if message["tags"] else ""
    key = f"  key={message['orderKey']}" if message.get("orderKey") else ""
    content = message.get("problem") or to_json(message["properties"])
    return printable(f"{when}  {place}  {message['id']}{tags}{key}  {content}")


def to_json(value: object) -> str:
    """As JSON on one line; what is no valid Unicode is escaped, so that it can be printed."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
