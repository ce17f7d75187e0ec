"""Core. Messages as text: typed by people, printed for people and for scripts.

A message's JSON has the members of `qmq.message_view` for its body.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

from qmq.message import ORDER_KEY, Message, Value, text_of
from qmq.message_view import body_bytes, body_line, json_type_of, one_line, properties_json, typed_properties, visible
from qmq.tools.table import printable, utc

_WHOLE = {"id": str, "tags": list, "orderKey": str, "contentType": str, "propertyTypes": dict}
"""Members of a whole message besides properties and body, with their types; others describe its origin."""
PREVIEW_BYTES = 2_000
"""Bytes of each body that lines and tables show."""
LINE_CHARS, CELL_CHARS = 500, 120
"""Characters of a body on a line, and in a table."""


def typed_messages(
    values: Mapping[str, str], lines: Iterable[str], body: bytes | None = None
) -> Iterable[Message | str]:
    """Make messages from the options of Produce: from `lines` with --file, else one message `count` times.

    Args:
        body: content of --body.

    Yields:
        Each message, or the fault of its line.
    """
    if values["file"]:
        yield from (_of_line(values, number, line) for number, line in enumerate(lines, start=1) if line.strip())
        return
    try:
        value = _object(values["json-body"]) if values["json-body"] else {}
        message = _message(values, value | json.loads(values["property"] or "{}"))
    except ValueError as error:
        yield f"--json-body: {error}"
        return
    for _ in repeat(None, int(values["count"])):
        yield Message(
            message.subject,
            message.properties,
            body=message.body if body is None else body,
            content_type=message.content_type if body is None else values["content-type"] or json_type_of(body),
            tags=message.tags,
            id=message.id,
            order_key=message.order_key,
        )


def words_of(text: str) -> tuple[str, ...]:
    """Split `a,b` into words."""
    return tuple(word for word in text.split(",") if word)


def _of_line(values: Mapping[str, str], number: int, line: str) -> Message | str:
    try:
        return _message(values, _object(line))
    except ValueError as error:
        return f"line {number}: {error}"


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _message(values: Mapping[str, str], value: dict[str, Any]) -> Message:
    """Make a message of a JSON object: members are properties, unless it is a whole message as Browse prints it."""
    whole: dict[str, Any] = {}
    if isinstance(value.get("properties"), dict):
        whole, value = value, value["properties"]
    for name, kind in _WHOLE.items():
        if name in whole and not isinstance(whole[name], kind):
            raise ValueError(f"{name!r} is no {kind.__name__}")
    return Message(
        values["subject"],
        typed_properties(_texts(value), whole.get("propertyTypes", {})),
        body=body_bytes(whole),
        content_type=whole.get("contentType"),
        tags=[*words_of(values["tag"]), *whole.get("tags", ())],
        id=whole.get("id"),
        order_key=values["orderKey"] or whole.get("orderKey"),
    )


def _texts(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of properties: texts, numbers and booleans as they are, lists and objects as JSON texts."""
    return {
        name: json.dumps(item, ensure_ascii=False) if isinstance(item, dict | list) else item
        for name, item in value.items()
        if item is not None
    }


def message_json(
    *,
    id: str,
    broker_group: str,
    sequence: int,
    properties: Mapping[str, Value],
    tags: Any,
    created_ms: int,
    body: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a message as `--json` prints it and Produce reads it; empty fields of `more` are left out.

    Args:
        body: members about its body.
    """
    rest, types = properties_json(properties)
    order_key = more.pop("order_key", None) or rest.pop(ORDER_KEY, None)
    shown = {"id": id, "brokerGroup": broker_group, "sequence": sequence, "created": created_ms, "tags": sorted(tags)}
    shown |= {name: value for name, value in more.items() if value not in (None, "")}
    shown |= {name: value for name, value in (("orderKey", order_key), ("propertyTypes", types)) if value}
    return {**shown, "properties": rest, **(body or {})}


def line_of(message: Mapping[str, Any], form: str) -> str:
    """Format a message as one line."""
    if form == "json":
        return to_json(message)
    if form == "properties":
        return to_json(message["properties"])
    when = utc(message.get("stored") or message["created"])
    place = f"{message['brokerGroup']}/{message['sequence']}"
    tags = f"  [{','.join(message['tags'])}]" if message["tags"] else ""
    key = f"  key={message['orderKey']}" if message.get("orderKey") else ""
    body = body_line(message, LINE_CHARS)
    content = message.get("problem") or "  ".join(filter(None, (to_json(message["properties"]), body)))
    return printable(one_line(f"{when}  {place}  {message['id']}{tags}{key}  {content}"))


def to_json(value: object) -> str:
    """Format as JSON on one line; invalid Unicode and characters that act on a terminal are escaped."""
    return visible(json.dumps(value, ensure_ascii=False, default=text_of))
