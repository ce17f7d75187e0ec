"""Core. Format of a row's `content` in the outbox: a message as JSON.

    {"messageId": "…", "subject": "…", "tags": ["…"], "storeAtFailed": false, "durable": true,
     "attrs": {"amount": "5", "qmq_createTime": "1760000000000"}, "types": {"amount": "int"}}

The keys are QMQ's, so QMQ's watchdog can send these rows; it ignores `types`. `attrs` holds each property as its text
on the wire: QMQ's reader turns a JSON 5 into 5.0, and consumers that expect an integer fail. `types` holds "int",
"float", "bool" or "datetime" for values other than texts. Creation time, order key and limit of retries are in `attrs`
under QMQ's names. All characters are ASCII, for any character set of the table.

A message with a body has three differences, and `contentType` only if the message has one:

    "types": [["amount", "int"]], "body": "aGVsbG8=", "contentType": "text/plain"

QMQ's watchdog ignores them and sends the properties. Earlier versions of qmq, without bodies, expect an object as
`types`, so they park the row; otherwise they would send the message without its body.

QMQ's own rows are readable, too. In them an int is a JSON number and a long is a text; both are sent as their digits.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from qmq.codec import expires_after_ms
from qmq.errors import InvalidMessage
from qmq.message import EXPIRES_AFTER, ORDER_KEY, RESERVED, RETRIES_MAX, Message, Value, body_bytes, text_of
from qmq.plain import plain

CREATED = "qmq_createTime"
"""Attribute with the creation time, in ms since 1970 UTC by the producer's clock."""
DUE = "qmq_scheduleReceiveTime"
"""QMQ's mark of a delayed message."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TYPES: dict[str, Callable[[str], Value]] = {
    "bool": lambda text: {"true": True, "false": False}[text],
    "int": int,
    "float": float,
    "datetime": lambda text: _EPOCH + timedelta(milliseconds=int(text)),
}


def encode_row(message: Message, now_ms: int) -> str:
    """Return the `content` of a message's row.

    Args:
        now_ms: time of writing, ms since 1970 UTC; decoded as `created_ms`.

    Raises:
        InvalidMessage: the message has no id, or a property that cannot be sent.
    """
    if not message.id:
        raise InvalidMessage("a message without an id cannot wait in an outbox: sent again, it would be another one")
    attributes = {CREATED: str(now_ms)}
    types: dict[str, str] = {}
    for name, value in message.properties.items():
        if not isinstance(name, str) or name.startswith(RESERVED):
            raise InvalidMessage(f"property {name!r}: a name is a str that does not begin with {RESERVED!r}")
        attributes[name] = text_of(value)
        if not isinstance(value, str):
            types[name] = _type_of(value)
    if message.order_key is not None:
        attributes[ORDER_KEY] = message.order_key
    if message.retries_max is not None:
        attributes[RETRIES_MAX] = str(plain(message.retries_max))
    if message.expires_after is not None:
        attributes[EXPIRES_AFTER] = str(expires_after_ms(message.expires_after))
    row: dict[str, Any] = {
        "messageId": message.id,
        "subject": message.subject,
        "tags": sorted(message.tags),
        "storeAtFailed": False,
        "durable": True,
        "attrs": attributes,
        "types": types,
    }
    if message.body is not None:
        row |= {"types": list(types.items()), "body": b64encode(body_bytes(message.body)).decode()}
        row |= {} if message.content_type is None else {"contentType": plain(message.content_type)}
    return json.dumps(row, separators=(",", ":"))


def _type_of(value: Value) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "float" if isinstance(value, float) else "datetime"


def decode_row(content: str | None) -> Message:
    """Return the message of a row, with `created_ms` if present.

    Raises:
        InvalidMessage: the row cannot be sent, for the given reason; an operator must decide.
    """
    if not content:
        raise InvalidMessage("the row is empty")
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"the row is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidMessage("the row is no JSON object")
    attributes = _of(row, "attrs", dict, {})
    if DUE in attributes:
        raise InvalidMessage("the row is a delayed message of QMQ; sent now, it would be early")
    body = _of(row, "body", str, None)
    types = _of(row, "types", dict, {}) if body is None else _pairs(_of(row, "types", list, []))
    tags, expires_ms = _of(row, "tags", list, []), _number(attributes, EXPIRES_AFTER)
    if not all(isinstance(tag, str) for tag in tags):
        raise InvalidMessage("'tags' of the row are not all texts")
    message = Message(
        _of(row, "subject", str),
        {name: _value(name, value, types.get(name)) for name, value in attributes.items() if _is_property(name, value)},
        body=None if body is None else _bytes(body),
        content_type=_of(row, "contentType", str, None),
        tags=tags,
        id=_of(row, "messageId", str),
        order_key=_of(attributes, ORDER_KEY, str, None),
        retries_max=_number(attributes, RETRIES_MAX),
        expires_after=None if expires_ms is None else expires_ms / 1000,
    )
    message.created_ms = _number(attributes, CREATED) or 0
    return message


def _pairs(types: list[Any]) -> dict[str, str]:
    if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in types):
        raise InvalidMessage(f"'types' of the row is {str(types)[:50]}, not pairs of texts")
    return dict(types)


def _bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidMessage(f"the body of the row is no base64: {error}") from None


def _is_property(name: str, value: object) -> bool:
    """Return whether an attribute is a property: not one of QMQ's own, and not null, which some writers use for an
    absent value.
    """
    return value is not None and not name.startswith(RESERVED)


def _value(name: str, value: object, type_name: object) -> Value:
    if type_name is None:
        if isinstance(value, str | int | float):
            return value
        raise InvalidMessage(f"property {name!r} of the row is {type(value).__name__}, not a text or a number")
    try:
        return _TYPES[str(type_name)](str(value))
    except (KeyError, ValueError, OverflowError):
        raise InvalidMessage(f"property {name!r} of the row is no {str(type_name)[:20]}") from None


_MUST_BE = object()


def _of(row: dict[str, Any], name: str, kind: type, default: Any = _MUST_BE) -> Any:
    """Return `row[name]`, checked to be a `kind`; without a default it must be present and not empty."""
    value = row.get(name)
    if value is None and default is not _MUST_BE:
        return default
    if not isinstance(value, kind) or (default is _MUST_BE and not value):
        raise InvalidMessage(f"{name!r} of the row is {str(value)[:50]!r}")
    return value


def _number(attributes: dict[str, Any], name: str) -> int | None:
    """Return one of QMQ's numbers, written as a text or a number."""
    value = attributes.get(name)
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidMessage(f"{name!r} of the row is {str(value)[:50]!r}, not a whole number") from None
