"""Core. Messages as text: typed by people, printed for people and for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

from qmq.message import ORDER_KEY, Message, text_of
from qmq.tools.table import printable, utc

_WHOLE = {"id": str, "tags": list, "orderKey": str}
"""Members of a whole message besides its properties, with their types; others describe its origin."""


def typed_messages(values: Mapping[str, str], lines: Iterable[str]) -> Iterable[Message | str]:
    """Make messages from the options of Produce: from `lines` with --file, else one message `count` times.

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
            message.subject, message.properties, tags=message.tags, id=message.id, order_key=message.order_key
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
    properties = {name: _text(item) for name, item in value.items() if item is not None}
    return Message(
        values["subject"],
        properties,
        tags=[*words_of(values["tag"]), *whole.get("tags", ())],
        id=whole.get("id"),
        order_key=values["orderKey"] or whole.get("orderKey"),
    )


def _text(value: Any) -> Any:
    """Return a property value: text, number or boolean; others as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


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
    """Return a message as `--json` prints it and Produce reads it; empty fields of `more` are left out."""
    rest = dict(properties)
    order_key = more.pop("order_key", None) or rest.pop(ORDER_KEY, None)
    shown = {"id": id, "brokerGroup": broker_group, "sequence": sequence, "created": created_ms, "tags": sorted(tags)}
    shown |= {name: value for name, value in more.items() if value not in (None, "")}
    return shown | ({"orderKey": order_key} if order_key else {}) | {"properties": rest}


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
    content = message.get("problem") or to_json(message["properties"])
    return printable(f"{when}  {place}  {message['id']}{tags}{key}  {content}")


def to_json(value: object) -> str:
    """Format as JSON on one line; invalid Unicode is escaped, so that it can be printed."""
    return json.dumps(value, ensure_ascii=False, default=text_of).encode("utf-8", "backslashreplace").decode()
